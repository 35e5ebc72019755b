#include "python/interpreter_exit.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <mutex>

namespace ringway {
namespace {

std::atomic<bool> exits{false};
pthread_t exiting_thread;

// The C++ runtimes whose std::terminate may be reached: the one that ringway is linked with, and libstdc++, which torch
// uses. In wheels they differ.
enum Runtime { kOwn, kTorchs };
std::atomic<std::terminate_handler> handlers_before[2];

bool left_behind() { return interpreter_exits() && !this_thread_exits(); }

// CPython's forced end of a thread arrives here from the first frame that lets no exception pass.
template <Runtime runtime>
void terminated() {
    if (left_behind()) sleep_forever();
    handlers_before[runtime].load()();
}

template <Runtime runtime, class SetTerminate>
void handle_terminate_of(SetTerminate set) {
    const std::terminate_handler before = set(terminated<runtime>);
    if (before != terminated<kOwn> && before != terminated<kTorchs>) handlers_before[runtime].store(before);
}

constexpr int kCrashes[] = {SIGSEGV, SIGBUS, SIGABRT};
struct sigaction actions_before[3];

// Between the interpreter's end and the process's, a thread may ask for the GIL of an interpreter whose memory is freed.
void crashed(int number) {
    if (left_behind()) sleep_forever();
    for (int i = 0; i < 3; ++i) sigaction(kCrashes[i], &actions_before[i], nullptr);
    raise(number);
}

void sleeps(int) {
    if (left_behind()) sleep_forever();
}

void end_now(int status, void*) {
    fflush(nullptr);
    _exit(status);
}

}  // namespace

// An exception keeps the handler of the moment at which it is thrown, and a library that is loaded later may bring its
// own handler. So this is called early, and again where it matters.
void handle_terminate() {
    handle_terminate_of<kOwn>(std::set_terminate);
#ifdef _LIBCPP_VERSION
    void* library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);  // never closed: the handler stays
    void* set = library == nullptr ? nullptr : dlsym(library, "_ZSt13set_terminatePFvvE");
    using SetTerminate = std::terminate_handler (*)(std::terminate_handler);
    if (set != nullptr) handle_terminate_of<kTorchs>(reinterpret_cast<SetTerminate>(set));
#endif
}

bool interpreter_exits() { return exits.load(std::memory_order_acquire); }

bool this_thread_exits() { return pthread_equal(pthread_self(), exiting_thread) != 0; }

void sleep_forever() {
    for (;;) pause();
}

void begin_exit() {
    static std::once_flag once;
    std::call_once(once, [] {
        exiting_thread = pthread_self();
        exits.store(true, std::memory_order_release);
    });
    handle_terminate();
}

void leave_threads_behind(const std::vector<int>& threads) {
    static std::once_flag once;
    std::call_once(once, [&] {
        begin_exit();
        struct sigaction action {};
        action.sa_handler = crashed;
        for (int i = 0; i < 3; ++i) sigaction(kCrashes[i], &action, &actions_before[i]);
        action.sa_handler = sleeps;
        sigaction(SIGRTMAX, &action, nullptr);
        for (const int thread : threads) syscall(SYS_tgkill, getpid(), thread, SIGRTMAX);
        on_exit(end_now, nullptr);
    });
}

}  // namespace ringway
