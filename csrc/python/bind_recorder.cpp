#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "agreement.h"
#include "record/callsite.h"
#include "pack/checksum.h"
#include "python/call_view.h"
#include "python/fast_path.h"
#include "record/group_record.h"
#include "record/recorder.h"

namespace nb = nanobind;
using namespace ringway;

namespace {

nb::object place(uint32_t id) {
    if (id == 0) return nb::none();
    const CallSite where = site(id);
    return nb::make_tuple(where.file, where.line, where.function);
}

nb::tuple as_tuple(const Recorder& recorder, const Entry& entry) {
    return nb::make_tuple(entry.sequence, static_cast<int>(entry.op), entry.bytes, static_cast<int>(entry.dtype),
                          static_cast<int>(entry.reduce), entry.peer, recorder.text(entry.group),
                          recorder.text(entry.label), place(entry.site), entry.issued_ns, entry.completed_ns,
                          static_cast<int>(entry.state), entry.size);
}

void choose(Recorder& recorder, bool enabled, bool all, bool by_caller, const std::vector<int>& ops,
            const std::vector<std::string>& labels) {
    LedgerChoice choice;
    choice.enabled = enabled;
    choice.all = all;
    choice.by_caller = by_caller;
    for (const int op : ops) choice.ops |= uint64_t{1} << op;
    for (const std::string& label : labels) choice.labels.insert(recorder.intern(label));
    recorder.ledger().choose(std::move(choice));
}

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

nb::list logged(Recorder& recorder) {
    nb::list rows;
    for (const Ledger::Row& row : recorder.ledger().rows())
        rows.append(nb::make_tuple(static_cast<int>(row.kind.op), recorder.text(row.kind.label),
                                   place(row.kind.site), row.kind.size, row.kind.bytes, row.count, row.total_ns,
                                   row.max_ns, row.p50_ns, row.p99_ns));
    return rows;
}

nb::list arrivals(Recorder& recorder) {
    nb::list rows;
    for (const Arrival& a : recorder.ledger().arrivals())
        rows.append(nb::make_tuple(recorder.text(a.group), a.sequence, static_cast<int>(a.op), a.bytes, a.issued_ns,
                                   a.completed_ns, place(a.site), recorder.text(a.label), a.size));
    return rows;
}

// What a process left in its recorder's file, with the same rows as Recorder.recent.
nb::dict read_record_file(const std::string& path) {
    const RecordFile file(path);
    const RecordHeader& header = file.header();
    std::unordered_map<uint32_t, std::string> texts;
    std::unordered_map<uint32_t, nb::object> sites;
    const uint64_t used = std::min<uint64_t>(header.text_used.load(std::memory_order_acquire), header.text_bytes);
    for (uint64_t at = 0; at + sizeof(TextEntry) <= used;) {
        TextEntry entry;
        std::memcpy(&entry, file.texts() + at, sizeof(entry));
        at += sizeof(entry);
        if (entry.length > used - at) break;
        const std::string text(file.texts() + at, entry.length);
        at += (entry.length + 7) / 8 * 8;
        if (entry.kind == TextKind::Text) {
            texts[entry.id] = text;
        } else {
            const size_t cut = text.find('\n');
            sites[entry.id] = nb::make_tuple(text.substr(0, cut), entry.line, text.substr(cut + 1));
        }
    }
    nb::list calls;
    const uint64_t last = header.next.load(std::memory_order_acquire) - 1;
    Entry entry;
    for (uint64_t token = last - std::min<uint64_t>(last, file.capacity()) + 1; token <= last; ++token) {
        if (!read_slot(file.slot(token), token, entry)) continue;
        const auto place = sites.find(entry.site);
        calls.append(nb::make_tuple(entry.sequence, static_cast<int>(entry.op), entry.bytes,
                                    static_cast<int>(entry.dtype), static_cast<int>(entry.reduce), entry.peer,
                                    texts[entry.group], texts[entry.label],
                                    place == sites.end() ? nb::none() : place->second, entry.issued_ns,
                                    entry.completed_ns, static_cast<int>(entry.state), entry.size));
    }
    nb::dict story;
    story["pid"] = header.pid;
    story["started_unix_ns"] = header.started_unix_ns;
    story["started_ns"] = header.started_ns;
    story["total"] = last;
    story["calls"] = calls;
    return story;
}

uint32_t checksum(nb::handle buffer, uint32_t crc) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    {
        nb::gil_scoped_release release;
        crc = crc32c(crc, view.buf, static_cast<size_t>(view.len));
    }
    PyBuffer_Release(&view);
    return crc;
}

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def(nb::init<size_t, const std::string&>(), nb::arg("capacity"), nb::arg("path") = "")
        .def_prop_ro("total", &Recorder::total)
        .def_prop_ro("capacity", &Recorder::capacity)
        .def("intern", &Recorder::intern, nb::arg("text"))
        .def(
            "recent",
            [](const Recorder& self, size_t count) {
                nb::list records;
                for (const Entry& entry : self.recent(count)) records.append(as_tuple(self, entry));
                return records;
            },
            nb::arg("count"))
        .def(
            "find",
            [](const Recorder& self, uint64_t token) -> nb::object {
                Entry entry;
                if (!self.find(token, entry)) return nb::none();
                return as_tuple(self, entry);
            },
            nb::arg("token"))
        .def("under_way",
             [](const Recorder& self) {
                 nb::list calls;
                 for (const Entry& entry : self.under_way())
                     calls.append(nb::make_tuple(entry.token, as_tuple(self, entry)));
                 return calls;
             })
        .def("start_trace", &Recorder::start_trace, nb::arg("limit"))
        .def("stop_trace",
             [](Recorder& self) {
                 const Recorder::Trace trace = self.stop_trace();
                 nb::list calls;
                 for (const Entry& entry : trace.calls) calls.append(as_tuple(self, entry));
                 return nb::make_tuple(calls, trace.dropped);
             })
        .def("choose", &choose, nb::arg("enabled"), nb::arg("all"), nb::arg("by_caller"), nb::arg("ops"),
             nb::arg("labels"))
        .def_prop_ro("logging", [](Recorder& self) { return self.ledger().enabled(); })
        .def_prop_ro("keeps_times", &Recorder::keeps_times)
        .def(
            "log",
            [](Recorder& self, int op, const std::string& label, int size, int64_t bytes, int64_t ns) {
                self.ledger().add({static_cast<uint8_t>(op), self.intern(label), 0, size, bytes}, ns);
            },
            nb::arg("op"), nb::arg("label"), nb::arg("size"), nb::arg("bytes"), nb::arg("ns"))
        .def("logged", &logged)
        .def("arrivals", &arrivals)
        .def("reset_log", [](Recorder& self) { self.ledger().reset(); });

    nb::class_<CallBoard>(m, "CallBoard")
        .def(nb::init<int, int, std::vector<int>, const std::string&>(), nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"),
             nb::arg("token"));
    m.def("create_call_board", &CallBoard::create, nb::arg("size"), nb::arg("seats"), nb::arg("token"));
    static PyObject* const calls_differ = PyErr_NewException("ringway._core.CallsDiffer", nullptr, nullptr);
    m.attr("CallsDiffer") = nb::borrow(calls_differ);
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const DifferentCalls&) {
            PyErr_SetString(calls_differ, "ranks of the group called different things");
        }
    });

    nb::class_<GroupRecord>(m, "GroupRecord")
        .def(
            "__init__",
            [](GroupRecord* self, std::shared_ptr<Recorder> recorder, const std::string& group, int32_t size,
               std::vector<int32_t> ranks) {
                new (self) GroupRecord(std::move(recorder), group, size, std::move(ranks));
            },
            nb::arg("recorder"), nb::arg("group"), nb::arg("size") = 1, nb::arg("ranks") = std::vector<int32_t>())
        .def("begin",
             [](GroupRecord& self, int op, int64_t bytes, int dtype, int reduce, int32_t peer, uint32_t label) {
                 return self.begin(static_cast<Op>(op), bytes, static_cast<DType>(dtype), static_cast<Reduce>(reduce),
                                   peer, label, current_site()).token;
             })  // no argument names on these three: nanobind calls them faster without
        .def("begin_call",
             [](GroupRecord& self, nb::handle call, uint32_t label) {
                 const CallView view(call);
                 const uint32_t site = current_site();
                 const GroupRecord::Begun begun = self.begin(view.op(), view.nbytes(), view.dtype(), view.reduce(),
                                                             view.peer(), label, site);
                 view.recorded(begun.sequence, site);
                 return begun.token;
             })
        .def("end",
             [](GroupRecord& self, uint64_t token, bool ok) { self.end(token, ok ? State::Completed : State::Failed); })
        .def("compare", &GroupRecord::compare, nb::arg("board"))
        .def_prop_ro("difference", &difference)
        .def_prop_ro("keeps_times", [](GroupRecord& self) { return self.recorder().keeps_times(); })
        .def_prop_ro("collectives", &GroupRecord::collectives)
        .def_prop_ro("messages", &GroupRecord::messages)
        .def_prop_ro("completed", &GroupRecord::completed);

    nb::class_<FastPath>(m, "FastPath")
        .def(nb::init<GroupRecord&, int, int, int, uint64_t, uint64_t, uint32_t>(), nb::arg("record"), nb::arg("rank"),
             nb::arg("size"), nb::arg("device"), nb::arg("moved"), nb::arg("summed"), nb::arg("ops"),
             nb::keep_alive<1, 2>())
        .def(
            "begin",
            [](FastPath& self, int op, nb::handle outputs, nb::handle inputs, int peer) -> uint64_t {
                PlainCall call;
                if (!self.read(static_cast<Op>(op), outputs, inputs, peer, call)) return 0;
                return self.begin(call, current_site()).token;
            },
            nb::arg("op"), nb::arg("outputs").none(), nb::arg("inputs").none(), nb::arg("peer"))
        .def("serve", &FastPath::serve, nb::arg("op"), nb::arg("ranges"))
        .def("hold", &FastPath::hold, nb::arg("change"))
        .def("has", &FastPath::has, nb::arg("op"));

    m.def("set_machinery", &set_machinery, nb::arg("inside"), nb::arg("outside"));
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
    m.def("read_record_file", &read_record_file, nb::arg("path"));
    m.def("set_quiet", &set_quiet, nb::arg("quiet"));
    m.def("is_quiet", &is_quiet);
    m.def("monotonic_ns", &monotonic_ns);
    m.def("crc32c", &checksum, nb::arg("data"), nb::arg("crc") = 0);
}
