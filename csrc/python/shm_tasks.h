// Calls in flight, as Python sees them: they keep their tensors alive and run callbacks when they are done.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <vector>

#include "python/gil.h"
#include "record/group_record.h"
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

// An asynchronous message of the fast path. It records its own end, and reports a failure even if nobody waits for it.
class RecordedMessage final : public PythonMessage {
  public:
    // `failed` is called with the outcome. The caller keeps it and the record attached.
    RecordedMessage(GroupRecord& record, nb::handle failed) : record_(record), failed_(failed) {}
    uint64_t token = 0;

  protected:
    void finished() override {
        const bool done = outcome() == Outcome::Done;
        record_.end(token, done ? State::Completed : State::Failed);
        if (!done) with_gil([this] { report(); });
        PythonMessage::finished();
    }

  private:
    void report() const {
        PyObject* const code = PyLong_FromLong(static_cast<long>(outcome()));
        PyObject* const result = code == nullptr ? nullptr : PyObject_CallOneArg(failed_.ptr(), code);
        if (result == nullptr) PyErr_WriteUnraisable(failed_.ptr());
        Py_XDECREF(result);
        Py_XDECREF(code);
    }

    GroupRecord& record_;
    const nb::handle failed_;
};

// A collective with the lists that its request points to.
class PythonCollective final : public Attached<Collective> {
  public:
    std::vector<std::byte*> in, out;
    std::vector<int64_t> send_bytes, recv_bytes;
    std::vector<std::byte> shown, seen;
};

}  // namespace ringway::shm
