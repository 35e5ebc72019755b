#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "agreement.h"
#include "python/call_view.h"
#include "python/fast_method.h"
#include "python/fast_path.h"
#include "python/path_table.h"
#include "python/world_fast_path.h"
#include "record/callsite.h"

namespace nb = nanobind;
using namespace ringway;

namespace {

// The facts of agreement.h, by the names that call.py gives them.
nb::tuple agreed_facts(int op) {
    const uint8_t agree = agreement(static_cast<Op>(op));
    nb::list names;
    if ((agree & kAgreeBytes) != 0) names.append("bytes");
    if ((agree & kAgreeDType) != 0) names.append("dtype");
    if ((agree & kAgreeReduce) != 0) names.append("reduce");
    if ((agree & kAgreeRoot) != 0) names.append("root");
    return nb::tuple(names);
}

nb::tuple posted(const PostedCall& call, const char* place) {
    return nb::make_tuple(call.sequence, static_cast<int>(call.op), call.bytes, static_cast<int>(call.dtype),
                          static_cast<int>(call.reduce), call.peer, place);
}

// How the calls of two ranks differ: the rank that noticed it, its call, the other rank, and that rank's call. None
// while no ranks are known to differ.
nb::object difference(const GroupRecord& record) {
    const CallBoard::Fault* fault = record.board() == nullptr ? nullptr : record.board()->fault();
    if (fault == nullptr) return nb::none();
    return nb::make_tuple(fault->rank, posted(fault->own, fault->own_place), fault->other,
                          posted(fault->theirs, fault->their_place));
}

uint64_t begin_call(GroupRecord& record, nb::handle call, uint32_t label) {
    if (record.is_starting()) return 0;
    const CallView view(call);
    const uint32_t site = current_site();
    const GroupRecord::Begun begun =
        record.begin(view.op(), view.nbytes(), view.dtype(), view.reduce(), view.peer(), label, site);
    view.recorded(begun.sequence, site);
    record.starting(view.op(), begun);
    return begun.token;
}

void translate(const std::exception_ptr& thrown, void* calls_differ) {
    try {
        std::rethrow_exception(thrown);
    } catch (const DifferentCalls&) {
        PyErr_SetString(static_cast<PyObject*>(calls_differ), "ranks of the group called different things");
    }
}

PyMethodDef path_methods[] = {fast_method("run", &FastPath::run_from_python), {}};
PyType_Slot path_slots[] = {{Py_tp_methods, path_methods}, {0, nullptr}};

PyObject* run_in_table(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    return nb::inst_ptr<PathTable>(self)->run(given, count);
}

int traverse_table(PyObject* self, visitproc visit, void* arg) {  // the name that Py_VISIT needs
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<PathTable>(self)->traverse(visit, arg) : 0;
}

int clear_table(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<PathTable>(self)->clear();
    return 0;
}

PyMethodDef table_methods[] = {fast_method("run", &run_in_table), {}};
PyType_Slot table_slots[] = {{Py_tp_methods, table_methods},
                             {Py_tp_traverse, reinterpret_cast<void*>(traverse_table)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_table)},
                             {0, nullptr}};

PyObject* run_on_world(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    return nb::inst_ptr<WorldFastPath>(self)->run(given, count);
}

PyObject* run_on_group(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    return nb::inst_ptr<WorldFastPath>(self)->run_on(given, count);
}

PyMethodDef world_methods[] = {fast_method("run", &run_on_world), fast_method("run_on", &run_on_group), {}};
PyType_Slot world_slots[] = {{Py_tp_methods, world_methods}, {0, nullptr}};

}  // namespace

