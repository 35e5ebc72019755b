// A stand-in for the CUDA driver, with the functions that csrc/shm/device_link.h uses. Device memory is host memory that
// other processes can map, and each stream is a thread that runs its operations in order, so that streams of several
// processes wait for each other as they do on a GPU. What the real driver does is proven on a GPU (docs/proofs/shm_cuda.md).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <thread>

#include "cuda_stand_in.h"

namespace {

constexpr int kInvalid = 1;

class Stream {
  public:
    Stream() : thread_([this] { run(); }) { thread_.detach(); }
    void add(std::function<void()> work) {
        {
            const std::lock_guard<std::mutex> guard(lock_);
            queue_.push_back(std::move(work));
        }
        changed_.notify_all();
    }

  private:
    void run() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            changed_.wait(guard, [this] { return !queue_.empty(); });
            const std::function<void()> work = std::move(queue_.front());
            queue_.pop_front();
            guard.unlock();
            work();
            guard.lock();
        }
    }
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    std::thread thread_;
};

// How often it was recorded, and the latest record that its stream has passed. Records are passed in order.
struct Event {
    std::atomic<int> recorded{0}, passed{0};
};

struct Allocation {
    size_t bytes;
    int fd;
    uint64_t id;
};

std::mutex lock;
std::map<uint64_t, Allocation>& allocations = *new std::map<uint64_t, Allocation>;
std::map<uint64_t, size_t>& opened = *new std::map<uint64_t, size_t>;
std::map<void*, Stream*>& streams = *new std::map<void*, Stream*>;
std::atomic<uint64_t> ids{0};
std::atomic<int> mps{0}, gpu{0}, refuses{0}, delay_us{0};

Stream& stream_of(void* handle) {
    const std::lock_guard<std::mutex> guard(lock);
    Stream*& found = streams[handle];
    if (found == nullptr) found = new Stream;
    return *found;
}

}  // namespace

