/* A libnvidia-ml.so.1 that says what a file says, so that the real pynvml can be tested without a driver.
 *
 * NVML_STUB_STATE names the file; it is read at every call, one thing per line:
 *   gpu UUID TOTAL RESERVED FREE       a device (bytes); their order is NVML's index
 *   mig PARENT UUID TOTAL RESERVED FREE    a MIG instance of the device with that index
 *   process UUID KIND PID BYTES        KIND is compute or graphics, BYTES a number or N/A
 *   compute_mode UUID MODE
 *   fail FUNCTION CODE AFTER           after AFTER good calls of FUNCTION every further one returns CODE, until the line is gone
 *   epoch N                            the driver was loaded again: handles and references of an earlier epoch are stale
 * FUNCTION: init, shutdown, open, memory (both versions), memory_v2, processes, count, driver.
 *
 * With -DV1_ONLY it lacks nvmlDeviceGetMemoryInfo_v2 and the _v3 process lists, as old drivers do.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

typedef struct { char uuid[96]; unsigned long long total, reserved, free; int parent; } device_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { char name[32]; int calls; } counter_t;

#define MOST 32
static device_t handles[MOST]; /* a handle is an address in here, and stays good whatever the file says later */
static int handle_epoch[MOST], handle_count;
static counter_t counters[MOST];
static int references, epoch_of_init;

static FILE *state(void) {
    const char *path = getenv("NVML_STUB_STATE");
    return path ? fopen(path, "r") : NULL;
}

static int epoch(void) {
    char line[256];
    int found = 0;
    FILE *file = state();
    while (file && fgets(line, sizeof line, file)) sscanf(line, "epoch %d", &found);
    if (file) fclose(file);
    return found;
}

static int failing(const char *function) {
    char line[256], name[32];
    int code, after, found = SUCCESS, i;
    FILE *file = state();
    for (i = 0; i < MOST && counters[i].name[0] && strcmp(counters[i].name, function); i++) {}
    strcpy(counters[i].name, function);
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "fail %31s %d %d", name, &code, &after) == 3 && !strcmp(name, function) && counters[i].calls >= after) found = code;
    if (file) fclose(file);
    if (found == SUCCESS) counters[i].calls++;
    return found;
}

static int ready(void) {
    if (references < 1) return UNINITIALIZED;
    return epoch_of_init == epoch() ? SUCCESS : UNKNOWN;
}

static int parse(const char *line, device_t *device) {
    device->parent = -1;
    if (sscanf(line, "gpu %95s %llu %llu %llu", device->uuid, &device->total, &device->reserved, &device->free) == 4) return 1;
    return sscanf(line, "mig %d %95s %llu %llu %llu", &device->parent, device->uuid, &device->total, &device->reserved, &device->free) == 5;
}

/* The nth device that matches: by UUID, or the nth GPU (parent -1) or MIG instance of a parent. */
static int find(const char *uuid, int parent, int nth, device_t *device) {
    char line[256];
    int found = 0;
    FILE *file = state();
    while (file && !found && fgets(line, sizeof line, file))
        if (parse(line, device) && (uuid ? !strcmp(device->uuid, uuid) : device->parent == parent && nth-- == 0)) found = 1;
    if (file) fclose(file);
    return found;
}

static int give(int found, const device_t *device, void **handle) {
    if (!found) return NOT_FOUND;
    if (handle_count == MOST) return UNKNOWN;
    handles[handle_count] = *device;
    handle_epoch[handle_count] = epoch_of_init;
    *handle = &handles[handle_count++];
    return SUCCESS;
}

static int refresh(void *handle, device_t *device) {
    long at = (device_t *)handle - handles;
    int code = ready();
    if (code != SUCCESS) return code;
    if (at < 0 || at >= handle_count || handle_epoch[at] != epoch_of_init) return INVALID;
    return find(handles[at].uuid, -1, 0, device) ? SUCCESS : 15; /* GPU is lost */
}

int nvmlInitWithFlags(unsigned int flags) {
    int code = failing("init");
    (void)flags;
    if (code != SUCCESS) return code;
    if (references++ == 0) epoch_of_init = epoch(); /* only the first reference looks for the driver */
    return SUCCESS;
}

