#include "python/shm_fast_path.h"

#include "python/shm_call.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kEveryDtype = ~uint64_t{0};
constexpr uint32_t kEveryOp = ~uint32_t{0};

uint64_t summed_dtypes() {
    uint64_t bits = 0;
    for (int dtype = 0; dtype < 64; ++dtype)
        if (find_reducer(static_cast<DType>(dtype), Reduce::Sum) != nullptr) bits |= uint64_t{1} << dtype;
    return bits;
}

}  // namespace

ShmFastPath::ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler)
    : FastPath(record, group.engine().members.rank(), group.engine().members.size(), kCpu, kEveryDtype,
               summed_dtypes(), kEveryOp),
      group_(group),
      profiler_(std::move(profiler)) {}

// Profilers only see calls on the general path, which creates an event for each.
bool ShmFastPath::profiled() const {
    static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
    return PyDict_GetItem(profiler_.ptr(), name) == Py_True;
}

bool ShmFastPath::run(int op, nb::handle outputs, nb::handle inputs, int peer, int tag, bool wait) {
    PlainCall call;
    if (profiled() || !read(static_cast<Op>(op), outputs, inputs, peer, call)) return false;
    call.timeout_s = group_.timeout_s();
    call.site = current_site();
    call.place = text_of_site(call.site);
    if (is_point_to_point(call.op))
        return peer >= 0 && peer != rank() && run_message(call, call.op == Op::Send ? inputs : outputs, tag, wait);
    run_collective(call);
    return true;
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

bool ShmFastPath::run_message(PlainCall& call, nb::handle tensor, int tag, bool wait) {
    call.number = record().messages();
    if (call.op == Op::Send) {
        Message message;
        describe(message, call, call.bytes, tag);
        GilHost host;
        if (call.bytes >= kLarge) host.block();
        const bool sent = group_.engine().messages.send_now(message);
        host.resume();
        if (sent) {
            record().end(begin(call, call.site).token, State::Completed);
            return true;
        }
        if (!wait) return false;
    }
    auto message = std::make_shared<PythonMessage>();
    message->attachment.keep(tensor);
    describe(*message, call, call.bytes, tag);
    run_recorded(begin(call, call.site).token, [&] { group_.run(message); });
    return true;
}

}  // namespace ringway::shm
