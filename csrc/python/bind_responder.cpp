#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/gil.h"
#include "record/responder.h"
#include "record/stacks.h"

namespace nb = nanobind;
using namespace ringway;
using Release = nb::call_guard<GilRelease>;

void bind_responder(nb::module_& m) {
    m.def("handle_terminate", &handle_terminate);
    m.def("begin_exit", &begin_exit);
    m.def("leave_threads_behind", &leave_threads_behind, nb::arg("threads"));
    m.def("dumps_stacks", &dumps_stacks);
    m.def("stacks_of_a_copy", &stacks_of_a_copy, nb::arg("signal") = 0, nb::arg("fd") = -1, Release());
    nb::class_<Responder>(m, "Responder")
        .def(nb::init<std::shared_ptr<Recorder>, const std::string&, const std::string&, const std::string&>(),
             nb::arg("recorder"), nb::arg("address"), nb::arg("token"), nb::arg("facts"))
        .def_prop_ro("port", &Responder::port)
        .def("wait", &Responder::wait, Release())
        .def("answer", &Responder::answer, nb::arg("stacks"))
        .def("use_signal", &Responder::use_signal, nb::arg("number"), nb::arg("fd"))
        .def("farewell", &Responder::farewell, nb::arg("why"))
        .def("tell_of", &Responder::tell_of, nb::arg("recorder"), nb::arg("facts"))
        .def("dump_at", &Responder::dump_at, nb::arg("number"), nb::arg("path"))
        .def("close", &Responder::close, Release());
}