void bind_group(nb::module_& m) {
    nb::class_<CallBoard>(m, "CallBoard")
        .def(nb::init<int, int, std::vector<int>, const std::string&>(), nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"),
             nb::arg("token"));
    m.def("create_call_board", &CallBoard::create, nb::arg("size"), nb::arg("seats"), nb::arg("token"));
    PyObject* const calls_differ = PyErr_NewException("ringway._core.CallsDiffer", nullptr, nullptr);
    m.attr("CallsDiffer") = nb::borrow(calls_differ);
    nb::register_exception_translator(translate, calls_differ);

    nb::class_<GroupRecord>(m, "GroupRecord")
        .def(nb::init<std::shared_ptr<Recorder>, const std::string&, int32_t, std::vector<int32_t>>(),
             nb::arg("recorder"), nb::arg("group"), nb::arg("size") = 1, nb::arg("ranks") = std::vector<int32_t>())
        .def("begin",
             [](GroupRecord& self, int op, int64_t bytes, int dtype, int reduce, int32_t peer, uint32_t label) {
                 return self.begin(static_cast<Op>(op), bytes, static_cast<DType>(dtype), static_cast<Reduce>(reduce),
                                   peer, label, current_site()).token;
             })  // no argument names on these four: nanobind calls them faster without
        .def("begin_call", &begin_call)
        .def("end",
             [](GroupRecord& self, uint64_t token, bool ok) { self.end(token, ok ? State::Completed : State::Failed); })
        .def("end_on_device",
             [](GroupRecord& self, uint64_t token, bool ok, std::tuple<int64_t, int64_t, uint32_t, bool> times) {
                 const auto [started_ns, completed_ns, stream, beside] = times;
                 self.end(token, ok ? State::Completed : State::Failed, {started_ns, completed_ns, stream, beside});
             })
        .def("started",
             [](GroupRecord& self, uint64_t ended) {
                 self.started();
                 if (ended != 0) self.end(ended, State::Completed);
             })
        .def_prop_ro("is_starting", &GroupRecord::is_starting)
        .def_static("exchange_starting", &GroupRecord::exchange_starting)
        .def("take_back", &GroupRecord::take_back)
        .def("compare", &GroupRecord::compare, nb::arg("board"))
        .def_prop_ro("difference", &difference)
        .def("announce_abort", &GroupRecord::announce_abort, nb::arg("first"))
        .def_prop_ro("aborted_from", &GroupRecord::aborted_from)
        .def_prop_ro("keeps_times", [](GroupRecord& self) { return self.recorder().keeps_times(); })
        .def_prop_ro("collectives", &GroupRecord::collectives)
        .def_prop_ro("messages", &GroupRecord::messages)
        .def_prop_ro("completed", &GroupRecord::completed);

    nb::class_<FastPath>(m, "FastPath", nb::type_slots(path_slots))
        .def(nb::init<GroupRecord&, int, int, int, uint64_t, uint64_t, uint32_t, uint32_t>(), nb::arg("record"),
             nb::arg("rank"), nb::arg("size"), nb::arg("device"), nb::arg("moved"), nb::arg("summed"), nb::arg("ops"),
             nb::arg("async_ops") = 0, nb::keep_alive<1, 2>())
        .def(
            "begin",
            [](FastPath& self, int op, nb::handle outputs, nb::handle inputs, int peer, int reduce) -> uint64_t {
                PlainCall call;
                if (!self.read(static_cast<Op>(op), outputs, inputs, peer, call)) return 0;
                call.reduce = static_cast<Reduce>(reduce);
                const GroupRecord::Begun begun = self.begin(call, current_site());
                self.record().starting(call.op, begun);
                return begun.token;
            },
            nb::arg("op"), nb::arg("outputs").none(), nb::arg("inputs").none(), nb::arg("peer"),
            nb::arg("reduce") = static_cast<int>(Reduce::Sum))
        .def("serve", &FastPath::serve, nb::arg("op"), nb::arg("ranges"))
        .def("hold", &FastPath::hold, nb::arg("change"))
        .def("has", &FastPath::has, nb::arg("op"))
        .def("has_async", &FastPath::has_async, nb::arg("op"))
        .def_prop_ro("takes_options", &FastPath::takes_options);

    nb::class_<PathTable>(m, "PathTable", nb::type_slots(table_slots))
        .def(nb::init<>())
        .def("set", &PathTable::set, nb::arg("sync"), nb::arg("asynchronous"))
        .def("clear", &PathTable::clear)
        .def("has", &PathTable::has, nb::arg("op"));

    nb::class_<WorldFastPath>(m, "WorldFastPath", nb::type_slots(world_slots))
        .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("c10d"), nb::arg("bridge"), nb::arg("failure"))
        .def("serve", &WorldFastPath::serve, nb::arg("group").none(), nb::arg("table").none());

    m.def("pass_on", [](nb::object function, nb::args arguments) {
        GroupRecord::passing_on();
        return function(*arguments);
    });
    m.def(
        "set_tensor_types",
        [](nb::tuple types, nb::object exchange) { set_tensor_types(types.ptr(), exchange.ptr()); },
        nb::arg("types"), nb::arg("exchange").none());
    m.attr("CPU") = kCpu;
    m.attr("CUDA") = kCuda;
    m.def("agreement", &agreed_facts, nb::arg("op"));
    m.def(
        "signature",
        [](int op, int64_t amount, int dtype, int reduce, int root) {
            return signature(static_cast<Op>(op), amount, static_cast<DType>(dtype), static_cast<Reduce>(reduce), root);
        },
        nb::arg("op"), nb::arg("amount"), nb::arg("dtype"), nb::arg("reduce"), nb::arg("root"));
}
