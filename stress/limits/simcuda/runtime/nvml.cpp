// NVML: what `nvidia-smi` would say of the simulated devices. It counts some memory on top of what CUDA calls the total, as the real one does.
#include "simcuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <strings.h>

using namespace sim;

namespace {

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };

typedef void* Device;
struct Memory {
    unsigned long long total, free, used;
};
struct MemoryV2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct ProcessInfoV1 {
    unsigned pid;
    unsigned long long bytes;
};
struct ProcessInfoV2 {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

int initialised;

Device handle_of(int device) { return (Device)(uintptr_t)(0x30 + device); }
int index_of(Device handle) { return (int)(uintptr_t)handle - 0x30; }

// A slice of a device has a UUID of its own, and another prefix.
std::string uuid_of(const Locked& locked, int device) {
    char text[64];
    const unsigned char* u = UUID;
    snprintf(text, sizeof text, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", locked->mig ? "MIG" : "GPU", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15] + device);
    return text;
}

template <class Info>
int list_processes(const Locked& locked, int device, unsigned* count, Info* out) {
    if (locked->mig) return NO_PERMISSION;
    const unsigned room = *count;
    *count = 0;
    if (locked->nvml_hides) return OK;
    for (const Process& each : locked->processes) {
        if (!each.pid || !each.context[device]) continue;
        if (*count < room && out) {
            out[*count] = Info{};
            out[*count].pid = (unsigned)each.pid;
            out[*count].bytes = each.context[device] + each.bytes[device];
        }
        ++*count;
    }
    return *count > room ? TOO_SMALL : OK;
}

}  // namespace

// At the start of every call but nvmlInit.
#define NVML()                                                \
    COUNT();                                                  \
    const Locked locked;                                      \
    if (locked->nvml_error) return (int)locked->nvml_error;   \
    if (!initialised) return UNINITIALIZED

API int nvmlInit_v2() {
    COUNT();
    const Locked locked;
    if (locked->nvml_error) return (int)locked->nvml_error;
    initialised++;
    return OK;
}
API int nvmlInit() { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlShutdown() {
    COUNT();
    const Locked locked;
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return OK;
}
API const char* nvmlErrorString(int error) {
    switch (error) {
        case OK: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID: return "Invalid Argument";
        case UNSUPPORTED: return "Not Supported";
        case NO_PERMISSION: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case TOO_SMALL: return "Insufficient Size";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        default: return "Unknown Error";
    }
}

API int nvmlDeviceGetCount_v2(unsigned* count) {
    NVML();
    *count = locked->devices;
    return OK;
}
API int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
    NVML();
    if (index >= locked->devices) return INVALID;
    *device = handle_of((int)index);
    return OK;
}
API int nvmlDeviceGetHandleByUUID(const char* uuid, Device* device) {
    NVML();
    for (int i = 0; i < (int)locked->devices; i++)
        if (!strcasecmp(uuid, uuid_of(locked, i).c_str())) {
            *device = handle_of(i);
            return OK;
        }
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device* device) {
    NVML();
    const char* bus = strchr(id, ':');
    const long index = bus ? strtol(bus + 1, nullptr, 16) - 1 : -1;
    if (index < 0 || index >= (long)locked->devices) return NOT_FOUND;
    *device = handle_of((int)index);
    return OK;
}
API int nvmlDeviceGetUUID(Device device, char* out, unsigned size) {
    NVML();
    snprintf(out, size, "%s", uuid_of(locked, index_of(device)).c_str());
    return OK;
}
API int nvmlDeviceGetName(Device, char* out, unsigned size) {
    NVML();
    snprintf(out, size, "%s", NAME);
    return OK;
}
API int nvmlDeviceGetMemoryInfo(Device device, Memory* out) {
    NVML();
    if (locked->unified) return UNSUPPORTED;
    const size_t free = free_bytes(locked, index_of(device)), total = locked->total + locked->reserved;
    *out = {total, free, total - free};
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2* out) {
    NVML();
    if (locked->unified) return UNSUPPORTED;
    const int index = index_of(device);
    *out = {out->version, locked->total + locked->reserved, locked->reserved, free_bytes(locked, index), used(locked, index)};
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* count, ProcessInfoV1* out) {
    NVML();
    return list_processes(locked, index_of(device), count, out);
}
API int nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned* count, ProcessInfoV2* out) {
    NVML();
    return list_processes(locked, index_of(device), count, out);
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, ProcessInfoV2* out) {
    return nvmlDeviceGetComputeRunningProcesses_v2(device, count, out);
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(Device, unsigned* count, void*) {
    NVML();
    *count = 0;
    return OK;
}
API int nvmlDeviceGetGraphicsRunningProcesses_v2(Device device, unsigned* count, void* out) { return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out); }
API int nvmlDeviceGetGraphicsRunningProcesses(Device device, unsigned* count, void* out) { return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out); }
API int nvmlDeviceGetComputeMode(Device, unsigned* mode) {
    NVML();
    *mode = 0;
    return OK;
}
API int nvmlDeviceGetMigMode(Device, unsigned* present, unsigned* pending) {
    NVML();
    *present = *pending = (unsigned)locked->mig;
    return OK;
}
API int nvmlDeviceGetMaxMigDeviceCount(Device, unsigned* count) {
    NVML();
    *count = locked->mig ? 7 : 0;
    return OK;
}
API int nvmlSystemGetDriverVersion(char* out, unsigned size) {
    NVML();
    snprintf(out, size, "580.00.simulated");
    return OK;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    NVML();
    *version = 13000;
    return OK;
}
API int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return UNSUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return UNSUPPORTED; }
API int nvmlDeviceGetP2PStatus() { return UNSUPPORTED; }
