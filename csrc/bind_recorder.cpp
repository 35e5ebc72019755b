#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "callsite.h"
#include "checksum.h"
#include "recorder.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace ringway;

namespace {

nb::tuple as_tuple(const Recorder& recorder, const Entry& entry) {
    const CallSite where = site(entry.site);
    nb::object call_site = nb::none();
    if (entry.site != 0) call_site = nb::make_tuple(where.file, where.line, where.function);
    return nb::make_tuple(entry.sequence, static_cast<int>(entry.op), entry.bytes, static_cast<int>(entry.dtype),
                          static_cast<int>(entry.reduce), entry.peer, recorder.text(entry.group),
                          recorder.text(entry.label), call_site, entry.issued_ns, entry.completed_ns,
                          static_cast<int>(entry.state));
}

uint32_t checksum(nb::handle buffer, uint32_t crc) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    {
        nb::gil_scoped_release release;
        crc = crc32c(crc, view.buf, static_cast<size_t>(view.len));
    }
    PyBuffer_Release(&view);
    return crc;
}

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def("__init__", [](Recorder* self, size_t capacity) { new (self) Recorder(capacity); }, nb::arg("capacity"))
        .def_prop_ro("total", &Recorder::total)
        .def_prop_ro("capacity", &Recorder::capacity)
        .def("intern", &Recorder::intern, nb::arg("text"))
        .def(
            "recent",
            [](const Recorder& self, size_t count) {
                nb::list records;
                for (const Entry& entry : self.recent(count)) records.append(as_tuple(self, entry));
                return records;
            },
            nb::arg("count"))
        .def(
            "find",
            [](const Recorder& self, uint64_t token) -> nb::object {
                Entry entry;
                if (!self.find(token, entry)) return nb::none();
                return as_tuple(self, entry);
            },
            nb::arg("token"));

    nb::class_<Lane>(m, "Lane")
        .def(
            "__init__",
            [](Lane* self, std::shared_ptr<Recorder> recorder, const std::string& group) {
                new (self) Lane(std::move(recorder), group);
            },
            nb::arg("recorder"), nb::arg("group"))
        .def(
            "begin",
            [](Lane& self, int op, int64_t bytes, int dtype, int reduce, int32_t peer, uint32_t label) {
                return self.begin(static_cast<Op>(op), bytes, static_cast<DType>(dtype), static_cast<Reduce>(reduce),
                                  peer, label, current_site());
            },
            nb::arg("op"), nb::arg("bytes"), nb::arg("dtype"), nb::arg("reduce"), nb::arg("peer"), nb::arg("label"))
        .def(
            "begin_plain",
            // For the common call: a dense CPU tensor. 0 when it is not one, and nothing was recorded.
            [](Lane& self, int op, nb::handle tensor, int reduce, int32_t peer) -> uint64_t {
                TensorView view;
                if (!view_tensor(tensor.ptr(), view) || !view.cpu || !view.contiguous) return 0;
                return self.begin(static_cast<Op>(op), view.nbytes, view.dtype, static_cast<Reduce>(reduce), peer, 0,
                                  current_site());
            },
            nb::arg("op"), nb::arg("tensor"), nb::arg("reduce"), nb::arg("peer"))
        .def(
            "end", [](Lane& self, uint64_t token, bool ok) { self.end(token, ok ? State::Completed : State::Failed); },
            nb::arg("token"), nb::arg("ok"))
        .def_prop_ro("collectives", &Lane::collectives)
        .def_prop_ro("messages", &Lane::messages)
        .def_prop_ro("completed", &Lane::completed);

    m.def("set_machinery", &set_machinery, nb::arg("inside"), nb::arg("outside"));
    m.def(
        "set_tensor_types",
        [](nb::tuple types, nb::object exchange) { set_tensor_types(types.ptr(), exchange.ptr()); },
        nb::arg("types"), nb::arg("exchange").none());
    m.def("monotonic_ns", &monotonic_ns);
    m.def("crc32c", &checksum, nb::arg("data"), nb::arg("crc") = 0);
}
