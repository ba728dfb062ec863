// Kernels: torch registers them when it is loaded, and none is run here. What should have been run by one is run by a CPU kernel (../torch_ops);
// an operation that has none would leave numbers that nobody has computed, so it fails and is named. SIMCUDA_LENIENT=1 lets it pass.
#include "simcuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <vector>

using namespace sim;

static std::unordered_map<const void*, const char*>& kernels() {
    static auto* all = new std::unordered_map<const void*, const char*>;
    return *all;
}

static cudaError_t launch(const void* kernel, cudaStream_t stream) {
    if (const cudaError_t error = make_context()) return failed(error);
    work(stream_of(stream), lag());
    static const bool lenient = setting("SIMCUDA_LENIENT", 0);
    if (lenient) return cudaSuccess;
    const Guard guard(process_lock());
    const auto found = kernels().find(kernel);
    fprintf(stderr, "simcuda: a kernel of the device would have to run, and cannot: %s\n", found == kernels().end() ? "unknown" : found->second);
    return failed(cudaErrorNotSupported);
}

API void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    const Guard guard(process_lock());
    kernels()[host] = name;
}

static std::map<const void*, void*>& variables() {
    static auto* all = new std::map<const void*, void*>;
    return *all;
}
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
    const Guard guard(process_lock());
    variables()[host] = calloc(1, size ? size : 8);
}
API cudaError_t cudaGetSymbolAddress(void** place, const void* symbol) {
    COUNT();
    const Guard guard(process_lock());
    const auto found = variables().find(symbol);
    if (found == variables().end()) return failed(cudaErrorInvalidValue);
    *place = found->second;
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
    COUNT();
    void* place;
    const cudaError_t error = cudaGetSymbolAddress(&place, symbol);
    if (error == cudaSuccess) memcpy((char*)place + offset, from, bytes);
    return error;
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
static thread_local std::vector<Configuration> configurations;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (configurations.empty()) return failed(cudaErrorInvalidValue);
    const Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *(void**)stream = last.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    COUNT();
    return launch((const void*)kernel, stream);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    COUNT();
    return launch(kernel, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    COUNT();
    return launch(kernel, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* kernel, void**) {
    COUNT();
    return launch(kernel, configuration->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    COUNT();
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    COUNT();
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    COUNT();
    *blocks = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads, size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
