#include "python/bridge_method.h"

#include "codes.h"
#include "python/fast_method.h"

namespace ringway::device {
namespace {

int integer(PyObject* given) {
    const long value = PyLong_AsLong(given);
    if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return static_cast<int>(value);
}

// Interned once, and never destroyed: the interpreter may have ended by then.
struct Names {
    PyObject* const async_op = PyUnicode_InternFromString("asyncOp");
    PyObject* const reduce = PyUnicode_InternFromString("reduceOp");
    PyObject* const root = PyUnicode_InternFromString("rootRank");
};
const Names& names() {
    static const Names* const names = new Names;
    return *names;
}

nb::object attribute(nb::handle object, PyObject* name) {
    PyObject* const found = PyObject_GetAttr(object.ptr(), name);
    if (found == nullptr) throw nb::python_error();
    return nb::steal(found);
}

// torch passes some single tensors in lists.
nb::handle only_tensor(nb::handle given) {
    if (PyList_CheckExact(given.ptr()) && PyList_GET_SIZE(given.ptr()) == 1) return PyList_GET_ITEM(given.ptr(), 0);
    return given;
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
nb::object BridgeMethod::run(PyObject* arguments) const {
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    const auto given = [arguments](Py_ssize_t at) { return PyTuple_GET_ITEM(arguments, at); };
    switch (static_cast<Op>(op_)) {
        case Op::AllReduce:
        case Op::Broadcast:
            if (count == 2) return run_with_options(given(0), given(0), given(1));
            break;
        case Op::AllGatherSingle:
        case Op::ReduceScatterSingle:
            if (count == 3) return run_with_options(given(0), given(1), given(2));
            break;
        case Op::AllToAllSingle:
            if (count == 5 && is_empty(given(2)) && is_empty(given(3))) return run_with_options(given(0), given(1), given(4));
            break;
        case Op::Send:
        case Op::Recv:
            if (count == 3) return run_message(given(0), integer(given(1)), integer(given(2)));
            break;
        default:
            break;
    }
    return nb::bool_(false);
}

// If the options have a timeout, torch keeps it.
nb::object BridgeMethod::run_with_options(nb::handle outputs, nb::handle inputs, nb::handle options) const {
    const nb::object async = nb::steal(PyObject_GetAttr(options.ptr(), names().async_op));
    if (!async.is_valid()) {
        PyErr_Clear();
        return nb::bool_(false);
    }
    FastCall call{op_, only_tensor(outputs), only_tensor(inputs)};
    call.async = async.ptr() == Py_True;
    if (static_cast<Op>(op_) == Op::Broadcast) {
        call.peer = integer(attribute(options, names().root).ptr());
    } else if (shm::reduces(static_cast<Op>(op_))) {
        const std::optional<Reduce> known = path().reduction(attribute(options, names().reduce));
        if (!known) return nb::bool_(false);
        call.reduce = *known;
    }
    call.options = options;
    call.by_torch = true;
    return path().run(call);
}

nb::object BridgeMethod::run_message(nb::handle tensor, int peer, int tag) const {
    const nb::tuple nothing;
    const nb::handle message = only_tensor(tensor), other = nothing;
    const bool sends = static_cast<Op>(op_) == Op::Send;
    FastCall call{op_, sends ? other : message, sends ? message : other, peer, true, tag};
    call.by_torch = true;
    return path().run(call);
}

PyObject* BridgeMethod::operator()(PyObject* arguments, PyObject* named) const {
    if (named == nullptr || PyDict_GET_SIZE(named) == 0) {
        PyObject* const done = or_raise([&] { return run(arguments).release().ptr(); });
        if (done == nullptr) replace_error(failure_);
        if (done != Py_True && done != Py_False) return done;
        const bool synchronous = done == Py_True;
        Py_DECREF(done);
        if (synchronous) Py_RETURN_NONE;
    }
    return PyObject_Call(otherwise_.ptr(), arguments, named);
}

}  // namespace ringway::device
