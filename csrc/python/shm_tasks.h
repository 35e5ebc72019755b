// Calls under way, as Python sees them: they keep their tensors, and call back when they are done.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <vector>

#include "shm/engine.h"

namespace ringway::shm {

namespace nb = nanobind;

// What Python adds to a task. Objects are released with the GIL held, on whichever thread that happens.
class Attachment {
  public:
    ~Attachment() {
        if (kept_.empty() && callbacks_.empty()) return;
        nb::gil_scoped_acquire gil;
        kept_.clear();
        callbacks_.clear();
    }

    void keep(nb::handle object) { kept_.push_back(nb::borrow(object)); }

    // With the GIL. Calls back now if the task has been told done.
    void when_done(nb::object callback) {
        {
            std::lock_guard<std::mutex> guard(lock_);
            if (!told_) {
                callbacks_.push_back(std::move(callback));
                return;
            }
        }
        callback();
    }

    // Without the GIL, which it takes only if somebody wants to be called: the next collective may be waiting.
    void tell() {
        std::vector<nb::object> callbacks;
        {
            std::lock_guard<std::mutex> guard(lock_);
            told_ = true;
            if (callbacks_.empty()) return;
        }
        nb::gil_scoped_acquire gil;
        {
            std::lock_guard<std::mutex> guard(lock_);
            callbacks.swap(callbacks_);
        }
        kept_.clear();
        for (nb::object& callback : callbacks) {
            PyObject* result = PyObject_CallNoArgs(callback.ptr());
            if (result == nullptr)
                PyErr_WriteUnraisable(callback.ptr());
            else
                Py_DECREF(result);
        }
        callbacks.clear();
    }

  private:
    std::mutex lock_;
    bool told_ = false;
    std::vector<nb::object> kept_;
    std::vector<nb::object> callbacks_;
};

// A collective with the lists that its request points to.
class PythonCollective final : public Collective {
  public:
    Attachment attachment;
    std::vector<std::byte*> in, out;
    std::vector<int64_t> send_bytes, recv_bytes;

  protected:
    void finished() override { attachment.tell(); }
};

class PythonMessage final : public Message {
  public:
    Attachment attachment;

  protected:
    void finished() override { attachment.tell(); }
};

}  // namespace ringway::shm
