// The driver's calls. Its virtual memory is what torch's expandable segments are made of: an address range is reserved once, and memory is mapped
// into it page by page. Here an address range is one of this process, and what is mapped counts against the device.
#include "simcuda.h"

#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>

using namespace sim;

struct Physical {
    size_t size;
    int device;
};

static CUresult result(cudaError_t error) { return (CUresult)error; }  // the numbers are the same

static CUresult remap(CUdeviceptr start, size_t size, int protection) {
    void* mapped = mmap((void*)start, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuInit(unsigned) {
    COUNT();
    return CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) { return result(cudaDriverGetVersion(version)); }
API CUresult cuDeviceGet(CUdevice* device, int index) {
    COUNT();
    *device = index;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) { return result(cudaGetDeviceCount(count)); }
API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    COUNT();
    memcpy(uuid, UUID, sizeof UUID);
    uuid->bytes[15] += (char)device;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    COUNT();
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

static const CUcontext THE_CONTEXT = (CUcontext)0x20;
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    COUNT();
    if (flags) *flags = 0;
    *active = has_context(device);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    COUNT();
    *context = THE_CONTEXT;
    return result(make_context());
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
    COUNT();
    *context = has_context(current_device()) ? THE_CONTEXT : nullptr;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) {
    COUNT();
    return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void*, CUpointer_attribute, CUdeviceptr) {
    COUNT();
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    COUNT();
    *bytes = GRAIN;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* start, size_t size, size_t, CUdeviceptr, unsigned long long) {
    COUNT();
    void* place = mmap(nullptr, size + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *start = ((uintptr_t)place + GRAIN - 1) / GRAIN * GRAIN;  // what lies before and behind is not given back: an address costs nothing
    add_range((void*)*start, {size, cudaMemoryTypeDevice, current_device()});
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    COUNT();
    Range range;
    if (!remove_range((void*)start, &range)) return CUDA_ERROR_INVALID_VALUE;
    munmap((void*)start, size);
    return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted, unsigned long long) {
    COUNT();
    if (const cudaError_t error = make_context()) return result(error);
    if (!charge(size, wanted->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle) new Physical{size, wanted->location.id};
    return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    COUNT();
    const auto* physical = (Physical*)handle;
    discharge(physical->size, physical->device);
    delete physical;
    return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr start, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    COUNT();
    return remap(start, size, PROT_READ | PROT_WRITE);
}
API CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    COUNT();
    return remap(start, size, PROT_NONE);
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
    COUNT();
    return CUDA_SUCCESS;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    COUNT();
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
