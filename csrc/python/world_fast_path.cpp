#include "python/world_fast_path.h"

namespace ringway {

void WorldFastPath::serve(nb::object group, nb::object table) {
    group_ = group.is_none() ? nb::object() : nb::steal(PyWeakref_NewRef(group.ptr(), nullptr));
    paths_ = table.is_none() ? nullptr : nb::cast<PathTable*>(table);
    table_ = std::move(table);
}

// Tests of torch replace its `_world`, so nothing of it is kept.
bool WorldFastPath::serves_default() const {
    static PyObject* const world_name = PyUnicode_InternFromString("_world");
    static PyObject* const group_name = PyUnicode_InternFromString("_default_pg");
    if (!group_.is_valid()) return false;
    PyObject* const world = PyDict_GetItemWithError(names_, world_name);
    const nb::object current = world != nullptr ? nb::steal(PyObject_GetAttr(world, group_name)) : nb::object();
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

PyObject* WorldFastPath::run(PyObject* const* given, Py_ssize_t count) {
    if (!serves_default()) Py_RETURN_FALSE;
    const nb::object kept = table_;  // a call may end the group
    PyObject* const done = paths_->run(given, count);
    if (done == nullptr) translate_error(nb::none());
    return done;
}

PyObject* WorldFastPath::run_on(PyObject* const* given, Py_ssize_t count) {
    static PyObject* const paths_name = PyUnicode_InternFromString("paths");
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "the group is missing");
        return nullptr;
    }
    PyObject* const group = given[0];
    if (group == Py_None) return run(given + 1, count - 1);
    if (reinterpret_cast<PyObject*>(Py_TYPE(group)) != bridge_.ptr()) Py_RETURN_FALSE;
    const nb::object table = nb::steal(PyObject_GetAttr(group, paths_name));
    PathTable* paths = nullptr;
    if (!table.is_valid()) PyErr_Clear();  // the group is being made
    if (!table.is_valid() || !nb::try_cast(table, paths) || paths == nullptr) Py_RETURN_FALSE;
    PyObject* const done = paths->run(given + 1, count - 1);
    if (done == nullptr) translate_error(group);
    return done;
}

void WorldFastPath::translate_error(nb::handle group) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    PyObject* const arguments[] = {value, group.ptr()};
    const nb::object raised = nb::steal(PyObject_Vectorcall(failure_.ptr(), arguments, 2, nullptr));
    Py_DECREF(value);
    if (raised.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

}  // namespace ringway
