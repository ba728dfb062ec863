// What the files of the simulated runtime share: see device.cpp for what each of them has, and ../__init__.py for what is simulated.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace sim {

constexpr size_t MiB = size_t{1} << 20;
constexpr size_t GRAIN = 2 * MiB;  // in which a device hands out memory
constexpr int DEVICES = 4;
constexpr int PROCESSES = 64;

size_t setting(const char* variable, size_t otherwise);  // of the environment
double now();                                            // seconds

// ---------------------------------------------------------------- tenants.cpp: what all processes share

struct Process {
    int pid;
    unsigned long started;    // a pid is used again: both together name a process
    size_t context[DEVICES];  // bytes that its contexts take
    size_t bytes[DEVICES];    // bytes that it has allocated
};

struct Shared {
    unsigned magic, devices;
    size_t total;     // bytes of each device, as CUDA says
    size_t reserved;  // bytes that NVML counts on top of these
    size_t foreign[DEVICES];  // bytes of somebody whom no list of processes shows
    size_t nvml_error;        // what each call of NVML answers; 0: the truth
    size_t nvml_hides;        // 1: NVML lists no process
    size_t mig;               // 1: each device is a slice of a larger one
    size_t unified;           // 1: device memory is the host's, and NVML does not know how much there is
    size_t lost;              // 1: the device has fallen off the bus
    Process processes[PROCESSES];
};

// Holds the shared file, against other threads and other processes. May be nested.
class Locked {
   public:
    Locked();
    ~Locked();
    Shared* operator->() const;
};

Process& own(const Locked&);  // this process's entry, made when first asked for
size_t used(const Locked&, int device);
size_t free_bytes(const Locked&, int device);
bool lost();  // asked without the lock: by every call
bool charge(size_t bytes, int device);  // false where there is not so much
void discharge(size_t bytes, int device);

std::recursive_mutex& process_lock();  // for what only this process has
using Guard = std::lock_guard<std::recursive_mutex>;

// ---------------------------------------------------------------- device.cpp: devices, contexts, errors

extern const unsigned char UUID[16];
extern const char* const NAME;

int& current_device();  // of this thread
bool has_context(int device);
cudaError_t make_context();          // on the current device, as nearly every call does
cudaError_t failed(cudaError_t error);  // notes it for cudaGetLastError

// ---------------------------------------------------------------- faults.cpp: what was told to fail, counters

bool refuses_memory();        // whether this allocation was told to fail
cudaError_t poison();         // the error that has ruined this process's context, if one has
struct Counter {
    const char* name;
    std::atomic<long> calls{0};
    Counter* next;
    explicit Counter(const char* name);
};
cudaError_t waited();  // notes that the host has waited for the device, which may report an error of an earlier operation

// ---------------------------------------------------------------- memory.cpp

struct Range {
    size_t size;
    cudaMemoryType type;
    int device;
};
void add_range(const void* start, Range range);
bool remove_range(const void* start, Range* removed);
bool is_type(const void* place, cudaMemoryType type);

// ---------------------------------------------------------------- streams.cpp

struct Stream;
Stream* stream_of(cudaStream_t handle);
double lag();                                // seconds that an operation takes on the device
void work(Stream* stream, double seconds);   // another operation in it
void wait(Stream* stream);                   // for all that is in it
void wait_all();
void arrive_later(Stream* stream, void* to, const void* from, size_t bytes);   // with the stream's next operation, or one that waits for it
void deliver_later(Stream* stream, void* to, const void* from, size_t bytes);  // once somebody has waited for it

}  // namespace sim

#define COUNT()                                          \
    do {                                                 \
        static auto* counter = new sim::Counter(__func__); \
        ++counter->calls;                                \
    } while (0)

// At the start of every call that makes a context.
#define CONTEXT()                                            \
    do {                                                     \
        COUNT();                                             \
        const cudaError_t error_ = sim::make_context();      \
        if (error_ != cudaSuccess) return sim::failed(error_); \
    } while (0)
