#include "python/stream_fast_path.h"

#include "record/callsite.h"

namespace ringway::device {
namespace {

// To ask torch about a call takes a caller some 10 us if the interpreter's memory is in another core's cache, as in the
// autograd engine's thread: so many calls share one question.
constexpr Py_ssize_t kManyOpen = 8;
constexpr int64_t kOpenForLongNs = kLateNs / 4;
constexpr uint64_t kNoteKinds = 1 << 16;  // a note is a call's number times this, plus the number of its kind

// Interned once: a lookup by a C string would make a Python string each time. Never destroyed: the interpreter may have
// ended by then.
struct Names {
    PyObject *wait = text("wait"), *at = text("_at"), *is_completed = text("is_completed");
    static PyObject* text(const char* name) { return PyUnicode_InternFromString(name); }
};
const Names& names() {
    static const Names* const names = new Names;
    return *names;
}

nb::object checked(PyObject* result) {
    if (result == nullptr) throw nb::python_error();
    return nb::steal(result);
}

template <class... Arguments>
nb::object call_with(nb::handle function, const Arguments&... arguments) {
    PyObject* const given[] = {arguments.ptr()...};
    return checked(PyObject_Vectorcall(function.ptr(), given, sizeof...(arguments), nullptr));
}

nb::object list_of(nb::handle tensor) {
    PyObject* const list = PyList_New(1);
    if (list == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list, 0, tensor.inc_ref().ptr());
    return nb::steal(list);
}

bool takes_list(Op op) { return op == Op::AllReduce || op == Op::Broadcast; }

}  // namespace

StreamFastPath::StreamFastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed,
                               uint64_t averaged, uint32_t ops, Calls& calls, nb::dict open, nb::object work,
                               nb::tuple streams, std::unordered_map<int64_t, int> reductions)
    : FastPath(record, rank, size, device, moved, summed, ops, ops, true),
      calls_(calls),
      averaged_(averaged),
      open_(std::move(open)),
      work_type_(std::move(work)),
      raw_stream_(streams[0]),
      stream_of_(streams[1]),
      set_stream_(streams[2]),
      reductions_(std::move(reductions)) {}

bool StreamFastPath::read_call(const FastCall& given, PlainCall& call) const {
    if (!read(static_cast<Op>(given.op), given.outputs, given.inputs, given.peer, call)) return false;
    const Reduce reduce = call.reduce = given.reduce;
    if (is_point_to_point(call.op)) return given.peer >= 0 && given.peer != rank();
    if (!shm::reduces(call.op)) return true;
    if (reduce == Reduce::Avg) return (averaged_ >> static_cast<int>(call.dtype) & 1) != 0;
    return reduce == Reduce::Sum || reduce == Reduce::Product || reduce == Reduce::Min || reduce == Reduce::Max;
}

const StreamFastPath::Kind* StreamFastPath::kind_of(const PlainCall& call, bool async) {
    const uint64_t key = static_cast<uint64_t>(call.root + 1) << 32 | static_cast<uint64_t>(variant) << 16 |
                         static_cast<uint64_t>(call.op) << 8 | static_cast<uint64_t>(call.reduce) << 1 | (async ? 1 : 0);
    const auto known = kinds_.find(key);
    if (known != kinds_.end()) return &known->second;
    const nb::object prepared =
        self().attr("_prepare")(static_cast<int>(call.op), call.root, static_cast<int>(call.reduce), async);
    if (prepared.is_none()) return nullptr;
    const auto made = nb::cast<nb::tuple>(prepared);
    return &kinds_.emplace(key, Kind{nb::cast<int>(made[0]), made[1], made[2]}).first->second;
}

uintptr_t StreamFastPath::current_stream(int device) const {
    return static_cast<uintptr_t>(nb::cast<uint64_t>(call_with(raw_stream_, nb::int_(device))));
}

nb::object StreamFastPath::run(const FastCall& given) {
    PlainCall call;
    if (!read_call(given, call)) return nb::bool_(false);
    return begin_and_start(call, given);
}

std::optional<Reduce> StreamFastPath::reduction(nb::handle torchs) const {
    const auto known = reductions_.find(PyObject_Hash(torchs.ptr()));
    PyErr_Clear();  // what has no hash is no reduction
    if (known == reductions_.end()) return {};
    return static_cast<Reduce>(known->second);
}

