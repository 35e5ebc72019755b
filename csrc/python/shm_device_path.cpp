#include "python/shm_device_path.h"

#include <cstring>

#include "python/shm_call.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kEveryDtype = ~uint64_t{0};

// Not all_to_all: its calls are direct, whatever their size.
constexpr uint32_t kTaken = uint32_t{1} << static_cast<int>(Op::AllReduce) | uint32_t{1} << static_cast<int>(Op::Broadcast) |
                          uint32_t{1} << static_cast<int>(Op::AllGatherSingle) |
                          uint32_t{1} << static_cast<int>(Op::ReduceScatterSingle);

uint64_t summed_dtypes() {
    uint64_t bits = 0;
    for (int dtype = 0; dtype < 64; ++dtype)
        if (find_reducer(static_cast<DType>(dtype), Reduce::Sum) != nullptr) bits |= uint64_t{1} << dtype;
    return bits;
}

}  // namespace

DeviceFastPath::DeviceFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler, nb::object stream_of)
    : FastPath(record, group.engine().members.rank(), group.engine().members.size(), kCuda, kEveryDtype, summed_dtypes(),
               kTaken),
      group_(group),
      profiler_(std::move(profiler)),
      stream_of_(std::move(stream_of)) {}

void DeviceFastPath::attach(nb::object link, int64_t bytes) {
    native_ = link.is_none() ? nullptr : nb::cast<DeviceLink*>(link);
    link_ = std::move(link);
    most_ = std::min(bytes, DeviceLink::kBounceBytes);
}

// Profilers only see calls on the general path, which creates an event for each.
bool DeviceFastPath::profiled() const {
    static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
    return PyDict_GetItem(profiler_.ptr(), name) == Py_True;
}

bool DeviceFastPath::run(int op, nb::handle outputs, nb::handle inputs, int peer) {
    PlainCall call;
    if (native_ == nullptr || profiled() || !read(static_cast<Op>(op), outputs, inputs, peer, call)) return false;
    if (call.bytes > most_) return false;
    const auto stream = nb::cast<uintptr_t>(stream_of_(call.device_index));
    if (!native_->can_bounce(stream)) return false;
    call.timeout_s = group_.timeout_s();
    call.site = current_site();
    call.place = text_of_site(call.site);
    const GroupRecord::Begun begun = begin(call, call.site);
    call.number = begun.sequence;
    call.element = element_bytes(call.dtype);
    try {
        run_on(stream, call);
    } catch (...) {
        record().end(begun.token, State::Failed);
        throw;
    }
    record().end(begun.token, State::Completed);
    return true;
}

void DeviceFastPath::run_on(uintptr_t stream, PlainCall& call) {
    const auto address = [](const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); };
    const uint64_t from = address(call.in.at(0)), to = address(call.out.at(0));
    const int64_t share = call.count * call.element;
    const bool root = call.op == Op::Broadcast && rank() == call.root;
    const int64_t read = call.op == Op::Broadcast && !root ? 0 : scatters(call.op) ? call.bytes : share;
    const int64_t written = root ? 0 : gathers(call.op) ? call.bytes : share;
    const nb::object link = link_;  // another thread may close the group while this one runs
    DeviceLink& native = *native_;
    {
        GilRelease gil;
        native.download(stream, from, read);
    }
    call.in = {native.bounce_in(), scatters(call.op) ? share : 0, nullptr};
    call.out = {native.bounce_out(), gathers(call.op) ? share : 0, nullptr};
    if (call.op == Op::Broadcast) call.out = call.in;
    GilHost host;
    group_.run(call, host);
    if (call.op == Op::Broadcast) std::memcpy(native.bounce_out(), native.bounce_in(), static_cast<size_t>(written));
    native.upload(stream, to, written);
}

}  // namespace ringway::shm
