// Real numbers on the simulated device: every operation of torch that has a kernel for the device and one for the CPU runs the CPU's, on the memory
// of the device's tensors, which is the host's. Its results are put into memory of torch's own caching allocator. What allocates, views, copies
// between host and device, or reads a number is left as it is: these take torch's own paths down to the runtime.
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "behaviour.h"

using c10::IValue;
using torch::jit::Stack;

namespace sim {
namespace {

const std::set<std::string> LEFT_ALONE = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::resize_as_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
    "aten::pin_memory", "aten::_local_scalar_dense", "aten::copy_", "aten::_efficientzerotensor", "aten::_resize_output_", "aten::_fused_sdp_choice",
    "aten::_use_cudnn_ctc_loss", "aten::_cudnn_init_dropout_state", "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::_has_compatible_shallow_copy_type", "aten::is_set_to", "aten::storage_offset", "aten::set_"};

// The arguments of one call as the CPU's kernel takes them, and what they were.
struct Call {
    const c10::OperatorHandle& op;
    std::vector<IValue> given;
    Stack inner;
    std::vector<at::Tensor> tensors;  // of the device
    std::optional<at::Generator> generator;
    std::vector<size_t> written;              // arguments that it writes
    std::optional<at::ScalarType> cast_back;  // of the result

    Call(const c10::OperatorHandle& op, const Stack& stack) : op(op), given(stack.end() - op.schema().arguments().size(), stack.end()) {
        for (size_t i = 0; i < given.size(); i++) {
            inner.push_back(on_host(given[i]));
            const auto* alias = op.schema().arguments()[i].alias_info();
            if (alias && alias->isWrite()) written.push_back(i);
        }
        for (const size_t i : written)  // an empty output is to be resized, which memory that belongs to another tensor cannot be
            if (given[i].isTensor() && on_device(given[i].toTensor()) && !given[i].toTensor().numel())
                inner[i] = at::empty({0}, given[i].toTensor().options().device(at::kCPU));
    }

    const std::string& name() const { return op.operator_name().name; }
    c10::Device device() const { return tensors.empty() ? c10::Device(at::kCUDA, c10::cuda::current_device()) : tensors[0].device(); }

    bool draws() const { return generator || op.hasTag(at::Tag::nondeterministic_seeded); }

   private:
    at::Tensor note(const at::Tensor& t) {
        if (on_device(t)) tensors.push_back(t);
        return twin(t);
    }

    IValue on_host(const IValue& v) {
        if (v.isTensor()) return note(v.toTensor());
        if (v.isTensorList()) {
            c10::List<at::Tensor> out;
            for (const at::Tensor& t : v.toTensorVector()) out.push_back(note(t));
            return out;
        }
        if (v.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> out;
            for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional(note(*t)) : std::nullopt);
            return out;
        }
        if (v.isGenerator() && v.toGenerator().device().is_cuda()) {
            generator = v.toGenerator();
            return IValue();
        }
        if (v.isDevice() && v.toDevice().is_cuda()) return c10::Device(at::kCPU);
        return v;
    }
};

// A softmax between half and single precision: the device's kernel takes one and returns the other, the CPU's does not.
void cast_for_softmax(Call& call) {
    const std::string& name = call.name();
    Stack& inner = call.inner;
    if ((name == "aten::_softmax" || name == "aten::_log_softmax") && inner[2].isBool() && inner[2].toBool()) {
        inner[0] = inner[0].toTensor().to(at::kFloat);
        inner[2] = false;
    }
    if ((name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") && inner[3].isInt() &&
        (at::ScalarType)inner[3].toInt() != inner[0].toTensor().scalar_type()) {
        call.cast_back = (at::ScalarType)inner[3].toInt();
        inner[3] = (int64_t)inner[0].toTensor().scalar_type();
    }
}

void compute(Call& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::optional<Seeded> seeded;
    if (call.draws()) {
        const int64_t numel = call.tensors.empty() ? 0 : call.tensors[0].numel();
        seeded.emplace(call.generator ? *call.generator : at::globalContext().defaultGenerator(call.device()), numel);
    }
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call.inner);
}

// An output that the CPU's kernel has resized gets memory of the device.
void write_back(const at::Tensor& target, const at::Tensor& made) {
    if (made.sizes() == target.sizes() && (!made.numel() || made.const_data_ptr() == target.const_data_ptr())) return;
    target.resize_(made.sizes());
    twin(target).copy_(made);
}

at::Tensor returned(const Call& call, at::Tensor made) {
    if (call.cast_back) made = made.to(*call.cast_back);
    if (made.defined())
        for (const at::Tensor& t : call.tensors)  // an argument that is returned
            if (same_start(made, t)) return made.sizes() == t.sizes() && made.strides() == t.strides() ? t : t.as_strided(made.sizes(), made.strides());
    return to_device(made, call.device());
}

