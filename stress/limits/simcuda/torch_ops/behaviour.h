// What operations do on a device besides computing, as far as memory and waiting are concerned: some wait for it, some take memory that they keep,
// and all of them can fail.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>

#include <limits>
#include <map>
#include <set>
#include <string>

#include "tensors.h"

namespace sim {

enum Library { NONE = 0, CUBLAS = 1001, CUDNN = 1002 };

inline Library library_of(const std::string& name) {
    static const std::set<std::string> products = {"aten::mm",      "aten::addmm",  "aten::addmm_", "aten::bmm", "aten::baddbmm",          "aten::baddbmm_",
                                                   "aten::addbmm", "aten::addmv", "aten::mv",     "aten::dot", "aten::_addmm_activation", "aten::_scaled_mm"};
    if (products.count(name)) return CUBLAS;
    return name.find("conv") != std::string::npos ? CUDNN : NONE;
}

// Device time of an operation, and the error that it reports: its own, or one that came late. False where it has failed and nothing says so yet.
inline bool device_time() {
    static auto work = (void (*)(void*))dlsym(RTLD_DEFAULT, "simcuda_work");
    static auto error = (int (*)(int))dlsym(RTLD_DEFAULT, "simcuda_operation_error");
    work(c10::cuda::getCurrentCUDAStream().stream());
    const int e = error(NONE);
    if (e > 0) C10_CUDA_CHECK((cudaError_t)e);
    return e == 0;
}

// What an operation leaves that has failed: nobody may take it for a result.
inline void ruin(const c10::IValue& made) {
    const auto spoil = [](const at::Tensor& t) {
        if (t.defined() && (t.is_floating_point() || t.is_complex())) twin(t).fill_(std::numeric_limits<double>::quiet_NaN());
    };
    if (made.isTensor()) spoil(made.toTensor());
    if (made.isTensorList())
        for (const at::Tensor& t : made.toTensorVector()) spoil(t);
}

// Libraries allocate their handles and workspaces themselves, and say so in words of their own.
inline void library_error(Library library) {
    static auto error = (int (*)(int))dlsym(RTLD_DEFAULT, "simcuda_operation_error");
    if (library == NONE || error(library) <= 0) return;
    TORCH_CHECK(library != CUBLAS, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
    TORCH_CHECK(false, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED");
}

// The first matrix product in each stream takes cuBLAS's workspace from torch's allocator, for good.
inline void cublas_workspace(c10::Device device) {
    static const char* wanted = getenv("SIMCUDA_CUBLAS");
    static const int64_t size = wanted && *wanted ? strtoll(wanted, nullptr, 0) : 32 << 20;  // as on compute capability 9.0
    thread_local std::set<std::pair<int, cudaStream_t>> have;
    const std::pair<int, cudaStream_t> key{device.index(), c10::cuda::getCurrentCUDAStream(device.index()).stream()};
    if (!size || have.count(key)) return;
    static std::mutex lock;
    static auto* kept = new std::vector<at::Tensor>;
    auto space = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
    const std::lock_guard<std::mutex> guard(lock);
    kept->push_back(space);
    have.insert(key);
}

// Reads a number, as `.item()` does: with torch's own check of the sync debug mode.
inline void wait_for_device(c10::Device device) {
    thread_local std::map<int, at::Tensor> one;
    at::Tensor& number = one[device.index()];
    if (!number.defined()) number = at::empty({1}, at::TensorOptions().dtype(at::kByte).device(device));
    at::_local_scalar_dense(number);
}

inline bool indexes_by_mask(const std::vector<c10::IValue>& given) {
    for (const c10::IValue& each : given)
        if (each.isOptionalTensorList())
            for (const std::optional<at::Tensor>& t : each.toOptionalTensorVector())
                if (t && t->defined() && t->is_cuda() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    return false;
}

// Waits where a result's size, or the result itself, is a number on the device; `equal` allocates for it, too: eq(a, b).all().item().
inline void wait_as(const std::string& name, const std::vector<c10::IValue>& given, const std::vector<at::Tensor>& tensors, c10::Device device) {
    static const std::set<std::string> sized = {"aten::nonzero",    "aten::masked_select",      "aten::_unique2", "aten::unique_dim",
                                                "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount"};
    static const std::set<std::string> indexing = {"aten::index", "aten::_index_put_impl_", "aten::index_put_"};
    if (name == "aten::equal" && tensors.size() == 2 && tensors[0].sizes() == tensors[1].sizes() && tensors[0].numel() && !same_start(tensors[0], tensors[1])) {
        const auto options = at::TensorOptions().dtype(at::kBool).device(device);
        const auto eq = at::empty(tensors[0].sizes(), options), all = at::empty({}, options);
        wait_for_device(device);
    } else if (sized.count(name) || (indexing.count(name) && indexes_by_mask(given))) {
        wait_for_device(device);
    }
}

// The error of TensorIterator and its like where tensors lie on different devices.
inline void check_devices(const std::string& name, const std::vector<c10::IValue>& given, const std::vector<at::Tensor>& tensors) {
    static const std::set<std::string> takes_both = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
    if (tensors.empty()) return;
    const auto complain = [&](const std::string& other) {
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", tensors[0].device(), " and ", other, "! (", name, ")");
    };
    for (const at::Tensor& t : tensors)
        if (t.device() != tensors[0].device()) complain(t.device().str());
    if (takes_both.count(name) || name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_fused", 0) == 0) return;
    for (const c10::IValue& each : given)
        if (each.isTensor() && each.toTensor().defined() && each.toTensor().is_cpu() && each.toTensor().dim()) complain("cpu");
}

}  // namespace sim
