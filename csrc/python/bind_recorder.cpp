#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "record/recorder.h"
#include "record/row.h"

namespace nb = nanobind;
using namespace ringway;

namespace {

template <class Field>
const Field& as_python(const Field& field) {
    return field;
}
nb::object as_python(const CallSite* where) {
    if (where == nullptr) return nb::none();
    return nb::make_tuple(where->file, where->line, where->function);
}

const auto as_tuple = [](const auto&... fields) { return nb::make_tuple(as_python(fields)...); };

nb::tuple row(const Recorder& recorder, const Entry& call) {
    return with_row(call, recorder.text(call.group), recorder.text(call.label), site(call.site), as_tuple);
}

nb::list rows(const Recorder& recorder, const std::vector<Entry>& calls) {
    nb::list rows;
    for (const Entry& call : calls) rows.append(row(recorder, call));
    return rows;
}

nb::object find(const Recorder& recorder, uint64_t token) {
    Entry entry;
    return recorder.find(token, entry) ? nb::object(row(recorder, entry)) : nb::none();
}

nb::list under_way(const Recorder& recorder) {
    nb::list calls;
    for (const Entry& call : recorder.under_way()) calls.append(nb::make_tuple(call.token, row(recorder, call)));
    return calls;
}

nb::tuple stop_trace(Recorder& recorder) {
    const Recorder::Trace trace = recorder.stop_trace();
    return nb::make_tuple(rows(recorder, trace.calls), trace.dropped);
}

void choose(Recorder& recorder, bool enabled, bool all, bool by_caller, const std::vector<int>& ops,
            const std::vector<std::string>& labels) {
    LedgerChoice choice{enabled, all, by_caller, 0, {}};
    for (const int op : ops) choice.ops |= uint64_t{1} << op;
    for (const std::string& label : labels) choice.labels.insert(recorder.intern(label));
    recorder.ledger().choose(std::move(choice));
}

nb::list logged(Recorder& recorder) {
    nb::list rows;
    for (const Ledger::Row& row : recorder.ledger().rows())
        rows.append(as_tuple(static_cast<int>(row.kind.op), recorder.text(row.kind.label), site(row.kind.site),
                             row.kind.size, row.kind.bytes, row.count, row.total_ns, row.max_ns, row.p50_ns,
                             row.p99_ns));
    return rows;
}

nb::list arrivals(Recorder& recorder) {
    nb::list rows;
    for (const Entry& call : recorder.ledger().arrivals())
        rows.append(as_tuple(recorder.text(call.group), call.sequence, static_cast<int>(call.op), call.bytes,
                             call.issued_ns, call.completed_ns, site(call.site), recorder.text(call.label), call.size));
    return rows;
}

// What a process left in its recorder's file, with the same rows as Recorder.recent.
nb::dict read_record_file(const std::string& path) {
    const RecordFile file(path);
    Texts known = file.texts();
    nb::list calls;
    for (const Entry& call : file.recent(file.capacity())) {
        const auto where = known.sites.find(call.site);
        calls.append(with_row(call, known.texts[call.group], known.texts[call.label],
                              where == known.sites.end() ? nullptr : &where->second, as_tuple));
    }
    nb::dict story;
    story["pid"] = file.header().pid;
    story["started_unix_ns"] = file.header().started_unix_ns;
    story["started_ns"] = file.header().started_ns;
    story["total"] = file.total();
    story["calls"] = calls;
    return story;
}

}  // namespace

void bind_recorder(nb::module_& m) {
    nb::class_<Recorder>(m, "Recorder")
        .def(nb::init<size_t, const std::string&>(), nb::arg("capacity"), nb::arg("path") = "")
        .def_prop_ro("total", &Recorder::total)
        .def_prop_ro("capacity", &Recorder::capacity)
        .def("intern", &Recorder::intern, nb::arg("text"))
        .def("recent", [](const Recorder& self, size_t count) { return rows(self, self.recent(count)); },
             nb::arg("count"))
        .def("find", &find, nb::arg("token"))
        .def("under_way", &under_way)
        .def("start_trace", &Recorder::start_trace, nb::arg("limit"))
        .def("stop_trace", &stop_trace)
        .def("choose", &choose, nb::arg("enabled"), nb::arg("all"), nb::arg("by_caller"), nb::arg("ops"),
             nb::arg("labels"))
        .def_prop_ro("logging", [](Recorder& self) { return self.ledger().enabled(); })
        .def_prop_ro("keeps_times", &Recorder::keeps_times)
        .def(
            "log",
            [](Recorder& self, int op, const std::string& label, int size, int64_t bytes, int64_t ns, bool always) {
                self.ledger().add({static_cast<uint8_t>(op), self.intern(label), 0, size, bytes}, ns, always);
            },
            nb::arg("op"), nb::arg("label"), nb::arg("size"), nb::arg("bytes"), nb::arg("ns"),
            nb::arg("always") = false)
        .def("logged", &logged)
        .def("arrivals", &arrivals)
        .def("reset_log", [](Recorder& self) { self.ledger().reset(); });

    m.def("set_machinery", &set_machinery, nb::arg("inside"), nb::arg("outside"));
    m.def("read_record_file", &read_record_file, nb::arg("path"));
    m.def("set_quiet", &set_quiet, nb::arg("quiet"));
    m.def("is_quiet", &is_quiet);
    m.def("set_profiled", &set_profiled, nb::arg("profiled"));
    m.def("is_profiled", &is_profiled);
    m.def("monotonic_ns", &monotonic_ns);
}
