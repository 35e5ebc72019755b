#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "device/stream_watch.h"
#include "python/gil.h"

namespace nb = nanobind;
using namespace ringway;
using namespace ringway::device;

namespace {

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
                for (const LateCall& call : news.ended) calls.append(nb::make_tuple(call.token, call.note));
                const nb::object waiting =
                    news.waiting.token == 0 ? nb::object(nb::none()) : nb::object(nb::int_(news.waiting.note));
                nb::borrow(function_)(calls, waiting, news.overdue, news.failure);
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

    bool follow(uint64_t token, uint64_t note, int device, uintptr_t stream) {
        return watch_->follow(calls_, token, note, device, stream);
    }
    void settle(double seconds) {
        const GilRelease released;
        watch_->settle(*calls_, seconds);
    }
    StreamCalls& operator*() { return *calls_; }

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

}  // namespace

void bind_device(nb::module_& m) {
    nb::class_<Watch>(m, "StreamWatch").def(nb::init<const std::string&>(), nb::arg("library"));
    nb::class_<Calls>(m, "StreamCalls")
        .def(
            "__init__",
            [](Calls* self, Watch& watch, GroupRecord& record, nb::object report) {
                new (self) Calls(watch.shared, record, std::move(report));
            },
            nb::arg("watch"), nb::arg("record"), nb::arg("report"), nb::keep_alive<1, 3>())
        .def("follow", &Calls::follow)  // no argument names: nanobind calls it faster without
        .def("settle", &Calls::settle, nb::arg("seconds"))
        .def("fail", [](Calls& self) { (*self).fail(); })
        .def("close", [](Calls& self) { (*self).close(); })
        .def_prop_ro("pending", [](Calls& self) { return (*self).pending(); })
        .def_prop_rw(
            "limit", [](Calls& self) { return (*self).limit.load(); }, [](Calls& self, double seconds) { (*self).limit = seconds; });
}
