// The calls of one group on CUDA streams, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "device/stream_watch.h"
#include "python/gil.h"

namespace ringway::device {

namespace nb = nanobind;

// A Python function that the watch's thread calls, and perhaps destroys.
class Callback {
  public:
    explicit Callback(nb::object function) : function_(function.release().ptr()) {}
    ~Callback() {
        // Leaked at exit: this thread may hold the GIL, and must not sleep with it.
        if (interpreter_exits() && !this_thread_exits()) return;
        with_gil([this] { Py_DECREF(function_); });
    }
    Callback(const Callback&) = delete;
    Callback& operator=(const Callback&) = delete;

    void operator()(const StreamCalls::News& news) const {
        with_gil([&] {
            try {
                nb::list calls;
                for (const LateCall& call : news.ended)
                    calls.append(nb::make_tuple(call.token, call.note,
                                                nb::make_tuple(call.times.started_ns, call.times.completed_ns,
                                                               call.times.stream, call.times.beside)));
                const nb::object waiting =
                    news.waiting.token == 0 ? nb::object(nb::none()) : nb::object(nb::int_(news.waiting.note));
                nb::borrow(function_)(calls, waiting, news.overdue, news.open, news.failure);
            } catch (nb::python_error& error) {
                error.restore();
                PyErr_WriteUnraisable(function_);
            }
        });
    }

  private:
    PyObject* function_;
};

// Closes the calls when Python drops them: the record may go next.
class Calls {
  public:
    Calls(std::shared_ptr<StreamWatch> watch, GroupRecord& record, nb::object report)
        : watch_(std::move(watch)),
          calls_(std::make_shared<StreamCalls>(
              record, [callback = std::make_shared<Callback>(std::move(report))](const StreamCalls::News& news) {
                  (*callback)(news);
              })) {}
    ~Calls() { calls_->close(); }
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

    bool follow(uint64_t token, uint64_t note, int device, uintptr_t stream, Mark started = {}) {
        return watch_->follow(calls_, token, note, device, stream, started);
    }
    // `since`: when the first call began that no stream has waited for; 0 if there is none.
    void open_since(int64_t since) {
        calls_->look_at_ns.store(since == 0 ? 0 : since + kLateNs);
        if (since != 0) watch_->look_after(calls_);
    }
    void settle(double seconds) {
        const GilRelease released;
        watch_->settle(*calls_, seconds);
    }
    StreamCalls& operator*() { return *calls_; }
    StreamCalls* operator->() { return calls_.get(); }
    StreamWatch& watch() { return *watch_; }

  private:
    std::shared_ptr<StreamWatch> watch_;
    std::shared_ptr<StreamCalls> calls_;
};

// Shared with the thread, which ends when Python drops it.
struct Watch {
    explicit Watch(const std::string& library) : shared(std::make_shared<StreamWatch>(library)) {}
    ~Watch() { shared->stop(); }
    std::shared_ptr<StreamWatch> shared;
};

}  // namespace ringway::device
