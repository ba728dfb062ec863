// Allocations and copies. Device memory is the host's: a copy is a memcpy. One from the device to pinned memory arrives only when somebody has
// waited for it, and one from pinned memory to the device only when an operation comes after it in the order of streams and events, so that a program
// which reads too early reads what was there before.
#include "simcuda.h"

#include <cstring>
#include <map>
#include <sys/mman.h>

namespace sim {
namespace {

// By start. Addresses that expandable segments have reserved are here, too.
std::map<uintptr_t, Range>& ranges() {
    static auto* all = new std::map<uintptr_t, Range>;
    return *all;
}

Range* range_of(const void* place) {
    auto next = ranges().upper_bound((uintptr_t)place);
    if (next == ranges().begin()) return nullptr;
    auto& [start, range] = *--next;
    return (uintptr_t)place < start + range.size ? &range : nullptr;
}

void* map_pages(size_t size) {
    void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    madvise(pages, size, MADV_HUGEPAGE);
    return pages;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    work(stream, lag());
    if (is_type(from, cudaMemoryTypeDevice) && is_type(to, cudaMemoryTypeHost)) {
        deliver_later(stream, to, from, bytes);
        return cudaSuccess;
    }
    if (is_type(from, cudaMemoryTypeHost) && is_type(to, cudaMemoryTypeDevice)) {
        arrive_later(stream, to, from, bytes);
        return cudaSuccess;
    }
    memcpy(to, from, bytes);
    if (is_type(from, cudaMemoryTypeDevice) && !is_type(to, cudaMemoryTypeDevice)) {  // into pageable memory: the host waits
        wait(stream);
        return failed(waited());
    }
    return cudaSuccess;
}

}  // namespace

void add_range(const void* start, Range range) {
    const Guard guard(process_lock());
    ranges()[(uintptr_t)start] = range;
}

bool remove_range(const void* start, Range* removed) {
    const Guard guard(process_lock());
    auto found = ranges().find((uintptr_t)start);
    if (found == ranges().end()) return false;
    *removed = found->second;
    ranges().erase(found);
    return true;
}

bool is_type(const void* place, cudaMemoryType type) {
    const Guard guard(process_lock());
    const Range* range = range_of(place);
    return range && range->type == type;
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    CONTEXT();
    const Locked locked;
    *free = free_bytes(locked, current_device());
    *total = locked->total;
    return cudaSuccess;
}
API cudaError_t cudaMalloc(void** out, size_t size) {
    CONTEXT();
    *out = nullptr;
    if (!size) return cudaSuccess;
    const size_t rounded = (size + GRAIN - 1) / GRAIN * GRAIN;
    const int device = current_device();
    if (!charge(rounded, device)) return failed(cudaErrorMemoryAllocation);
    if (!(*out = map_pages(rounded))) {
        discharge(rounded, device);
        return failed(cudaErrorMemoryAllocation);
    }
    add_range(*out, {rounded, cudaMemoryTypeDevice, device});
    return cudaSuccess;
}
API cudaError_t cudaFree(void* start) {
    CONTEXT();
    if (!start) return cudaSuccess;
    wait_all();  // as the real one does
    if (const cudaError_t error = waited()) return failed(error);
    Range range;
    if (!remove_range(start, &range)) return failed(cudaErrorInvalidValue);
    munmap(start, range.size);
    discharge(range.size, range.device);
    return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
    CONTEXT();
    const size_t rounded = size ? (size + 4095) / 4096 * 4096 : 4096;
    if (!(*out = map_pages(rounded))) return failed(cudaErrorMemoryAllocation);
    add_range(*out, {rounded, cudaMemoryTypeHost, current_device()});
    return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* start) {
    CONTEXT();
    if (!start) return cudaSuccess;
    wait_all();
    Range range;
    if (!remove_range(start, &range)) return failed(cudaErrorInvalidValue);
    munmap(start, range.size);
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* start, size_t size, unsigned) {
    CONTEXT();
    add_range(start, {size, cudaMemoryTypeHost, current_device()});
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* start) {
    CONTEXT();
    Range range;
    return remove_range(start, &range) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* place) {
    COUNT();
    memset(attributes, 0, sizeof *attributes);
    const Guard guard(process_lock());
    const Range* range = range_of(place);
    attributes->type = range ? range->type : cudaMemoryTypeUnregistered;
    attributes->device = range ? range->device : -2;
    if (range) attributes->devicePointer = (void*)place;
    if (!range || range->type != cudaMemoryTypeDevice) attributes->hostPointer = (void*)place;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    CONTEXT();
    return copy(to, from, bytes, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    CONTEXT();
    return copy(to, from, bytes, stream);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    CONTEXT();
    wait_all();
    memcpy(to, from, bytes);
    return failed(waited());
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    CONTEXT();
    for (size_t row = 0; row < height; row++)
        if (const cudaError_t error = copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, stream)) return error;
    return cudaSuccess;
}
API cudaError_t cudaMemset(void* start, int value, size_t bytes) {
    CONTEXT();
    memset(start, value, bytes);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* start, int value, size_t bytes, cudaStream_t stream) {
    CONTEXT();
    memset(start, value, bytes);
    work(stream_of(stream), lag());
    return cudaSuccess;
}

// ---------------------------------------------------------------- the pool of PYTORCH_ALLOC_CONF=backend:cudaMallocAsync

static size_t pool_used, pool_peak;

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    CONTEXT();
    *pool = (cudaMemPool_t)0x10;
    return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t) {
    const cudaError_t error = cudaMalloc(out, size);
    const Guard guard(process_lock());
    if (const Range* range = error ? nullptr : range_of(*out)) pool_used += range->size;
    if (pool_used > pool_peak) pool_peak = pool_used;
    return error;
}
API cudaError_t cudaFreeAsync(void* start, cudaStream_t) {
    {
        const Guard guard(process_lock());
        if (const Range* range = range_of(start)) pool_used -= range->size;
    }
    return cudaFree(start);
}
static bool of_peak(cudaMemPoolAttr attribute) { return attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void* value) {
    COUNT();
    *(unsigned long long*)value = of_peak(attribute) ? pool_peak : pool_used;
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void*) {
    COUNT();
    if (of_peak(attribute)) pool_peak = pool_used;
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
    COUNT();
    return cudaSuccess;
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
    COUNT();
    return cudaSuccess;
}
