#include "python/shm_fast_path.h"

#include "python/shm_call.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kEveryDtype = ~uint64_t{0};
constexpr uint32_t kEveryOp = ~uint32_t{0};
constexpr uint32_t kMessages = 1u << static_cast<int>(Op::Send) | 1u << static_cast<int>(Op::Recv);

uint64_t summed_dtypes() {
    uint64_t bits = 0;
    for (int dtype = 0; dtype < 64; ++dtype)
        if (find_reducer(static_cast<DType>(dtype), Reduce::Sum) != nullptr) bits |= uint64_t{1} << dtype;
    return bits;
}

struct Names {
    nb::str path = name("_path"), task = name("_task"), tensor = name("_tensor");
    static nb::str name(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
};

}  // namespace

ShmFastPath::ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler, nb::object work, nb::object sent,
                         nb::object failed)
    : FastPath(record, group.engine().members.rank(), group.engine().members.size(), kCpu, kEveryDtype,
               summed_dtypes(), kEveryOp, kMessages),
      group_(group),
      profiler_(std::move(profiler)),
      work_(std::move(work)),
      sent_(std::move(sent)),
      failed_(std::move(failed)) {}

// Profilers only see calls on the general path, which creates an event for each.
bool ShmFastPath::profiled() const {
    static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
    return PyDict_GetItemWithError(profiler_.ptr(), name) == Py_True;
}

// Fills a call that this path takes. A message must name another rank.
bool ShmFastPath::read_here(const FastCall& given, PlainCall& call) const {
    const auto kind = static_cast<Op>(given.op);
    if (given.reduce != Reduce::Sum || (given.async && !has_async(given.op))) return false;
    if (is_point_to_point(kind) && (given.peer < 0 || given.peer == rank())) return false;
    if (profiled() || !read(kind, given.outputs, given.inputs, given.peer, call)) return false;
    call.timeout_s = group_.timeout_s();
    call.site = current_site();
    call.place = place_of(call.site);
    return true;
}

nb::object ShmFastPath::run(const FastCall& given) {
    PlainCall call;
    if (!read_here(given, call)) return nb::bool_(false);
    if (!is_point_to_point(call.op)) {
        run_collective(call);
        return nb::bool_(true);
    }
    const bool sends = call.op == Op::Send;
    const nb::handle tensor = sends ? given.inputs : given.outputs;
    if (sends && send_at_once(call, given.tag, given.async)) return given.async ? sent() : nb::object(nb::bool_(true));
    if (!given.async) {
        run_message(call, tensor, given.tag);
        return nb::bool_(true);
    }
    return shares_group() ? nb::object(nb::bool_(false)) : start(call, tensor, given.tag);
}

// Making a Work takes as long as sending a small message.
nb::object ShmFastPath::sent() {
    if (!spare_.is_valid() || Py_REFCNT(spare_.ptr()) != 1) spare_ = sent_();
    return spare_;
}

// What may run Python, and so other calls, comes before the call gets its number.
nb::object ShmFastPath::start(PlainCall& call, nb::handle tensor, int tag) {
    static const Names names;
    auto message = std::make_shared<RecordedMessage>(record(), failed_);
    message->attachment.keep(tensor);
    message->attachment.keep(failed_);
    message->attachment.keep(nb::find(record()));
    describe(*message, call, call.bytes, tag);
    message->may_be_offered = message->sends;
    group_.engine().messages.sweep();
    nb::object work = work_();
    nb::setattr(work, names.path, nb::find(*this));
    nb::setattr(work, names.tensor, tensor);
    nb::setattr(work, names.task, nb::cast(PyTask{group_.shared_engine(), nullptr, message}));
    const GroupRecord::Begun begun = begin(call, call.site);
    message->token = begun.token;
    message->facts.number = begun.sequence;
    {
        GilHost host;
        if (call.bytes >= kLarge) host.block();
        group_.engine().messages.start(message, true);
    }
    if (message->done()) group_.engine().messages.sweep();
    return work;
}

template <class Run>
void ShmFastPath::run_recorded(uint64_t token, const Run& run) {
    try {
        run();
    } catch (...) {
        record().end(token, State::Failed);
        throw;
    }
    record().end(token, State::Completed);
}

void ShmFastPath::run_collective(PlainCall& call) {
    const GroupRecord::Begun begun = begin(call, call.site);
    call.number = begun.sequence;
    call.element = element_bytes(call.dtype);
    run_recorded(begun.token, [&] {
        GilHost host;
        if (call.bytes >= kLarge) host.block();
        group_.run(call, host);
    });
}

bool ShmFastPath::send_at_once(PlainCall& call, int tag, bool async) {
    call.number = record().messages();
    Message message;
    describe(message, call, call.bytes, tag);
    message.may_be_offered = async;
    if (!run_at_once(message)) return false;
    record().end(begin(call, call.site).token, State::Completed);
    return true;
}

void ShmFastPath::run_message(PlainCall& call, nb::handle tensor, int tag) {
    call.number = record().messages();
    const uint64_t token = begin(call, call.site).token;
    run_recorded(token, [&] {
        Message message;
        describe(message, call, call.bytes, tag);
        if (!message.sends && run_at_once(message)) return;
        auto pending = std::make_shared<PythonMessage>();
        pending->attachment.keep(tensor);
        describe(*pending, call, call.bytes, tag);
        group_.run(pending);
    });
}

bool ShmFastPath::run_at_once(const Message& message) {
    GilHost host;
    if (message.bytes >= kLarge) host.block();
    PointToPoint& messages = group_.engine().messages;
    return message.sends ? messages.send_now(message) : messages.receive_now(message);
}

}  // namespace ringway::shm
