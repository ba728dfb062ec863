// Streams and events. An operation is done at once, for the host's eyes too early; what the device would take for it (SIMCUDA_LAG_US) only moves
// the time at which streams and events count as ready.
#include "simcuda.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <thread>
#include <vector>

namespace sim {

struct Delivery {
    long number;  // of the stream's operation that it is
    void* to;
    std::vector<char> bytes;
};

struct Arrival {
    long number;
    void* to;
    const void* from;  // read when it arrives: what is written there too early is seen
    size_t bytes;
};

struct Stream {
    int priority = 0;
    double busy_until = 0;
    long operations = 0;
    std::deque<Delivery> pending;  // copies to pinned memory that nobody has waited for yet
    std::deque<Arrival> arriving;  // copies from pinned memory that no later operation has come after yet
};

struct Event {
    double at = 0;
    long operations = 0;  // in the stream before it
    Stream* stream = nullptr;
    bool recorded = false, timing = true;
};

namespace {

std::set<Stream*>& streams() {
    static auto* all = new std::set<Stream*>;
    return *all;
}

void arrive(Stream* stream, long number) {
    const Guard guard(process_lock());
    while (!stream->arriving.empty() && stream->arriving.front().number <= number) {
        const Arrival& next = stream->arriving.front();
        memcpy(next.to, next.from, next.bytes);
        stream->arriving.pop_front();
    }
}

void deliver(Stream* stream, long number) {
    const Guard guard(process_lock());
    arrive(stream, number);
    while (!stream->pending.empty() && stream->pending.front().number <= number) {
        const Delivery& next = stream->pending.front();
        memcpy(next.to, next.bytes.data(), next.bytes.size());
        stream->pending.pop_front();
    }
}

void sleep_until(double then) {
    const double left = then - now();
    if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

cudaError_t create(cudaStream_t* handle, int priority) {
    auto* stream = new Stream;
    stream->priority = priority;
    const Guard guard(process_lock());
    streams().insert(stream);
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

}  // namespace

Stream* stream_of(cudaStream_t handle) {
    static auto* default_stream = new Stream;
    return (uintptr_t)handle <= 2 ? default_stream : (Stream*)handle;  // 1 and 2 are cudaStreamLegacy and cudaStreamPerThread
}

double lag() {
    static const double seconds = setting("SIMCUDA_LAG_US", 0) * 1e-6;
    return seconds;
}

void work(Stream* stream, double seconds) {
    const Guard guard(process_lock());
    arrive(stream, stream->operations);
    const double present = now();
    stream->busy_until = (stream->busy_until > present ? stream->busy_until : present) + seconds;
    stream->operations++;
}

void arrive_later(Stream* stream, void* to, const void* from, size_t bytes) {
    const Guard guard(process_lock());
    stream->arriving.push_back({stream->operations, to, from, bytes});
}

void deliver_later(Stream* stream, void* to, const void* from, size_t bytes) {
    const Guard guard(process_lock());
    stream->pending.push_back({stream->operations, to, std::vector<char>((const char*)from, (const char*)from + bytes)});
}

void wait(Stream* stream) {
    sleep_until(stream->busy_until);
    deliver(stream, stream->operations);
}

void wait_all() {
    std::vector<Stream*> all{stream_of(nullptr)};
    {
        const Guard guard(process_lock());
        all.insert(all.end(), streams().begin(), streams().end());
    }
    for (Stream* stream : all) wait(stream);
}

}  // namespace sim

using namespace sim;

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    CONTEXT();
    return create(stream, 0);
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    CONTEXT();
    return create(stream, priority);
}
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    COUNT();
    Stream* stream = stream_of(handle);
    wait(stream);
    const Guard guard(process_lock());
    streams().erase(stream);  // and is not deleted: an event may name it
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CONTEXT();
    wait(stream_of(stream));
    return failed(waited());
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    CONTEXT();
    Stream* stream = stream_of(handle);
    if (now() < stream->busy_until) return failed(cudaErrorNotReady);
    deliver(stream, stream->operations);
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    COUNT();
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    CONTEXT();
    const auto* awaited = (Event*)event;
    Stream* stream = stream_of(handle);
    const Guard guard(process_lock());
    if (!awaited->recorded) return cudaSuccess;
    arrive(awaited->stream, awaited->operations);
    if (stream->busy_until < awaited->at) stream->busy_until = awaited->at;
    return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void* data, unsigned) {
    CONTEXT();
    wait(stream_of(handle));
    call(handle, cudaSuccess, data);
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void* data) {
    CONTEXT();
    wait(stream_of(handle));
    call(data);
    return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    CONTEXT();
    auto* made = new Event;
    made->timing = !(flags & cudaEventDisableTiming);
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    COUNT();
    delete (Event*)event;
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
    CONTEXT();
    Stream* stream = stream_of(handle);
    const Guard guard(process_lock());
    const double present = now();
    auto* recorded = (Event*)event;
    *recorded = Event{stream->busy_until > present ? stream->busy_until : present, stream->operations, stream, true, recorded->timing};
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    CONTEXT();
    const auto* event = (Event*)handle;
    if (!event->recorded) return cudaSuccess;
    if (now() < event->at) return failed(cudaErrorNotReady);
    deliver(event->stream, event->operations);
    return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    CONTEXT();
    const auto* event = (Event*)handle;
    if (event->recorded) {
        sleep_until(event->at);
        deliver(event->stream, event->operations);
    }
    return failed(waited());
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    CONTEXT();
    const auto *from = (Event*)first, *to = (Event*)second;
    if (!from->recorded || !to->recorded || !from->timing || !to->timing) return failed(cudaErrorInvalidResourceHandle);
    if (now() < from->at || now() < to->at) return failed(cudaErrorNotReady);
    *milliseconds = (float)((to->at - from->at) * 1e3);
    return cudaSuccess;
}

// ---------------------------------------------------------------- graphs: nothing is ever captured

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    COUNT();
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    COUNT();
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    COUNT();
    return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    COUNT();
    return failed(cudaErrorNotSupported);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
    COUNT();
    return failed(cudaErrorNotSupported);
}
