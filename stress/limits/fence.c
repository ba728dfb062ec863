/* A device's memory, made of this machine's: preloaded, it lets posix_memalign fail when a budget is passed.
 *
 * Every process that is started with LD_PRELOAD on this library and ELASTIC_MBS_FENCE naming one file shares one device:
 *
 *     file, 4 KiB, mapped MAP_SHARED     header: budget, largest, minimum, lock
 *                                        slot 0: pid, start time, live, peak, failures
 *                                        slot 1: ...
 *     at the end of each counted block   a tag: whose it is, and its size
 *
 * Counted are the blocks of `minimum` bytes and more that posix_memalign gives with an alignment of 64 and more: what torch's CPU allocator asks
 * for, and the workspaces of oneDNN. Python, the heap, libraries and threads are outside, so nothing but an operation on tensors ever fails.
 *
 * A process may be killed at any instruction. What it shares is only ever changed by one store into its own slot, the lock is a robust mutex, and
 * whoever finds no room first looks whether the other processes are still alive. A forked child has memory of its own: tags of its parent are none of
 * its own, and it takes a slot when it first needs one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define ALIGNMENT 64
#define FLOOR 1024 /* nothing smaller is counted, so that free() can tell most blocks at a glance */
#define FILE_SIZE 4096
#define SLOTS 62

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct slot {
    int64_t pid, started, live, peak, failures, unused[3];
};

struct fence {
    int64_t budget, largest, minimum; /* the parent's to write, at any time */
    _Atomic int64_t ready;
    int64_t unused[4];
    union {
        pthread_mutex_t lock;
        char room[64];
    };
    struct slot slots[SLOTS];
};
_Static_assert(sizeof(struct fence) == FILE_SIZE, "fence.py reads it by these offsets");

struct tag {
    uint64_t mark;
    size_t size;
};

static struct fence *fence;
static struct slot *mine;
static uint64_t salt; /* of this process's marks */

static void lock(void) {
    if (pthread_mutex_lock(&fence->lock) == EOWNERDEAD) pthread_mutex_consistent(&fence->lock);
}

static void unlock(void) { pthread_mutex_unlock(&fence->lock); }

/* The start time of a process, in clock ticks; -1 if it has ended. A process id alone may be another's by now. */
static int64_t start_of(int64_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return -1;
    text[size] = 0;
    char *field = strrchr(text, ')'); /* the name before it may hold anything */
    if (!field || field[1] == 0 || strchr("ZXx", field[2])) return -1;
    for (int number = 2; field && number < 22; number++) field = strchr(field + 1, ' ');
    return field ? strtoll(field, NULL, 10) : -1;
}

/* Empties the slots of processes that have ended. With the lock held. */
static void reap(void) {
    for (struct slot *slot = fence->slots; slot < fence->slots + SLOTS; slot++)
        if (slot != mine && slot->pid && start_of(slot->pid) != slot->started) slot->pid = slot->live = 0;
}

static int64_t live_of_all(void) {
    int64_t live = 0;
    for (struct slot *slot = fence->slots; slot < fence->slots + SLOTS; slot++) live += slot->live;
    return live;
}

/* This process's slot, taken when it is first needed; NULL if there is none left. With the lock held. */
static struct slot *own(void) {
    for (int again = 0; !mine && again < 2; again++) {
        for (struct slot *slot = fence->slots; !mine && slot < fence->slots + SLOTS; slot++)
            if (!slot->pid) mine = slot;
        if (!mine) reap();
    }
    if (mine && !mine->pid) {
        memset(mine, 0, sizeof *mine);
        mine->started = start_of(getpid());
        mine->pid = getpid();
    }
    return mine;
}

static struct tag *tag_of(void *block) { return (struct tag *)((char *)block + malloc_usable_size(block)) - 1; }

static uint64_t mark_of(void *block) { return (uintptr_t)block * 0x9E3779B97F4A7C15ull ^ salt; }

static int reserve(size_t size) {
    lock();
    struct slot *slot = own();
    int fits = slot && (int64_t)size <= fence->largest;
    if (fits && live_of_all() + (int64_t)size > fence->budget) {
        reap();
        fits = live_of_all() + (int64_t)size <= fence->budget;
    }
    if (fits) {
        slot->live += size;
        if (slot->live > slot->peak) slot->peak = slot->live;
    } else if (slot) {
        slot->failures++;
    }
    unlock();
    return fits;
}

static void give_back(size_t size, int failed) {
    lock();
    mine->live -= size;
    mine->failures += failed;
    unlock();
}

API int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || !alignment || alignment & (alignment - 1)) return EINVAL;
    int counted = fence && alignment >= ALIGNMENT && size >= FLOOR && size <= INT64_MAX && (int64_t)size >= fence->minimum;
    if (counted && !reserve(size)) return ENOMEM;
    int kept = errno; /* posix_memalign leaves it alone */
    void *block = __libc_memalign(alignment, size + (counted ? sizeof(struct tag) : 0));
    errno = kept;
    if (counted && block) *tag_of(block) = (struct tag){mark_of(block), size};
    if (counted && !block) give_back(size, 1);
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

API void free(void *block) {
    if (fence && mine && block && (uintptr_t)block % ALIGNMENT == 0 && malloc_usable_size(block) >= FLOOR) {
        struct tag *tag = tag_of(block);
        if (tag->mark == mark_of(block)) {
            tag->mark = 0;
            give_back(tag->size, 0);
        }
    }
    __libc_free(block);
}

static void begin_anew(void) {
    mine = NULL;
    salt = (uint64_t)getpid() << 32 | (uint64_t)start_of(getpid());
}

/* Whoever comes first makes the lock; the parent has left the file at zero there. */
static void make_lock(struct fence *shared) {
    int64_t untouched = 0;
    if (atomic_compare_exchange_strong(&shared->ready, &untouched, 1)) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&shared->lock, &kind);
        pthread_mutexattr_destroy(&kind);
        atomic_store(&shared->ready, 2);
    }
    while (atomic_load(&shared->ready) != 2) sched_yield();
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ELASTIC_MBS_FENCE");
    struct stat found;
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    int whole = fstat(file, &found) == 0 && found.st_size == FILE_SIZE;
    void *shared = whole ? mmap(NULL, FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (shared == MAP_FAILED) return;
    make_lock(shared);
    begin_anew();
    pthread_atfork(NULL, NULL, begin_anew);
    fence = shared;
}
