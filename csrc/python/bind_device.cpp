#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>

#include "python/bridge_method.h"
#include "python/stream_calls.h"
#include "python/stream_fast_path.h"

namespace nb = nanobind;
using namespace ringway;
using namespace ringway::device;

namespace {

PyObject* call_method(PyObject* self, PyObject* arguments, PyObject* named) {
    return (*nb::inst_ptr<BridgeMethod>(self))(arguments, named);
}

PyType_Slot method_slots[] = {{Py_tp_call, reinterpret_cast<void*>(call_method)}, {0, nullptr}};

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
        .def("follow", [](Calls& self, uint64_t token, uint64_t note, int device,
                          uintptr_t stream) { return self.follow(token, note, device, stream); })
        .def("settle", &Calls::settle, nb::arg("seconds"))
        .def("fail", [](Calls& self) { self->fail(); })
        .def("close", [](Calls& self) { self->close(); })
        .def_prop_ro("pending", [](Calls& self) { return self->pending(); })
        .def_prop_rw(
            "limit", [](Calls& self) { return self->limit.load(); }, [](Calls& self, double seconds) { self->limit = seconds; });

    nb::class_<StreamWork>(m, "StreamWork")
        .def("wait", [](StreamWork& self) { return nb::cast<StreamFastPath&>(self.path).wait(self); })
        .def_ro("path", &StreamWork::path)
        .def_ro("kind", &StreamWork::kind)
        .def_ro("sequence", &StreamWork::sequence)
        .def_ro("token", &StreamWork::token)
        .def_ro("torchs", &StreamWork::torchs)
        .def_ro("outputs", &StreamWork::outputs)
        .def_ro("is_message", &StreamWork::is_message)
        .def_ro("followed", &StreamWork::followed)
        .def_prop_ro("seconds",
                     [](StreamWork& self) { return static_cast<double>(monotonic_ns() - self.began_ns) / 1e9; });

    nb::class_<StreamFastPath, FastPath>(m, "StreamFastPath")
        .def(nb::init<GroupRecord&, int, int, int, uint64_t, uint64_t, uint64_t, uint32_t, Calls&, nb::dict, nb::object,
                      nb::tuple, std::unordered_map<int64_t, int>>(),
             nb::arg("record"), nb::arg("rank"), nb::arg("size"), nb::arg("device"), nb::arg("moved"), nb::arg("summed"),
             nb::arg("averaged"), nb::arg("ops"), nb::arg("calls"), nb::arg("open"), nb::arg("work"), nb::arg("streams"),
             nb::arg("reductions"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 10>())
        .def("note_open", &StreamFastPath::note_open)
        .def_rw("variant", &StreamFastPath::variant)
        .def_ro("captures", &StreamFastPath::captures);

    nb::class_<BridgeMethod>(m, "BridgeMethod", nb::type_slots(method_slots))
        .def(nb::init<int, nb::object, nb::object, nb::object>(), nb::arg("op"), nb::arg("path"), nb::arg("otherwise"),
             nb::arg("failure"));
}