nb::object StreamFastPath::call_torch(const PlainCall& call, const Kind& kind, const FastCall& given) const {
    const nb::handle options = given.options.is_valid() ? given.options : nb::handle(kind.options);
    if (call.op == Op::Send || call.op == Op::Recv)
        return call_with(kind.method, list_of(call.op == Op::Send ? given.inputs : given.outputs), nb::int_(call.root),
                         nb::int_(given.tag));
    if (takes_list(call.op)) return call_with(kind.method, list_of(given.outputs), options);
    if (call.op == Op::AllToAllSingle)
        return call_with(kind.method, given.outputs, given.inputs, nb::list(), nb::list(), options);
    return call_with(kind.method, given.outputs, given.inputs, options);
}

nb::object StreamFastPath::begin_and_start(PlainCall& call, const FastCall& given) {
    const Kind* const known = kind_of(call, given.async);
    if (known == nullptr) return nb::bool_(false);
    const Kind& kind = *known;
    const uintptr_t stream = current_stream(call.device_index);
    // A captured call never ends. The default stream cannot be captured.
    if (given.async && stream != 0 && calls_.watch().is_capturing(call.device_index, stream))
        return nb::bool_(false);
    const bool timed = record().recorder().keeps_times();
    const GroupRecord::Begun begun = begin(call, current_site());
    record().starting(call.op, begun);
    const int64_t began_ns = monotonic_ns();
    const Mark started = timed ? calls_.watch().mark(call.device_index, stream) : Mark{};
    nb::object torchs;
    try {
        GroupRecord::passing_on();
        torchs = call_torch(call, kind, given);
        if (!given.async && !torchs.is_none()) checked(PyObject_CallMethodNoArgs(torchs.ptr(), names().wait));
    } catch (nb::python_error& error) {
        record().end(begun.token, State::Failed);
        calls_.watch().drop(call.device_index, started);
        const double waited = static_cast<double>(monotonic_ns() - began_ns) / 1e9;
        const nb::object cause = nb::borrow(error.value());
        const nb::object raised =
            self().attr("_not_started")(cause, kind.number, begun.sequence, waited, given.outputs, given.inputs);
        record().started();
        if (raised.is(cause)) throw;
        PyException_SetCause(raised.ptr(), nb::object(cause).release().ptr());
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
        throw nb::python_error();
    }
    record().started();
    if (given.async) return opened(kind, call, given, begun, std::move(torchs), began_ns, started);
    follow(kind.number, begun.sequence, begun.token, given.outputs, call.device_index, stream, started);
    return nb::bool_(true);
}

nb::object StreamFastPath::opened(const Kind& kind, const PlainCall& call, const FastCall& given,
                                  const GroupRecord::Begun& begun, nb::object torchs, int64_t began_ns, Mark started) {
    const bool timed = started.event != nullptr;
    end_passed();
    // A thread without a frame is one of torch's, such as the autograd engine's, in which DDP makes its calls.
    const bool by_cpp = given.by_torch && PyEval_GetFrame() == nullptr;
    nb::object work = by_cpp ? torchs : checked(PyObject_CallNoArgs(work_type_.ptr()));
    const nb::object outputs = call.op == Op::Send ? nb::none() : nb::borrow(given.outputs);
    const nb::object at = nb::cast(new StreamWork{self(), kind.number, begun.sequence, begun.token, std::move(torchs), outputs,
                                                  timed ? nb::borrow(given.inputs) : nb::none(), call.device_index,
                                                  is_point_to_point(call.op), began_ns, false},
                                   nb::rv_policy::take_ownership);
    if ((!by_cpp && PyObject_SetAttr(work.ptr(), names().at, at.ptr()) != 0) ||
        PyDict_SetItem(open_.ptr(), nb::int_(begun.token).ptr(), at.ptr()) != 0)
        throw nb::python_error();
    note_open();
    if (timed) follow_aside(*nb::inst_ptr<StreamWork>(at), started);
    return work;
}

// Of the calls that have been open for long or are many, ends the older half, if the device has passed them: this thread
// has the GIL, so nobody else needs it for them. Calls that took long may have failed, and are left to Python.
void StreamFastPath::end_passed() {
    if (!end_from_first(true)) end_from_first(false);
}

