#include "python/bridge_method.h"

#include "codes.h"
#include "python/fast_method.h"
#include "python/stream_fast_path.h"

namespace ringway::device {
namespace {

int integer(PyObject* given) {
    const long value = PyLong_AsLong(given);
    if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return static_cast<int>(value);
}

bool is_empty(PyObject* given) { return PyList_CheckExact(given) && PyList_GET_SIZE(given) == 0; }

// Replaces the error that is set by what `failure` makes of it.
void replace_error(nb::handle failure) {
    try {
        nb::object before;
        {
            nb::python_error raised;  // takes the error that is set
            before = nb::borrow(raised.value());
        }
        const nb::object after = failure(before);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(after.ptr())), after.ptr());
    } catch (nb::python_error& error) {
        error.restore();
    }
}

}  // namespace

// The arguments are those that torch passes.
nb::object BridgeMethod::issue(PyObject* arguments) const {
    StreamFastPath& path = *nb::inst_ptr<StreamFastPath>(path_);
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    const auto given = [arguments](Py_ssize_t at) { return PyTuple_GET_ITEM(arguments, at); };
    switch (static_cast<Op>(op_)) {
        case Op::AllReduce:
        case Op::Broadcast:
            if (count == 2) return path.issue(op_, given(0), given(0), given(1));
            break;
        case Op::AllGatherSingle:
        case Op::ReduceScatterSingle:
            if (count == 3) return path.issue(op_, given(0), given(1), given(2));
            break;
        case Op::AllToAllSingle:
            if (count == 5 && is_empty(given(2)) && is_empty(given(3))) return path.issue(op_, given(0), given(1), given(4));
            break;
        case Op::Send:
        case Op::Recv:
            if (count == 3) return path.issue_message(op_, given(0), integer(given(1)), integer(given(2)));
            break;
        default:
            break;
    }
    return nb::bool_(false);
}

PyObject* BridgeMethod::operator()(PyObject* arguments, PyObject* named) const {
    if (named == nullptr || PyDict_GET_SIZE(named) == 0) {
        PyObject* const done = or_raise([&] { return issue(arguments).release().ptr(); });
        if (done == nullptr) replace_error(failure_);
        if (done != Py_True && done != Py_False) return done;
        const bool synchronous = done == Py_True;
        Py_DECREF(done);
        if (synchronous) Py_RETURN_NONE;
    }
    return PyObject_Call(otherwise_.ptr(), arguments, named);
}

}  // namespace ringway::device
