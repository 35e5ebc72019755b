// The fast paths of the default group: one native step leads from a function of the API to a path, without looking for
// the group's communicator in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace ringway {

namespace nb = nanobind;

class WorldFastPath {
  public:
    // torch's module `distributed_c10d` knows the default group. `failure` turns the error of a path into the one to raise.
    WorldFastPath(nb::object c10d, nb::object failure)
        : c10d_(std::move(c10d)), failure_(std::move(failure)) {}

    // From now on: the default group, held weakly, and its paths. None for no group.
    void serve(nb::object group, nb::object paths);

    // Passes the arguments of a FastCall to the paths that may take it. Returns what the first says that takes it; null with
    // an error set. If none takes it, or torch's default group is another one, the result is False, and nothing has
    // happened.
    PyObject* run(PyObject* const* arguments);

  private:
    bool serves_default() const;
    void translate_error();

    const nb::object c10d_, failure_;
    nb::object group_, paths_;
};

}  // namespace ringway