IValue result_of(const Call& call, size_t index, const IValue& made) {
    const auto& schema = call.op.schema();
    const auto* alias = schema.returns()[index].alias_info();
    if (alias && alias->isWrite()) {
        for (const size_t i : call.written)
            if (schema.arguments()[i].alias_info()->beforeSets() == alias->beforeSets()) {
                if (made.isTensor() && call.given[i].isTensor() && on_device(call.given[i].toTensor())) write_back(call.given[i].toTensor(), made.toTensor());
                return call.given[i];
            }
        return made;
    }
    if (made.isTensor()) return returned(call, made.toTensor());
    if (made.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : made.toTensorVector()) out.push_back(to_device(t, call.device()));
        return out;
    }
    return made;
}

// A device's kernel allocates its results before it writes: an operation that does both must not be half done when there is no memory.
class Undo {
   public:
    explicit Undo(const Call& call) {
        bool allocates = false;
        for (const auto& r : call.op.schema().returns()) allocates = allocates || !r.alias_info();
        if (!allocates) return;
        for (const size_t i : call.written)
            if (call.inner[i].isTensor() && call.inner[i].toTensor().defined()) before_.emplace_back(call.inner[i].toTensor(), call.inner[i].toTensor().clone());
    }
    void put_back() {
        for (auto& [target, value] : before_) target.copy_(value);
    }

   private:
    std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

void run(const c10::OperatorHandle& op, Stack* stack) {
    Call call(op, *stack);
    const Library library = library_of(call.name());
    check_devices(call.name(), call.given, call.tensors);
    library_error(library);
    if (library == CUBLAS) cublas_workspace(call.device());
    wait_as(call.name(), call.given, call.tensors, call.device());
    cast_for_softmax(call);
    Undo undo(call);
    const bool works = device_time();
    compute(call);
    if (!works) {
        for (const IValue& made : call.inner) ruin(made);
        for (const size_t i : call.written) ruin(call.given[i]);
    }
    Stack results;
    try {
        const size_t count = op.schema().returns().size();
        for (size_t i = 0; i < count; i++) results.push_back(result_of(call, i, call.inner[call.inner.size() - count + i]));
    } catch (...) {
        undo.put_back();
        throw;
    }
    stack->erase(stack->end() - (long)call.given.size(), stack->end());
    stack->insert(stack->end(), results.begin(), results.end());
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    if (!on_device(self) || !on_device(source)) return at::native::copy_(self, source, non_blocking);  // torch's own: whether the host waits, too
    const at::AutoDispatchBelowADInplaceOrView guard;
    const bool works = device_time();
    twin(self).copy_(twin(source));  // between two devices, too: both are the host's memory
    if (!works) ruin(self);
    return self;
}

struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

bool replaced(const c10::OperatorHandle& op) {
    const auto& name = op.operator_name();
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.name.rfind("aten::", 0) != 0 || !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return false;
    if (LEFT_ALONE.count(name.name) || LEFT_ALONE.count(full)) return false;
    for (const auto& r : op.schema().returns())
        if (r.alias_info() && !r.alias_info()->isWrite()) return false;  // a view
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeExplicitAutogradNonFunctional})
        if (op.hasKernelForDispatchKey(key)) return true;
    return false;  // the device's alone: launching its kernel fails (../runtime/kernels.cpp)
}

// Done when the library is loaded: when torch first asks how many devices there are.
struct Registration {
    std::vector<c10::RegistrationHandleRAII> handles;

    Registration() {
        Silence silence;  // torch warns of each kernel that is replaced
        const c10::WarningUtils::WarningHandlerGuard guard(&silence);
        auto& dispatcher = c10::Dispatcher::singleton();
        for (const auto& name : dispatcher.getAllOpNames()) {
            const auto op = dispatcher.findSchema(name);
            if (!op || !replaced(*op)) continue;
            handles.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run>(), std::nullopt, nullptr, "simcuda"));
        }
        handles.push_back(dispatcher.registerImpl({"aten::copy_", ""}, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy), std::nullopt, nullptr, "simcuda"));
        // These have kernels of the device alone.
        auto& context = at::globalContext();
        context.setUserEnabledCuDNN(false);
        context.setSDPUseFlash(false);
        context.setSDPUseMemEfficient(false);
        context.setSDPUseCuDNN(false);
    }
};
Registration* const registration = new Registration;  // never destroyed: torch's dispatcher may be gone by then

}  // namespace
}  // namespace sim
