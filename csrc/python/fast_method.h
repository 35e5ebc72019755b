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
    int op = 0;
    nanobind::handle outputs, inputs;
    int peer = -1;
    bool async = false;
    int tag = 0;
    Reduce reduce = Reduce::Sum;
    nanobind::handle options = {};  // the caller's own options of torch, which torch gets as they are; or null
    bool by_torch = false;          // torch gets the Work first

    enum class Read { Done, TooLarge, Error };
    // Reads at least three arguments. The general path refuses a number that is too large. After an error it is set.
    Read read(PyObject* const* given, Py_ssize_t count) {
        bool fits = true, failed = false;
        const auto number = [&](Py_ssize_t place, int usual) {
            if (place >= count) return usual;
            int overflow = 0;
            const long value = PyLong_AsLongAndOverflow(given[place], &overflow);
            fits &= overflow == 0 && value == static_cast<int>(value);
            failed |= value == -1 && PyErr_Occurred() != nullptr;
            return static_cast<int>(value);
        };
        op = number(0, 0);
        outputs = given[1];
        inputs = given[2];
        peer = number(3, peer);
        async = count > 4 && given[4] != Py_False && PyObject_IsTrue(given[4]) == 1;
        tag = number(5, tag);
        reduce = static_cast<Reduce>(number(6, static_cast<int>(reduce)));
        return failed ? Read::Error : fits ? Read::Done : Read::TooLarge;
    }
};

}  // namespace ringway
