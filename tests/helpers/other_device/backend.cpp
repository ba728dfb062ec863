// A device that torch has never heard of, by its open registration for backends (PrivateUse1): memory is the host's, every operation is the CPU's
// on copies, and there are a limit on memory, a generator of its own and a queue whose clock counts operations.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);

// ---------------------------------------------------------------------- memory

struct Block {
    void* data;
    int64_t size;
};
int64_t limit = int64_t(1) << 62, live = 0, peak = 0, refusals = 0;
bool typed = true;  // whether it says that it is out of memory by torch's type of error

void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    live -= block->size;
    std::free(block->data);
    delete block;
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        const bool fits = size < (size_t(1) << 40) && live + (int64_t)size <= limit;
        if (!fits) refusals++;
        if (typed) TORCH_CHECK_WITH(OutOfMemoryError, fits, "fakeaccel out of memory. Tried to allocate ", size, " bytes");
        TORCH_CHECK(fits, "the fakeaccel is full: ", size, " bytes do not fit");
        auto* block = new Block{std::malloc(size ? size : 1), (int64_t)size};
        live += block->size;
        peak = std::max(peak, live);
        return {block->data, block, &free_block, DEVICE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
} memory;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, KEYS, type.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, KEYS, type.value_or(at::kFloat));
}

// The CPU's view of a tensor of the device; any other tensor as it is.
at::Tensor twin(const at::Tensor& t) {
    if (!t.is_privateuseone()) return t;
    return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto to = twin(self);
    to.copy_(twin(source));
    return self;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* tensor = self.unsafeGetTensorImpl();
    const size_t bytes = c10::multiply_integers(size) * self.itemsize();
    const auto& storage = tensor->unsafe_storage();
    if (bytes > storage.nbytes()) at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    tensor->set_sizes_contiguous(size);
    return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    if (to.sizes() != self.sizes()) resize_(to, self.sizes(), std::nullopt);
    auto target = to;
    copy_(target, self, false);
    return to;
}

// ---------------------------------------------------------------------- random numbers, time

at::Generator generator = at::detail::createCPUGenerator(1);
int64_t clock_ = 0;    // milliseconds of the device: one for each operation
int64_t settled = 0;   // until when the host knows that work is done

// While it lives, the CPU's default generator is where the device's is.
struct Drawn {
    at::Generator host = at::globalContext().defaultGenerator(at::kCPU);
    at::Tensor before = host.get_state();
    Drawn() { host.set_state(generator.get_state()); }
    ~Drawn() {
        generator.set_state(host.get_state());
        host.set_state(before);
    }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    std::optional<Drawn> drawn;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawn.emplace();
    clock_++;
    at::native::cpu_fallback(op, stack);
}

// ---------------------------------------------------------------------- streams and events

bool has_events = true;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
        TORCH_CHECK(has_events, "no events");
        if (*event == nullptr) *event = new int64_t;
        *static_cast<int64_t*>(*event) = clock_;
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void* event) const override { return event == nullptr || *static_cast<int64_t*>(event) <= settled; }
    void synchronizeEvent(void* event) const override { settled = std::max(settled, *static_cast<int64_t*>(event)); }
    void synchronizeDevice(const c10::DeviceIndex) const { settled = clock_; }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        return double(*static_cast<int64_t*>(second) - *static_cast<int64_t*>(first));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const { return true; }
    bool isAvailable() const { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const { return 1; }
    c10::DeviceIndex getCurrentDevice() const { return 0; }
};

[[maybe_unused]] const bool registered = [] {
    c10::SetAllocator(TYPE, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("copy_", &copy_);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("resize_", &resize_);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// What the tests turn and read.
TORCH_LIBRARY(fakeaccel, m) {
    m.def("get_state", [] { return generator.get_state(); });
    m.def("set_state", [](const at::Tensor& state) { generator.set_state(state); });
    m.def("set", [](const std::string& name, int64_t value) {
        if (name == "limit") limit = value;
        else if (name == "typed") typed = value;
        else if (name == "events") has_events = value;
        else if (name == "peak") peak = live;
        else TORCH_CHECK(false, name);
    });
    m.def("get", [](const std::string& name) {
        return name == "live" ? live : name == "peak" ? peak : name == "limit" ? limit : name == "clock" ? clock_ : refusals;
    });
}
