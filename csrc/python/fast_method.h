// Methods of the fast paths. They bypass nanobind's matching of arguments, which would take a tenth of a small call's time.
#pragma once

#include <nanobind/nanobind.h>

#include <new>

#include "codes.h"
#include "record/call_board.h"

namespace ringway {

using FastMethod = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

inline PyMethodDef fast_method(const char* name, FastMethod method) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method)), METH_FASTCALL, nullptr};
}

// What `work` returns, or null with a Python error set.
template <class Work>
PyObject* or_raise(const Work& work) {
    try {
        return work();
    } catch (nanobind::python_error& error) {
        error.restore();
    } catch (const DifferentCalls&) {
        PyErr_SetString(nanobind::module_::import_("ringway._core").attr("CallsDiffer").ptr(), "ranks called different things");
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// The arguments of a path's `run`, as _core.pyi names them.
struct FastCall {
    static constexpr Py_ssize_t kArguments = 7;
    int op;
    nanobind::handle outputs, inputs;
    int peer;
    bool async;
    int tag;
    Reduce reduce;
};

// Reads the arguments, and returns what `run` makes of them.
template <class Run>
PyObject* run_with(PyObject* const* given, Py_ssize_t count, const Run& run) {
    if (count != FastCall::kArguments) {
        PyErr_SetString(PyExc_TypeError, "run takes op, outputs, inputs, peer, async_op, tag, reduce");
        return nullptr;
    }
    const long op = PyLong_AsLong(given[0]), peer = PyLong_AsLong(given[3]), tag = PyLong_AsLong(given[5]);
    const long reduce = PyLong_AsLong(given[6]);
    if (PyErr_Occurred() != nullptr) return nullptr;
    const FastCall call{static_cast<int>(op),   given[1], given[2], static_cast<int>(peer), given[4] != Py_False && PyObject_IsTrue(given[4]) == 1,
                        static_cast<int>(tag), static_cast<Reduce>(reduce)};
    return or_raise([&] { return nanobind::object(run(call)).release().ptr(); });
}

}  // namespace ringway
