// Methods of the fast paths. They bypass nanobind's matching of arguments, which would take a tenth of a small call's time.
#pragma once

#include <nanobind/nanobind.h>

#include <new>

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

}  // namespace ringway
