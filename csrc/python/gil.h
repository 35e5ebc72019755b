// The GIL, on threads that may outlive the interpreter.
//
// CPython before 3.14 ends a thread that asks for the GIL of a finalizing interpreter, by pthread_exit. That unwinds the
// thread's C++ frames, and the first destructor or catch block on the way takes the process down. Here the thread sleeps
// until the process ends instead, as it does in CPython from 3.14 on.
#pragma once

#include <Python.h>
#include <cxxabi.h>

#include "python/interpreter_exit.h"

namespace ringway {

// Runs `work`, which asks for the GIL or calls Python.
template <class Work>
auto or_sleep(const Work& work) -> decltype(work()) {
    try {
        return work();
    } catch (const abi::__forced_unwind&) {
        sleep_forever();
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
