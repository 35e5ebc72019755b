// Calls in flight, as Python sees them: they keep their tensors alive and run callbacks when they are done.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <vector>

#include "python/gil.h"
#include "shm/engine.h"

namespace ringway::shm {

namespace nb = nanobind;

// What Python adds to a task. Objects are released with the GIL held, on any thread.
class Attachment {
  public:
    ~Attachment() {
        if (kept_.empty() && callbacks_.empty()) return;
        with_gil([this] {
            kept_.clear();
            callbacks_.clear();
        });
    }

    void keep(nb::handle object) { kept_.push_back(nb::borrow(object)); }

    // Needs the GIL. Calls back now if the task is already done.
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

    // Called without the GIL. Takes it only if there are callbacks: the next collective may be waiting.
    void tell() {
        std::vector<nb::object> callbacks;
        {
            std::lock_guard<std::mutex> guard(lock_);
            told_ = true;
            if (callbacks_.empty()) return;
            callbacks.swap(callbacks_);
        }
        with_gil([&] {
            kept_.clear();
            for (const nb::object& callback : callbacks) {
                PyObject* const result = PyObject_CallNoArgs(callback.ptr());
                if (result == nullptr) PyErr_WriteUnraisable(callback.ptr());
                Py_XDECREF(result);
            }
            callbacks.clear();
        });
    }

  private:
    std::mutex lock_;
    bool told_ = false;
    std::vector<nb::object> kept_;
    std::vector<nb::object> callbacks_;
};

template <class Base>
class Attached : public Base {
  public:
    Attachment attachment;

  protected:
    void finished() override { attachment.tell(); }
};

using PythonMessage = Attached<Message>;

// A collective with the lists that its request points to.
class PythonCollective final : public Attached<Collective> {
  public:
    std::vector<std::byte*> in, out;
    std::vector<int64_t> send_bytes, recv_bytes;
};

}  // namespace ringway::shm
