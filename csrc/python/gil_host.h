// A Python thread as the engine's host: it releases the GIL while it waits, and checks for Ctrl-C.
#pragma once

#include <Python.h>

#include "python/gil.h"
#include "shm/wait.h"

namespace ringway::shm {

class GilHost final : public Host {
  public:
    ~GilHost() override { resume(); }

    void block() override {
        if (saved_ == nullptr && !raised_) saved_ = PyEval_SaveThread();
    }

    bool interrupted() override {
        if (raised_) return true;
        const bool was_blocked = saved_ != nullptr;
        resume();
        raised_ = PyErr_CheckSignals() != 0;
        if (was_blocked) block();
        return raised_;
    }

    // Takes the GIL back.
    void resume() {
        if (saved_ == nullptr) return;
        or_sleep([this] { PyEval_RestoreThread(saved_); });
        saved_ = nullptr;
    }

  private:
    PyThreadState* saved_ = nullptr;
    bool raised_ = false;  // a Python error is set, and the GIL stays held until the caller raises it
};

}  // namespace ringway::shm
