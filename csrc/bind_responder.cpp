#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "responder.h"

namespace nb = nanobind;
using namespace ringway;

void bind_responder(nb::module_& m) {
    m.def("dumps_stacks", &dumps_stacks);
    nb::class_<Responder>(m, "Responder")
        .def(nb::init<std::shared_ptr<Recorder>, const std::string&, const std::string&, const std::string&>(),
             nb::arg("recorder"), nb::arg("address"), nb::arg("token"), nb::arg("facts"))
        .def_prop_ro("port", &Responder::port)
        .def(
            "wait",
            [](Responder& self, double seconds) {
                nb::gil_scoped_release release;
                return static_cast<int>(self.wait(seconds));
            },
            nb::arg("seconds"))
        .def("answer", &Responder::answer, nb::arg("stacks"))
        .def("use_signal", &Responder::use_signal, nb::arg("number"), nb::arg("fd"))
        .def("farewell", &Responder::farewell, nb::arg("why"))
        .def("set_recorder", &Responder::set_recorder, nb::arg("recorder"))
        .def("dump_at", &Responder::dump_at, nb::arg("number"), nb::arg("path"))
        .def(
            "close",
            [](Responder& self) {
                nb::gil_scoped_release release;
                self.close();
            });
}
