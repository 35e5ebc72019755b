// The fast paths of one group, op by op: one native step leads from a call to the path that takes it.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <utility>
#include <vector>

#include "python/fast_path.h"

namespace ringway {

class PathTable {
  public:
    // By the op's code: the `run` of each path to try, in order, for synchronous and for asynchronous calls.
    void set(const nb::tuple& sync, const nb::tuple& async);
    void clear();
    bool has(size_t op) const { return op < sync_.size() && !sync_[op].empty(); }

    // The arguments of a FastCall; those after the first three may be missing. Returns what the first path says that takes
    // the call; False if none does, and nothing has happened; null with an error set.
    PyObject* run(PyObject* const* given, Py_ssize_t count);

    // For Python's garbage collector.
    int traverse(visitproc visit, void* argument) const;

  private:
    struct Way {
        nb::object run;
        FastPath* path = nullptr;  // whose `run` is native, and called without Python
    };
    using Ways = std::array<std::vector<Way>, kFastOps>;
    static Ways ways_of(const nb::tuple& by_op);

    Ways sync_, async_;
};

}  // namespace ringway
