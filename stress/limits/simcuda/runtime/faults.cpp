// What is told to fail, and what is counted: the calls of this file are for tests (../device.py has them for Python).
#include "simcuda.h"

#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace sim {
namespace {

Counter*& counters() {
    static Counter* first = nullptr;
    return first;
}

std::atomic<long> waits{0};

// Of this process alone.
std::atomic<size_t> refused_allocations{0};  // so many of the next ones fail
std::atomic<int> poisoned{0};                // the error that has ruined the context

struct OperationFault {
    int error = 0;  // of CUDA, or one of Library
    long after = 0;  // operations before the one that fails
    long late = 0;  // operations after it that still seem to work, unless the host waits for the device
    bool happened = false;
} operation_fault;

// Errors that are no error of the runtime. They stand in the text that torch makes of them; ../torch_ops has that.
enum Library { CUBLAS = 1001, CUDNN = 1002 };
constexpr int FAILED_SILENTLY = -1;

// An error of a kernel that has run ruins the context: every later call fails until the process ends.
bool ruins(int error) { return error == cudaErrorIllegalAddress || error == cudaErrorAssert || error == cudaErrorLaunchFailure; }

int report() {
    const int error = operation_fault.error;
    operation_fault = {};
    if (ruins(error)) poisoned = error;
    return error;
}

struct Field {
    const char* name;
    size_t Shared::* value;
};
const Field FIELDS[] = {
    {"total", &Shared::total}, {"nvml_error", &Shared::nvml_error}, {"nvml_hides", &Shared::nvml_hides},
    {"mig", &Shared::mig},     {"unified", &Shared::unified},       {"lost", &Shared::lost},
};

}  // namespace

Counter::Counter(const char* of) : name(of) {
    const Guard guard(process_lock());
    next = counters();
    counters() = this;
}

cudaError_t waited() {
    ++waits;
    const Guard guard(process_lock());
    return operation_fault.happened ? (cudaError_t)report() : poison();
}

bool refuses_memory() {
    size_t left = refused_allocations;
    while (left && !refused_allocations.compare_exchange_weak(left, left - 1)) {
    }
    return left != 0;
}

cudaError_t poison() {
    if (poisoned) return (cudaError_t)poisoned.load();
    return lost() ? cudaErrorECCUncorrectable : cudaSuccess;
}

}  // namespace sim

using namespace sim;

// A fact of the devices, for all processes: see FIELDS. -1 where there is none of this name.
API int simcuda_set(const char* name, size_t value) {
    const Locked locked;
    own(locked);  // so that what is set stands as long as this process does
    for (const Field& each : FIELDS)
        if (!strcmp(name, each.name)) {
            (*locked.operator->()).*each.value = value;
            return 0;
        }
    return -1;
}
API size_t simcuda_get(const char* name) {
    const Locked locked;
    for (const Field& each : FIELDS)
        if (!strcmp(name, each.name)) return (*locked.operator->()).*each.value;
    return 0;
}
// Bytes of a device that somebody holds whom NVML does not list.
API void simcuda_set_foreign(int device, size_t bytes) {
    const Locked locked;
    own(locked);
    locked->foreign[device] = bytes;
}
API size_t simcuda_free(int device) {
    const Locked locked;
    return free_bytes(locked, device);
}
API void simcuda_refuse_memory(size_t times) { refused_allocations = times; }
// Fails the operation after the next `after` ones with this error, which is reported `late` operations later. For an error of a library only the
// operations count that it would carry out.
API void simcuda_fail_operation(int error, long after, long late) {
    const Guard guard(process_lock());
    operation_fault = {error, after, late, false};
}
// Asked by each operation of torch for its own errors, with library 0, and for those of the library that would carry it out: the error to report;
// FAILED_SILENTLY where this operation has failed and nothing says so yet; or 0.
API int simcuda_operation_error(int library) {
    if (!library && poison()) return poison();
    if (!operation_fault.error) return 0;
    const Guard guard(process_lock());
    if ((operation_fault.error >= CUBLAS ? operation_fault.error : 0) != library) return 0;
    const bool earlier = operation_fault.happened;
    if (!earlier && operation_fault.after-- > 0) return 0;
    operation_fault.happened = true;
    if (operation_fault.late-- > 0) return earlier ? 0 : FAILED_SILENTLY;
    return report();
}
// An operation of torch: some device time in a stream.
API void simcuda_work(void* stream) { work(stream_of((cudaStream_t)stream), lag()); }
// Times that the host waited for the device.
API long simcuda_waits() { return waits; }
// Calls of one function of the runtime, the driver or NVML.
API long simcuda_calls(const char* function) {
    const Guard guard(process_lock());
    long sum = 0;
    for (const Counter* each = counters(); each; each = each->next)
        if (!strcmp(each->name, function)) sum += each->calls;
    return sum;
}
