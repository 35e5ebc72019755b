// A method of a bridge whose calls a fast path takes: torch's functions and its C++ code call it in place of the Python
// method. pybind11 takes a built-in function for torch's own method and would bypass it, so this is an object.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "python/stream_fast_path.h"

namespace ringway::device {

namespace nb = nanobind;

class BridgeMethod {
  public:
    // `path` is a StreamFastPath. `otherwise` is the Python method, for calls that the path does not take; `failure` says
    // what to raise for an error.
    BridgeMethod(int op, nb::object path, nb::object otherwise, nb::object failure)
        : op_(op), path_(std::move(path)), otherwise_(std::move(otherwise)), failure_(std::move(failure)) {}

    // As tp_call wants it: null with a Python error set.
    PyObject* operator()(PyObject* arguments, PyObject* named) const;

  private:
    nb::object run(PyObject* arguments) const;
    nb::object run_with_options(nb::handle outputs, nb::handle inputs, nb::handle options) const;
    nb::object run_message(nb::handle tensor, int peer, int tag) const;
    StreamFastPath& path() const { return *nb::inst_ptr<StreamFastPath>(path_); }

    const int op_;
    const nb::object path_, otherwise_, failure_;
};

}  // namespace ringway::device
