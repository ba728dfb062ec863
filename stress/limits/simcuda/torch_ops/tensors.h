// A tensor of the simulated device, and the CPU's tensor on the same memory.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace sim {

inline bool on_device(const at::Tensor& t) { return t.defined() && t.is_cuda() && t.layout() == at::kStrided; }

// The CPU's view of a tensor of the device; any other tensor as it is.
inline at::Tensor twin(const at::Tensor& t) {
    if (!on_device(t)) return t;
    auto view = at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
    return view;
}

// A copy of a result in memory from torch's allocator, which may raise as it does on a device.
inline at::Tensor to_device(const at::Tensor& t, c10::Device device) {
    if (!t.defined() || !t.is_cpu() || t.layout() != at::kStrided) return t;
    auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
    if (t.numel()) memcpy(out.mutable_data_ptr(), t.const_data_ptr(), at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()));
    return out;
}

inline bool same_start(const at::Tensor& a, const at::Tensor& b) { return a.numel() && b.numel() && a.const_data_ptr() == b.const_data_ptr(); }

// While it lives, the CPU's generator draws what follows from the seed and the offset of the device's, which moves on as it does on a device.
class Seeded {
   public:
    Seeded(at::Generator of_device, int64_t numel) {
        uint64_t seed, offset;
        {
            const std::lock_guard<std::mutex> guard(of_device.mutex());
            seed = of_device.current_seed();
            offset = of_device.get_offset();
            of_device.set_offset(offset + 4 * (1 + numel / (132 * 2048)));
        }
        const std::lock_guard<std::mutex> guard(cpu_.mutex());
        saved_ = cpu_.get_state();
        cpu_.set_current_seed(seed * 0x9E3779B97F4A7C15ull + offset * 0xBF58476D1CE4E5B9ull + 12345);
    }
    ~Seeded() {
        const std::lock_guard<std::mutex> guard(cpu_.mutex());
        cpu_.set_state(saved_);
    }

   private:
    at::Generator cpu_ = at::globalContext().defaultGenerator(at::kCPU);
    at::Tensor saved_;
};

}  // namespace sim