extern "C" {

// The test's side
void stand_in_mps(int on) { mps = on; }
// Which GPU this process has.
void stand_in_gpu(int number) { gpu = number; }
// While set, no memory can be exported.
void stand_in_refuse(int on) { refuses = on; }
// Every operation of a stream takes this long.
void stand_in_delay(int microseconds) { delay_us = microseconds; }
int stand_in_allocations() {
    const std::lock_guard<std::mutex> guard(lock);
    return static_cast<int>(allocations.size());
}
int stand_in_opened() {
    const std::lock_guard<std::mutex> guard(lock);
    return static_cast<int>(opened.size());
}
// Runs a function on a stream, as a kernel would.
void stand_in_launch(void* stream, void (*kernel)(uint64_t), uint64_t argument) {
    stream_of(stream).add([=] {
        if (delay_us != 0) usleep(static_cast<unsigned>(delay_us.load()));
        kernel(argument);
    });
}
void stand_in_wait_event(void* stream, void* event) {
    auto* awaited = static_cast<Event*>(event);
    const int record = awaited->recorded;
    stream_of(stream).add([=] {
        while (awaited->passed < record) usleep(50);
    });
}

// The driver's side
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    stand_in_wait_event(stream, event);
    return 0;
}
// A kernel is a function of its arguments: 16 addresses and a count.
int cuLaunchKernel(void* function, unsigned programs, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void* stream, void** parameters, void**) {
    if (programs != 1) return kInvalid;
    std::array<uint64_t, 17> arguments;
    for (size_t i = 0; i < arguments.size(); ++i) std::memcpy(&arguments[i], parameters[i], sizeof arguments[i]);
    const auto kernel = reinterpret_cast<void (*)(const uint64_t*)>(function);
    stream_of(stream).add([=] {
        if (delay_us != 0) usleep(static_cast<unsigned>(delay_us.load()));
        kernel(arguments.data());
    });
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = context_of(device);
    return 0;
}
int cuEventCreate(void** event, unsigned) {
    *event = new Event;
    return 0;
}
int cuEventRecord(void* event, void* stream) {
    auto* recorded = static_cast<Event*>(event);
    const int record = ++recorded->recorded;
    stream_of(stream).add([=] { recorded->passed = record; });
    return 0;
}
int cuEventQuery(void* event) {
    const auto* asked = static_cast<Event*>(event);
    return asked->passed == asked->recorded ? 0 : kNotReady;
}
int cuEventElapsedTime(float*, void*, void*) { return kInvalid; }
int cuEventDestroy_v2(void*) { return 0; }  // a stream may still hold it
int cuStreamCreate(void** stream, unsigned) {
    *stream = new char;
    return 0;
}
int cuStreamIsCapturing(void*, int* status) {
    *status = 0;
    return 0;
}
int cuGetErrorName(int status, const char** name) {
    *name = status == kInvalid ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
    return *name == nullptr ? 1 : 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    const int fd = memfd_create("device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return 2;
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return 2;
    *address = reinterpret_cast<uint64_t>(mapped);
    const std::lock_guard<std::mutex> guard(lock);
    allocations[*address] = {bytes, fd, ++ids};
    return 0;
}
int cuMemFree_v2(uint64_t address) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return kInvalid;
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    close(found->second.fd);
    allocations.erase(found);
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
    const std::lock_guard<std::mutex> guard(lock);
    auto found = allocations.upper_bound(address);
    if (found == allocations.begin()) return kInvalid;
    --found;
    if (address >= found->first + found->second.bytes) return kInvalid;
    *base = found->first;
    *bytes = found->second.bytes;
    return 0;
}
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(address);
    if (attribute != 7 || found == allocations.end()) return kInvalid;
    std::memcpy(value, &found->second.id, sizeof(uint64_t));
    return 0;
}
int cuDeviceGetAttribute(int* value, int, int) {
    *value = mps;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int) {
    std::memset(uuid, gpu, 16);
    return 0;
}
struct Handle {
    unsigned char bytes[64];
};
struct Named {
    int pid, fd;
    uint64_t id, bytes;
};
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    if (refuses != 0) return kInvalid;
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return kInvalid;
    const Named named{getpid(), found->second.fd, found->second.id, found->second.bytes};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &named, sizeof named);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned) {
    Named named;
    std::memcpy(&named, &handle, sizeof named);
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", named.pid, named.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return kInvalid;
    void* const mapped = mmap(nullptr, named.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return 2;
    *address = reinterpret_cast<uint64_t>(mapped);
    const std::lock_guard<std::mutex> guard(lock);
    opened[*address] = named.bytes;
    return 0;
}
int cuIpcCloseMemHandle(uint64_t address) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = opened.find(address);
    if (found == opened.end()) return kInvalid;
    munmap(reinterpret_cast<void*>(address), found->second);
    opened.erase(found);
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    stream_of(stream).add([=] {
        if (delay_us != 0) usleep(static_cast<unsigned>(delay_us.load()));
        std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    });
    return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return cuMemcpyDtoDAsync_v2(reinterpret_cast<uint64_t>(to), from, bytes, stream);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    return cuMemcpyDtoDAsync_v2(to, reinterpret_cast<uint64_t>(from), bytes, stream);
}
int cuEventSynchronize(void* event) {
    while (cuEventQuery(event) != 0) usleep(50);
    return 0;
}
int cuStreamSynchronize(void* stream) {
    Event event;
    cuEventRecord(&event, stream);
    return cuEventSynchronize(&event);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    *memory = ::operator new(bytes);
    return 0;
}
int cuMemFreeHost(void* memory) {
    ::operator delete(memory);
    return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned) {
    *address = reinterpret_cast<uint64_t>(memory);
    return 0;
}
struct WordOperation {
    int operation;
    uint64_t address, value;
    unsigned flags;
    uint64_t alias, unused;
};
int cuStreamBatchMemOp_v2(void* stream, unsigned count, WordOperation* operations, unsigned) {
    for (unsigned i = 0; i < count; ++i) {
        const WordOperation one = operations[i];
        auto* const word = reinterpret_cast<std::atomic<uint32_t>*>(one.address);
        if (one.operation == 2) {
            stream_of(stream).add([=] { word->store(static_cast<uint32_t>(one.value)); });
        } else {
            if (one.operation != 1 || one.flags > 1) return kInvalid;
            stream_of(stream).add([=] {
                const auto passes = [&] {
                    const uint32_t beyond = word->load() - static_cast<uint32_t>(one.value);
                    return one.flags == 1 ? beyond == 0 : static_cast<int32_t>(beyond) >= 0;
                };
                for (int looks = 0; !passes(); ++looks)
                    if (looks > 50) usleep(100);
            });
        }
    }
    return 0;
}
}
