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

// The arguments of a path's `run`, as _core.pyi names them, and what a BridgeMethod adds.
struct FastCall {
    static constexpr Py_ssize_t kArguments = 7;
    int op;
    nanobind::handle outputs, inputs;
    int peer = -1;
    bool async = false;
    int tag = 0;
    Reduce reduce = Reduce::Sum;
    nanobind::handle options = {};  // the caller's own options of torch, which torch gets as they are; or null
    bool by_torch = false;          // torch gets the Work first
};

// Reads the arguments, and returns what `run` makes of them.
template <class Run>
PyObject* run_with(PyObject* const* given, Py_ssize_t count, const Run& run) {
    if (count != FastCall::kArguments) {
        PyErr_SetString(PyExc_TypeError, "run takes op, outputs, inputs, peer, async_op, tag, reduce");
        return nullptr;
    }
    bool fits = true;  // the general path refuses numbers that do not
    const auto number = [&](Py_ssize_t place) {
        int overflow = 0;
        const long value = PyLong_AsLongAndOverflow(given[place], &overflow);
        fits &= overflow == 0 && value == static_cast<int>(value);
        return static_cast<int>(value);
    };
    const int op = number(0), peer = number(3), tag = number(5), reduce = number(6);
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (!fits) Py_RETURN_FALSE;
    const bool async = given[4] != Py_False && PyObject_IsTrue(given[4]) == 1;
    const FastCall call{op, given[1], given[2], peer, async, tag, static_cast<Reduce>(reduce)};
    return or_raise([&] { return nanobind::object(run(call)).release().ptr(); });
}

}  // namespace ringway
