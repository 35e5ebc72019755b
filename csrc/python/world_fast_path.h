// One native step leads from a function of the API to a fast path of its group, without looking for the group's communicator
// in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "python/path_table.h"

namespace ringway {

class WorldFastPath {
  public:
    // torch's module `distributed_c10d` knows the default group. `bridge` is the class of ringway's groups, each of which has
    // its table in `paths`. `failure` turns the error of a path and its group, None for the default one, into the error to
    // raise.
    WorldFastPath(nb::object c10d, nb::object bridge, nb::object failure)
        : c10d_(std::move(c10d)),
          names_(PyModule_GetDict(c10d_.ptr())),
          bridge_(std::move(bridge)),
          failure_(std::move(failure)) {}

    // From now on: the default group, held weakly, and the table of its paths. None for no group.
    void serve(nb::object group, nb::object table);

    // What the table says of a call. False if torch's default group is another one.
    PyObject* run(PyObject* const* given, Py_ssize_t count);
    // Likewise, for the group that is the first argument: None, or any object that a program passes. False if it is no
    // `bridge`, or a subclass's.
    PyObject* run_on(PyObject* const* given, Py_ssize_t count);

  private:
    bool serves_default() const;
    void translate_error(nb::handle group);

    const nb::object c10d_;
    PyObject* const names_;  // the module's
    const nb::object bridge_;
    const nb::object failure_;
    nb::object group_, table_;
    PathTable* paths_ = nullptr;  // the table's
};

}  // namespace ringway