// False if the first call is a message that has not ended: it says nothing about those behind it.
bool StreamFastPath::end_from_first(bool also_messages) {
    const Py_ssize_t open = PyDict_Size(open_.ptr());
    PyObject *token, *held;
    Py_ssize_t at = 0;
    const auto next_open = [&] {
        while (PyDict_Next(open_.ptr(), &at, &token, &held) != 0)
            if (also_messages || !nb::inst_ptr<StreamWork>(held)->is_message) return true;
        return false;
    };
    if (open == 0 || calls_->failed() || !next_open()) return true;
    const StreamWork& first = *nb::inst_ptr<StreamWork>(held);
    const int64_t age = monotonic_ns() - first.began_ns;
    if (age > kLateNs) return !first.is_message;
    if (open < kManyOpen && age < kOpenForLongNs) return true;
    std::vector<nb::object> asked{nb::borrow(held)};
    // torch runs the collectives of a device on one stream: they end in order. Messages have streams of their own.
    while (static_cast<Py_ssize_t>(asked.size()) < open / 2 && next_open()) {
        const StreamWork& next = *nb::inst_ptr<StreamWork>(held);
        const StreamWork& before = *nb::inst_ptr<StreamWork>(asked.back());
        if (first.is_message || next.is_message || next.device != first.device || next.sequence < before.sequence) break;
        asked.push_back(nb::borrow(held));
    }
    const StreamWork& last = *nb::inst_ptr<StreamWork>(asked.back());
    const nb::object passed = nb::steal(PyObject_CallMethodNoArgs(last.torchs.ptr(), names().is_completed));
    if (!passed.is_valid()) PyErr_Clear();  // Python asks again, and reports it
    if (passed.ptr() != Py_True) return !first.is_message;
    for (const nb::object& each : asked) {
        const StreamWork& work = *nb::inst_ptr<StreamWork>(each);
        if (take_open(work) && !work.followed) record().end(work.token, State::Completed);
    }
    return true;
}

// False if another thread has taken it.
bool StreamFastPath::take_open(const StreamWork& work) {
    const nb::int_ token(work.token);
    const int open = PyDict_Contains(open_.ptr(), token.ptr());
    if (open < 0 || (open == 1 && PyDict_DelItem(open_.ptr(), token.ptr()) != 0)) throw nb::python_error();
    return open == 1;
}

void StreamFastPath::note_open() {
    PyObject *token, *first;
    Py_ssize_t at = 0;
    const bool any = PyDict_Next(open_.ptr(), &at, &token, &first) != 0;
    calls_.open_since(any ? nb::inst_ptr<StreamWork>(nb::handle(first))->began_ns : 0);
}

// The end of a call on torch's stream, as an event on a stream of ours that waits for it. torch lets go of the tensors at
// the first wait, even one that is not the program's: until the program has waited, the open call holds them.
void StreamFastPath::follow_aside(StreamWork& work, Mark started) {
    auto known = aside_.find(work.device);
    if (known == aside_.end()) {
        const nb::tuple made = nb::cast<nb::tuple>(self().attr("_make_stream")(work.device));
        known = aside_.emplace(work.device, std::make_pair(nb::object(made[0]), nb::cast<uintptr_t>(made[1]))).first;
    }
    const nb::tuple before = nb::cast<nb::tuple>(call_with(stream_of_, nb::int_(work.device)));
    const nb::tuple aside = nb::cast<nb::tuple>(known->second.first);
    work.followed = true;
    call_with(set_stream_, aside[0], aside[1], aside[2]);
    PyObject* const waited = PyObject_CallMethodNoArgs(work.torchs.ptr(), names().wait);
    if (waited == nullptr) PyErr_Clear();  // the program's own wait raises it
    Py_XDECREF(waited);
    call_with(set_stream_, before[0], before[1], before[2]);
    follow(work.kind, work.sequence, work.token, work.outputs, work.device, known->second.second, started);
}

void StreamFastPath::follow(int kind, uint64_t sequence, uint64_t token, nb::handle outputs, int device, uintptr_t stream,
                            Mark started) {
    try {
        const uint64_t note = sequence * kNoteKinds + static_cast<uint64_t>(kind);
        if (!calls_.follow(token, note, device, stream, started)) {
            captures = true;
            record().end(token, State::Completed);  // the graph runs it at each replay
        }
    } catch (const std::runtime_error& error) {
        record().end(token, State::Failed);
        const nb::object raised = self().attr("_not_followed")(kind, sequence, outputs, error.what());
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
        throw nb::python_error();
    }
}

bool StreamFastPath::wait(StreamWork& work) {
    if (calls_->failed()) return false;
    checked(PyObject_CallMethodNoArgs(work.torchs.ptr(), names().wait));
    if (take_open(work) && !work.followed)
        follow(work.kind, work.sequence, work.token, work.outputs, work.device, current_stream(work.device), {});
    note_open();
    return true;
}

}  // namespace ringway::device
