// The GIL, on threads that may outlive the interpreter.
//
// CPython before 3.14 ends a thread that asks for the GIL of a finalizing interpreter, by pthread_exit. That unwinds the
// thread's C++ frames, and the first destructor or catch block on the way takes the process down. Here the thread sleeps
// until the process ends instead, as it does in CPython from 3.14 on.
#pragma once

#include <Python.h>

#include <exception>
#include <type_traits>

#include "python/interpreter_exit.h"

namespace ringway {

// Ends in sleep if its scope is left by pthread_exit, which is neither a return nor a C++ exception. A destructor, because
// libc++ has no type to catch that by.
class SleepIfEnded {
  public:
    ~SleepIfEnded() {
        if (!returned && std::uncaught_exceptions() == uncaught_) sleep_forever();
    }
    bool returned = false;

  private:
    const int uncaught_ = std::uncaught_exceptions();
};

// Runs `work`, which asks for the GIL or calls Python.
template <class Work>
auto or_sleep(const Work& work) -> decltype(work()) {
    SleepIfEnded guard;
    if constexpr (std::is_void_v<decltype(work())>) {
        work();
        guard.returned = true;
    } else {
        auto result = work();
        guard.returned = true;
        return result;
    }
}

// Runs `work` with the GIL, on any thread. It must not throw.
template <class Work>
void with_gil(const Work& work) {
    if (interpreter_exits() && !this_thread_exits()) sleep_forever();  // its memory may be gone
    or_sleep([&work] {
        const PyGILState_STATE state = PyGILState_Ensure();
        work();
        PyGILState_Release(state);
    });
}

class GilRelease {
  public:
    GilRelease() : saved_(PyEval_SaveThread()) {}
    ~GilRelease() {
        or_sleep([this] { PyEval_RestoreThread(saved_); });
    }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;

  private:
    PyThreadState* saved_;
};

}  // namespace ringway