int nvmlShutdown(void) {
    int code = failing("shutdown");
    if (code != SUCCESS) return code;
    if (references < 1) return UNINITIALIZED;
    references--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == UNKNOWN ? "Unknown Error" : "an error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    int code = failing("driver");
    if (code == SUCCESS) code = ready();
    if (code == SUCCESS) snprintf(text, size, "580.12.34");
    return code;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return ready();
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    device_t device;
    int code = failing("count");
    if (code == SUCCESS) code = ready();
    if (code == SUCCESS)
        for (*count = 0; find(NULL, -1, (int)*count, &device); ++*count) {}
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    device_t device;
    int code = ready();
    return code != SUCCESS ? code : give(find(NULL, -1, (int)index, &device), &device, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    device_t device;
    int code = failing("open");
    if (code == SUCCESS) code = ready();
    return code != SUCCESS ? code : give(find(uuid, -1, 0, &device), &device, handle);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int size) {
    device_t device;
    int code = refresh(handle, &device);
    if (code == SUCCESS) snprintf(text, size, "%s", device.uuid);
    return code;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned int size) {
    device_t device;
    int code = refresh(handle, &device);
    if (code == SUCCESS) snprintf(text, size, "Stub %s", device.parent < 0 ? "GPU" : "MIG");
    return code;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *now, unsigned int *pending) {
    device_t device, instance;
    long at = (device_t *)handle - handles;
    int i, code = refresh(handle, &device);
    if (code != SUCCESS || handles[at].parent >= 0) return code != SUCCESS ? code : INVALID;
    for (i = 0; find(NULL, -1, i, &device) && strcmp(device.uuid, handles[at].uuid); i++) {}
    *now = *pending = (unsigned int)find(NULL, i, 0, &instance);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count) {
    device_t device;
    *count = 7;
    return refresh(handle, &device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **instance) {
    device_t device;
    long at = (device_t *)handle - handles;
    int i, code = refresh(handle, &device);
    if (code != SUCCESS) return code;
    for (i = 0; find(NULL, -1, i, &device) && strcmp(device.uuid, handles[at].uuid); i++) {}
    return give(find(NULL, i, (int)index, &device), &device, instance);
}

int nvmlDeviceGetComputeMode(void *handle, unsigned int *mode) {
    char line[256], uuid[96];
    device_t device;
    int code = refresh(handle, &device);
    unsigned int found = 0, value;
    FILE *file = code == SUCCESS ? state() : NULL;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "compute_mode %95s %u", uuid, &value) == 2 && !strcmp(uuid, device.uuid)) found = value;
    if (file) fclose(file);
    *mode = found;
    return code;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    device_t device;
    int code = failing("memory");
    if (code == SUCCESS) code = refresh(handle, &device);
    if (code != SUCCESS) return code;
    memory->total = device.total;
    memory->free = device.free;
    memory->used = device.total - device.free;
    return SUCCESS;
}

static int processes(void *handle, const char *kind, unsigned int *count, process_t *list) {
    char line[256], uuid[96], found[16], bytes[32];
    device_t device;
    unsigned int pid, room = *count, seen = 0;
    int code = failing("processes");
    FILE *file;
    if (code == SUCCESS) code = refresh(handle, &device);
    if (code != SUCCESS) return code;
    file = state();
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "process %95s %15s %u %31s", uuid, found, &pid, bytes) != 4 || strcmp(uuid, device.uuid) || strcmp(found, kind)) continue;
        if (list && seen < room) {
            list[seen].pid = pid;
            list[seen].used = strcmp(bytes, "N/A") ? strtoull(bytes, NULL, 10) : ~0ULL;
            list[seen].gpu_instance = list[seen].compute_instance = ~0U;
        }
        seen++;
    }
    if (file) fclose(file);
    *count = seen;
    return seen > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned int *count, process_t *list) { return processes(handle, "compute", count, list); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(void *handle, unsigned int *count, process_t *list) { return processes(handle, "graphics", count, list); }

#ifndef V1_ONLY
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_t *list) { return processes(handle, "compute", count, list); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned int *count, process_t *list) { return processes(handle, "graphics", count, list); }

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    device_t device;
    int code = failing("memory_v2");
    if (code == SUCCESS) code = failing("memory");
    if (code == SUCCESS) code = refresh(handle, &device);
    if (code != SUCCESS) return code;
    if (memory->version != 0x02000028) return 25; /* argument version mismatch */
    memory->total = device.total;
    memory->reserved = device.reserved;
    memory->free = device.free;
    memory->used = device.total - device.reserved - device.free;
    return SUCCESS;
}
#endif
