#include "record/stacks.h"

#include <Python.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace ringway {
namespace {

constexpr auto kLongest = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::milliseconds(2);

using DumpThreads = const char* (*)(int, PyInterpreterState*, PyThreadState*);

DumpThreads dump_threads() {
    static const auto found = reinterpret_cast<DumpThreads>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
    return found;
}

// What the copy does. Any lock of the process may be held forever in it, so it calls nothing that takes one.
[[noreturn]] void dump_and_end(DumpThreads dump, int number, int fd) {
    // A crash of the copy is silent: none of the program's handlers run, and there is no core file.
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    for (const int fatal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) sigaction(fatal, &plain, nullptr);
    if (dump != nullptr) {
        dump(fd, PyInterpreterState_Main(), nullptr);
    } else {
        sigset_t own;
        sigemptyset(&own);
        sigaddset(&own, number);
        sigprocmask(SIG_UNBLOCK, &own, nullptr);
        // With the kernel's own ids: the C library still has those of the original.
        syscall(SYS_tgkill, syscall(SYS_getpid), syscall(SYS_gettid), number);
    }
    syscall(SYS_exit_group, 0);
    __builtin_unreachable();
}

void reap(pid_t copy) {
    const auto deadline = std::chrono::steady_clock::now() + kLongest;
    while (waitpid(copy, nullptr, WNOHANG | __WALL) == 0) {
        if (std::chrono::steady_clock::now() > deadline) {
            kill(copy, SIGKILL);
            waitpid(copy, nullptr, __WALL);
            return;
        }
        std::this_thread::sleep_for(kLook);
    }
}

std::string read_back(int fd) {
    std::string text(kMaxStackBytes, '\0');
    const ssize_t got = pread(fd, &text[0], text.size(), 0);
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return text;
}

}  // namespace

bool dumps_stacks() { return dump_threads() != nullptr; }

std::string stacks_of_a_copy(int signal, int fd) {
    const DumpThreads dump = dump_threads();
    const int into = dump != nullptr ? memfd_create("ringway-stacks", MFD_CLOEXEC) : fd;
    if (into < 0) return "";
    std::string text;
    if (dump != nullptr || (ftruncate(into, 0) == 0 && lseek(into, 0, SEEK_SET) == 0)) {
        // The bare system call: fork()'s handlers take locks, and SIGCHLD would reach the program.
        const auto copy = static_cast<pid_t>(syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
        if (copy == 0) dump_and_end(dump, signal, into);
        if (copy > 0) {
            reap(copy);
            text = read_back(into);
        }
    }
    if (dump != nullptr) ::close(into);
    return text;
}

}  // namespace ringway
