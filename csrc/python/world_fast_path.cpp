#include "python/world_fast_path.h"

#include "python/fast_method.h"

namespace ringway {

void WorldFastPath::serve(nb::object group, nb::object paths) {
    group_ = group.is_none() ? nb::object() : nb::steal(PyWeakref_NewRef(group.ptr(), nullptr));
    paths_ = std::move(paths);
}

// Tests of torch replace its `_world`, so nothing of it is kept.
bool WorldFastPath::serves_default() const {
    static PyObject* const world_name = PyUnicode_InternFromString("_world");
    static PyObject* const group_name = PyUnicode_InternFromString("_default_pg");
    if (!group_.is_valid()) return false;
    const nb::object world = nb::steal(PyObject_GetAttr(c10d_.ptr(), world_name));
    const nb::object current =
        world.is_valid() ? nb::steal(PyObject_GetAttr(world.ptr(), group_name)) : nb::object();
    if (!current.is_valid()) {
        PyErr_Clear();
        return false;
    }
#if PY_VERSION_HEX >= 0x030d0000
    PyObject* alive = nullptr;
    PyWeakref_GetRef(group_.ptr(), &alive);
    const nb::object group = nb::steal(alive);
    return alive != nullptr && alive == current.ptr();
#else
    return PyWeakref_GetObject(group_.ptr()) == current.ptr();
#endif
}

PyObject* WorldFastPath::run(PyObject* const* arguments) {
    static PyObject* const tables[] = {PyUnicode_InternFromString("by_op"), PyUnicode_InternFromString("async_by_op")};
    if (!serves_default()) Py_RETURN_FALSE;
    const nb::object by_op = nb::steal(PyObject_GetAttr(paths_.ptr(), tables[arguments[4] == Py_True ? 1 : 0]));
    const Py_ssize_t op = PyNumber_AsSsize_t(arguments[0], PyExc_IndexError);
    if (PyErr_Occurred() != nullptr) return nullptr;
    const nb::object methods = nb::borrow(PyTuple_GetItem(by_op.ptr(), op));  // a call may close the paths
    if (!methods.is_valid()) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(methods.ptr()); ++i) {
        PyObject* result = PyObject_Vectorcall(PyTuple_GET_ITEM(methods.ptr(), i), arguments, FastCall::kArguments, nullptr);
        if (result == nullptr) translate_error();
        if (result != Py_False) return result;
        Py_DECREF(result);
    }
    Py_RETURN_FALSE;
}

void WorldFastPath::translate_error() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    const nb::object raised = nb::steal(PyObject_CallOneArg(failure_.ptr(), value));
    Py_DECREF(value);
    if (raised.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

}  // namespace ringway
