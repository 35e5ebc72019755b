// The watch of CUDA streams under stress, on the stand-in for the driver.
//
//   streams LIBRARY ROUNDS
//
// Several threads make groups whose calls share streams, while another thread lets the streams advance. Groups end in every
// way: all calls passed, failed, or closed and freed with calls in flight. Exits with 1 if a call ends twice or never.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "device/stream_watch.h"
#include "record/callsite.h"

using namespace ringway;
using namespace ringway::device;

// The calls here have no line of Python.
const CallSite* ringway::site(uint32_t) { return nullptr; }

// The stand-in calls these if a test scripts it. Here nobody does.
extern "C" {
int PyGILState_Ensure() { return 0; }
void PyGILState_Release(int) {}
void* PyObject_CallObject(void*, void*) { return nullptr; }
}

namespace {

constexpr int kThreads = 4;
constexpr int kStreams = 3;
constexpr int kCalls = 40;

template <class Function>
Function* find(void* library, const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) std::abort();
    return reinterpret_cast<Function*>(found);
}

[[noreturn]] void fail(const char* what, uint64_t found) {
    std::fprintf(stderr, "wrong: %s (%lu)\n", what, static_cast<unsigned long>(found));
    std::_Exit(1);
}

void groups(StreamWatch& watch, const std::shared_ptr<Recorder>& recorder, int rounds, unsigned seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < rounds; ++round) {
        auto record = std::make_unique<GroupRecord>(recorder, "group " + std::to_string(seed), 1);
        const auto calls = std::make_shared<StreamCalls>(*record, [&record](const StreamCalls::News& news) {
            for (const LateCall& call : news.ended) record->end(call.token, State::Completed);
        });
        calls->limit = 60;
        for (int call = 0; call < kCalls; ++call) {
            const auto begun = record->begin(Op::AllReduce, 4, DType::F32, Reduce::Sum, -1, 0, 0);
            watch.follow(calls, begun.token, begun.sequence, static_cast<int>(random() % 2), 1 + random() % kStreams);
        }
        const unsigned end = random() % 3;
        if (end == 0) calls->fail();
        if (end == 1) {
            calls->close();
            record.reset();
        } else {
            while (calls->pending() != 0) watch.settle(*calls, 0.01);
            if (record->completed() != kCalls) fail("calls that ended", record->completed());
            calls->close();
        }
    }
}

// A child that is forked while a lock of the watch is held must be able to drop the watch.
void drop_in_child(void* library, const std::string& path) {
    const auto watch = std::make_shared<StreamWatch>(path);
    const auto recorder = std::make_shared<Recorder>(64);
    GroupRecord record(recorder, "forked", 1);
    const auto calls = std::make_shared<StreamCalls>(record, [](const StreamCalls::News&) {});
    find<void(int)>(library, "stand_in_hold")(1);
    std::thread holder([&] { watch->follow(calls, 1, 0, 0, 1); });
    while (find<int()>(library, "stand_in_held")() == 0) std::this_thread::yield();
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        watch->stop();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) fail("a forked child could not drop the watch", static_cast<uint64_t>(status));
    find<void(int)>(library, "stand_in_hold")(0);
    holder.join();
    while (calls->pending() != 0) watch->settle(*calls, 0.01);
    calls->close();
    watch->stop();
}

}  // namespace

int main(int, char** arguments) {
    const std::string path = arguments[1];
    const int rounds = std::atoi(arguments[2]);
    void* const library = dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) fail("no stand-in", 0);
    const auto reach = find<void(void*, uint64_t)>(library, "stand_in_reach");
    const auto watch = std::make_shared<StreamWatch>(path);
    const auto recorder = std::make_shared<Recorder>(1 << 16);
    std::atomic<bool> done{false};
    std::thread device([&] {
        for (uint64_t reached = 0; !done; reached += 7) {
            for (intptr_t stream = 1; stream <= kStreams; ++stream) reach(reinterpret_cast<void*>(stream), reached);
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        for (intptr_t stream = 1; stream <= kStreams; ++stream) reach(reinterpret_cast<void*>(stream), UINT64_MAX);
    });
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([&, thread] { groups(*watch, recorder, rounds, static_cast<unsigned>(thread)); });
    for (std::thread& thread : threads) thread.join();
    done = true;
    device.join();
    watch->stop();
    drop_in_child(library, path);
    std::printf("ok: %d calls\n", kThreads * rounds * kCalls);
    std::fflush(stdout);
    std::_Exit(0);  // the watch's thread may still be on its way out
}
