#include "python/shm_fast_path.h"

#include "python/shm_call.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kEveryDtype = ~uint64_t{0};

uint64_t summed_dtypes() {
    uint64_t bits = 0;
    for (int dtype = 0; dtype < 64; ++dtype)
        if (find_reducer(static_cast<DType>(dtype), Reduce::Sum) != nullptr) bits |= uint64_t{1} << dtype;
    return bits;
}

uint32_t every_op_but_list_all_to_all() { return ~(uint32_t{1} << static_cast<int>(Op::AllToAll)); }

}  // namespace

ShmFastPath::ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler)
    : FastPath(record, group.engine().members.rank(), group.engine().members.size(), kCpu, kEveryDtype,
               summed_dtypes(), every_op_but_list_all_to_all()),
      group_(group),
      profiler_(std::move(profiler)) {}

// A profiler sees a call only on the general path, which makes it an event.
bool ShmFastPath::profiled() const {
    static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
    return PyDict_GetItem(profiler_.ptr(), name) == Py_True;
}

bool ShmFastPath::run(int op, nb::handle outputs, nb::handle inputs, int peer, int tag, bool wait) {
    PlainCall call;
    if (profiled() || !read(static_cast<Op>(op), outputs, inputs, peer, call)) return false;
    if (is_point_to_point(call.op))
        return peer >= 0 && peer != rank() && run_message(call, call.op == Op::Send ? inputs : outputs, tag, wait);
    run_collective(call);
    return true;
}

void ShmFastPath::run_collective(const PlainCall& call) {
    Request r;
    r.op = call.op;
    r.dtype = call.dtype;
    r.root = call.peer;
    r.count = call.count;
    r.element = element_bytes(call.dtype);
    r.in = call.in;
    r.out = call.out;
    r.timeout_s = group_.timeout_s();
    r.site = current_site();
    r.place = text_of_site(r.site);
    const GroupRecord::Begun begun = begin(call, r.site);
    r.number = begun.sequence;
    GilHost host;
    if (call.bytes >= kLarge) host.block();
    try {
        group_.run(r, host);
    } catch (...) {
        record().end(begun.token, State::Failed);
        throw;
    }
    record().end(begun.token, State::Completed);
}

bool ShmFastPath::run_message(const PlainCall& call, nb::handle tensor, int tag, bool wait) {
    const uint32_t site = current_site();
    std::byte* data = call.op == Op::Send ? call.in.base : call.out.base;
    const MessageFacts facts{call.op,    call.dtype, call.peer, tag, data, call.bytes, group_.timeout_s(),
                             record().messages(), site};
    if (call.op == Op::Send) {
        Message message;
        fill(message, facts);
        GilHost host;
        if (call.bytes >= kLarge) host.block();
        const bool sent = group_.engine().messages.send_now(message);
        host.resume();
        if (sent) {
            record().end(begin(call, site).token, State::Completed);
            return true;
        }
        if (!wait) return false;
    }
    auto message = std::make_shared<PythonMessage>();
    message->attachment.keep(tensor);
    fill(*message, facts);
    const uint64_t token = begin(call, site).token;
    try {
        group_.run(message);
    } catch (...) {
        record().end(token, State::Failed);
        throw;
    }
    record().end(token, State::Completed);
    return true;
}

}  // namespace ringway::shm
