// What all processes on the simulated devices share: a file with one entry per process, so that a co-tenant is a real process. What a process
// held is free again when it has ended, however it did.
#include "simcuda.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sim {
namespace {

constexpr unsigned MAGIC = 0x51C0DA01;  // another one where the layout of Shared differs

Shared* shared;
int file = -1;
int opened_by;  // after a fork the file must be opened again: a lock belongs to the open file, which parent and child would share
int depth;
int own_entry = -1;
int own_pid;

// When a process began, in clock ticks since the machine did; 0 for one that is gone. A zombie holds nothing.
unsigned long start_of(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int f = open(path, O_RDONLY | O_CLOEXEC);
    if (f < 0) return 0;
    const ssize_t n = read(f, text, sizeof text - 1);
    close(f);
    if (n <= 0) return 0;
    text[n] = 0;
    char* field = strrchr(text, ')');  // the name before it may hold blanks
    if (!field || !field[1]) return 0;
    field += 2;
    if (*field == 'Z' || *field == 'X') return 0;
    for (int i = 0; i < 19 && field; i++)
        if ((field = strchr(field, ' '))) field++;
    return field ? strtoul(field, nullptr, 10) : 0;
}

void open_file() {
    char otherwise[64];
    snprintf(otherwise, sizeof otherwise, "/dev/shm/simcuda-%u", getuid());
    const char* name = getenv("SIMCUDA_FILE");
    if (file >= 0) close(file);
    file = open(name && *name ? name : otherwise, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) {
        perror("simcuda: SIMCUDA_FILE");
        abort();
    }
    opened_by = getpid();
    flock(file, LOCK_EX);
    struct stat status;
    if (fstat(file, &status) || ((size_t)status.st_size < sizeof(Shared) && ftruncate(file, sizeof(Shared)))) abort();
    if (!shared) shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) abort();
}

// Frees the entries of those that have ended. Where nobody is left, the devices are new: as the environment wants them.
void tidy() {
    bool anybody = false;
    if (shared->magic == MAGIC)
        for (Process& each : shared->processes) {
            if (each.pid && start_of(each.pid) != each.started) each = Process{};
            anybody = anybody || each.pid;
        }
    if (anybody) return;
    memset(shared, 0, sizeof *shared);
    shared->magic = MAGIC;
    shared->devices = (unsigned)setting("SIMCUDA_DEVICES", 1);
    if (shared->devices > DEVICES) shared->devices = DEVICES;
    shared->total = setting("SIMCUDA_TOTAL", 8192 * MiB);
    shared->reserved = 300 * MiB;
}

}  // namespace

size_t setting(const char* variable, size_t otherwise) {
    const char* text = getenv(variable);
    return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::recursive_mutex& process_lock() {
    static auto* lock = new std::recursive_mutex;  // never destroyed: threads may outlive the end of main
    return *lock;
}

Locked::Locked() {
    process_lock().lock();
    if (depth++) return;
    if (file < 0 || opened_by != getpid())
        open_file();
    else
        flock(file, LOCK_EX);
    tidy();
}

Locked::~Locked() {
    if (!--depth) flock(file, LOCK_UN);
    process_lock().unlock();
}

Shared* Locked::operator->() const { return shared; }

Process& own(const Locked&) {
    if (own_entry >= 0 && own_pid == getpid()) return shared->processes[own_entry];
    for (int i = 0; i < PROCESSES; i++)
        if (!shared->processes[i].pid) {
            own_entry = i;
            own_pid = getpid();
            return shared->processes[i] = Process{own_pid, start_of(own_pid), {}, {}};
        }
    fprintf(stderr, "simcuda: more than %d processes on one device\n", PROCESSES);
    abort();
}

size_t used(const Locked&, int device) {
    size_t sum = shared->foreign[device];
    for (const Process& each : shared->processes)
        if (each.pid) sum += each.context[device] + each.bytes[device];
    return sum;
}

size_t free_bytes(const Locked& locked, int device) {
    const size_t gone = used(locked, device);
    return gone < shared->total ? shared->total - gone : 0;
}

bool lost() { return shared && __atomic_load_n(&shared->lost, __ATOMIC_RELAXED); }

bool charge(size_t bytes, int device) {
    const Locked locked;
    if (refuses_memory() || bytes > free_bytes(locked, device)) return false;
    own(locked).bytes[device] += bytes;
    return true;
}

void discharge(size_t bytes, int device) {
    const Locked locked;
    own(locked).bytes[device] -= bytes;
}

}  // namespace sim
