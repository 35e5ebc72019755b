// A stand-in for the CUDA driver, with the functions that csrc/device uses, on streams that a test controls. It tests the
// code around the driver on hosts without a GPU; what the real driver does is proven on a GPU (docs/proofs/nccl_faults.md).
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

#include "cuda_stand_in.h"

// Python's, which has loaded this
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void* PyObject_CallObject(void* callable, void* arguments);
}

namespace {

constexpr double kStep = 0.5;  // milliseconds
struct Event {
    void* stream = nullptr;
    uint64_t place = 0;  // calls on the stream before it, itself included
    double at = 0;       // milliseconds of the device's clock, which moves by kStep at each record
};
std::mutex lock;
std::map<void*, uint64_t> recorded, reached;
std::atomic<int> capturing{0}, failure{0}, events{0}, hold{0}, held{0};
double now = 0;
void* const idle = &now;  // a stream whose events pass at once

}  // namespace

extern "C" {

// The test's side
void stand_in_reach(void* stream, uint64_t events_passed) {
    std::lock_guard<std::mutex> guard(lock);
    reached[stream] = events_passed;
}
void stand_in_reset() {
    std::lock_guard<std::mutex> guard(lock);
    recorded.clear();
    reached.clear();
    capturing = failure = events = 0;
}
void stand_in_capture(int on) { capturing = on; }
void stand_in_fail(int status) { failure = status; }
int stand_in_events() { return events; }
// Calls a Python object on a thread that has no Python frame, like those of torch. Null if it raises.
void* stand_in_call(void* callable, void* arguments) {
    void* result = nullptr;
    std::thread([&] {
        const int state = PyGILState_Ensure();
        result = PyObject_CallObject(callable, arguments);
        PyGILState_Release(state);
    }).join();
    return result;
}
// While held, nobody gets a context.
void stand_in_hold(int on) { hold = on; }
int stand_in_held() { return held; }

// The driver's side
int cuDevicePrimaryCtxRetain(void** context, int device) {
    for (held = hold.load(); hold != 0;) std::this_thread::yield();
    *context = context_of(device);
    return 0;
}
int cuEventCreate(void** event, unsigned) {
    ++events;
    *event = new Event;
    return current_context == nullptr ? 201 : 0;
}
int cuEventRecord(void* event, void* stream) {
    if (failure != 0) return failure;
    std::lock_guard<std::mutex> guard(lock);
    *static_cast<Event*>(event) = {stream, ++recorded[stream], now += kStep};
    return 0;
}
int cuEventQuery(void* event) {
    if (failure != 0) return failure;
    std::lock_guard<std::mutex> guard(lock);
    const Event& asked = *static_cast<Event*>(event);
    return asked.stream == idle || reached[asked.stream] >= asked.place ? 0 : kNotReady;
}
int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    *milliseconds = static_cast<float>(static_cast<Event*>(to)->at - static_cast<Event*>(from)->at);
    return 0;
}
int cuStreamCreate(void** stream, unsigned) {
    *stream = idle;
    return 0;
}
int cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    return 0;
}
int cuStreamIsCapturing(void*, int* status) {
    *status = capturing;
    return 0;
}
int cuGetErrorName(int status, const char** name) {
    *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
    return *name == nullptr ? 1 : 0;
}
}
