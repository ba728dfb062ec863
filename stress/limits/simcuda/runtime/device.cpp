// The runtime's calls on devices, contexts and errors.
//
// One library under three names (libcudart.so.13, libcuda.so.1, libnvidia-ml.so.1):
//
//   tenants.cpp  who holds how much of the devices      device.cpp   devices, contexts, errors
//   memory.cpp   allocations and copies                 streams.cpp  streams and events
//   kernels.cpp  kernels, none of which is run          driver.cpp   the driver's calls: expandable segments
//   nvml.cpp     NVML                                   faults.cpp   what is told to fail; what is counted
#include "simcuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

namespace sim {

const unsigned char UUID[16] = {0x51, 0xc0, 0xda, 0x00, 0x12, 0x34, 0x46, 0x78, 0x8a, 0xbc, 0xde, 0xf0, 0x00, 0x00, 0x00, 0x01};
const char* const NAME = "Simulated CUDA device";

namespace {

thread_local cudaError_t last_error = cudaSuccess;
bool contexts[DEVICES];
int initialised_by;  // the process that has a context; a fork of it can have none

// The operations (../torch_ops) are put into torch when it asks for devices: by then its own are registered.
void load_operations() {
    static std::once_flag once;
    std::call_once(once, [] {
        const char* path = getenv("SIMCUDA_OPERATIONS");
        if (path && *path && !dlopen(path, RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "simcuda: %s\n", dlerror());
    });
}

}  // namespace

int& current_device() {
    static thread_local int device = 0;
    return device;
}

bool has_context(int device) { return initialised_by == getpid() && contexts[device]; }

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t make_context() {
    if (const cudaError_t ruined = poison()) return ruined;
    const int device = current_device();
    if (has_context(device)) return cudaSuccess;
    if (initialised_by && initialised_by != getpid()) return cudaErrorInitializationError;
    const Locked locked;
    if (has_context(device)) return cudaSuccess;
    const size_t size = setting("SIMCUDA_CONTEXT", 256 * MiB);
    if (size > free_bytes(locked, device)) return cudaErrorMemoryAllocation;
    own(locked).context[device] = size;
    contexts[device] = true;
    initialised_by = getpid();
    return cudaSuccess;
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaGetDeviceCount(int* count) {
    COUNT();
    if (const cudaError_t ruined = poison()) return failed(ruined);
    if (initialised_by && initialised_by != getpid()) return failed(cudaErrorInitializationError);
    load_operations();
    const Locked locked;
    *count = (int)locked->devices;
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
    COUNT();
    *device = current_device();
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    {
        const Locked locked;
        if (device < 0 || device >= (int)locked->devices) return failed(cudaErrorInvalidDevice);
    }
    current_device() = device;
    CONTEXT();
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    CONTEXT();
    wait_all();
    return failed(waited());
}
API cudaError_t cudaDeviceReset() {
    COUNT();
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    COUNT();
    const Locked locked;
    if (device < 0 || device >= (int)locked->devices) return failed(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", NAME);
    memcpy(&p->uuid, UUID, sizeof UUID);
    p->uuid.bytes[15] += (char)device;
    p->totalGlobalMem = locked->total;
    p->integrated = locked->unified ? 1 : 0;
    // of an H200, as far as torch asks
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 6144;
    p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    p->pciBusID = 1 + device;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
    p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    COUNT();
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    COUNT();
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    COUNT();
    return failed(cudaErrorNotSupported);
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    COUNT();
    snprintf(text, size, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    COUNT();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
    COUNT();
    *version = 13000;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaProfilerStart() {
    COUNT();
    return cudaSuccess;
}
API cudaError_t cudaProfilerStop() {
    COUNT();
    return cudaSuccess;
}

// ---------------------------------------------------------------- errors

static const struct {
    int code;
    const char *name, *text;
} ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};
API const char* cudaGetErrorName(cudaError_t error) {
    for (const auto& each : ERRORS)
        if (each.code == (int)error) return each.name;
    return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t error) {
    for (const auto& each : ERRORS)
        if (each.code == (int)error) return each.text;
    return "unknown error";
}
API cudaError_t cudaPeekAtLastError() {
    COUNT();
    return poison() ? poison() : last_error;
}
API cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}
