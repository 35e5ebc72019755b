#include "python/shm_device_path.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "python/shm_call.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kEveryDtype = ~uint64_t{0};

constexpr uint32_t kTaken = uint32_t{1} << static_cast<int>(Op::AllReduce) | uint32_t{1} << static_cast<int>(Op::Broadcast) |
                          uint32_t{1} << static_cast<int>(Op::AllGatherSingle) |
                          uint32_t{1} << static_cast<int>(Op::ReduceScatterSingle) |
                          uint32_t{1} << static_cast<int>(Op::AllToAllSingle) | uint32_t{1} << static_cast<int>(Op::Reduce) |
                          uint32_t{1} << static_cast<int>(Op::Gather) | uint32_t{1} << static_cast<int>(Op::Scatter) |
                          uint32_t{1} << static_cast<int>(Op::Send) | uint32_t{1} << static_cast<int>(Op::Recv);
constexpr int64_t kLargeCount = (int64_t{1} << 31) - 1;  // a kernel gets a larger count in 64 bits
constexpr int64_t kAlignment = 64;  // elements to which a rank's share of a reduction is rounded up
constexpr int64_t kPulledByKernel = 1 << 20;  // bytes of a copy: up to here, one kernel is quicker than several copies

uint64_t summed_dtypes() {
    uint64_t bits = 0;
    for (int dtype = 0; dtype < 64; ++dtype)
        if (find_reducer(static_cast<DType>(dtype), Reduce::Sum) != nullptr) bits |= uint64_t{1} << dtype;
    return bits;
}

uint64_t bits_of(const std::vector<uint64_t>& ins, const std::vector<uint64_t>& outs) {
    uint64_t bits = 0;
    for (const uint64_t each : ins) bits |= each;
    for (const uint64_t each : outs) bits |= each;
    return bits;
}

// The widest numbers as which a kernel can move so many bytes between these addresses.
DType unit_of(const std::vector<uint64_t>& ins, const std::vector<uint64_t>& outs, int64_t bytes) {
    const uint64_t bits = bits_of(ins, outs) | static_cast<uint64_t>(bytes);
    return bits % 8 == 0 ? DType::I64 : bits % 4 == 0 ? DType::I32 : bits % 2 == 0 ? DType::I16 : DType::U8;
}

}  // namespace

DeviceFastPath::DeviceFastPath(PyGroup& group, GroupRecord& record, int kind, nb::dict profiler, nb::object stream_of,
                               nb::object kernel_of)
    : FastPath(record, group.engine().members.rank(), group.engine().members.size(), kind, kEveryDtype, summed_dtypes(),
               kTaken),
      group_(group),
      profiler_(std::move(profiler)),
      stream_of_(std::move(stream_of)),
      kernel_of_(std::move(kernel_of)) {}

void DeviceFastPath::attach(nb::object link, const DeviceManner& manner) {
    native_ = link.is_none() ? nullptr : nb::cast<DeviceLink*>(link);
    link_ = std::move(link);
    manner_ = manner;
}

// Profilers only see calls on the general path, which creates an event for each.
bool DeviceFastPath::profiled() const {
    static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
    return PyDict_GetItem(profiler_.ptr(), name) == Py_True;
}

void DeviceFastPath::locate(PlainCall& call) {
    call.site = current_site();
    call.place = place_of(call.site);
}

nb::object DeviceFastPath::run(const FastCall& given) {
    return nb::bool_(!given.async && given.reduce == Reduce::Sum && takes(given));
}

bool DeviceFastPath::takes(const FastCall& given) {
    PlainCall call;
    const auto op = static_cast<Op>(given.op);
    const bool message = is_point_to_point(op);
    if (native_ == nullptr || profiled() || (message && (given.peer < 0 || given.peer == rank()))) return false;
    if (!read(op, given.outputs, given.inputs, given.peer, call)) return false;
    // The sizes of an all_to_all may differ from rank to rank, so all of them are direct.
    const bool direct = op == Op::AllToAllSingle || call.bytes >= manner_.direct_from.at(static_cast<size_t>(op));
    const bool listed = op == Op::Gather || op == Op::Scatter;
    if (!direct && !message && (listed || call.bytes > DeviceLink::kBounceBytes)) return false;
    const nb::object kept = link_;  // another thread may close the group while Python runs, or without the GIL
    DeviceLink& link = *native_;
    const DeviceManner manner = manner_;
    const auto stream = nb::cast<uintptr_t>(stream_of_(call.device_index));
    call.timeout_s = group_.timeout_s();
    call.element = element_bytes(call.dtype);
    if (message) {
        if (call.count == 0 || call.device_index != link.device_index() || !link.can_bounce(stream)) return false;
        return op == Op::Send ? send(link, manner, stream, call, given.tag) : receive(link, stream, call, given.tag);
    }
    if (direct) return call.device_index == link.device_index() && run_direct(link, manner, stream, call);
    const Bounce bounce(link);
    if (!bounce.is_ours || !link.can_bounce(stream)) return false;
    locate(call);
    const GroupRecord::Begun begun = begin(call, call.site);
    call.number = begun.sequence;
    try {
        run_on(link, stream, call);
    } catch (...) {
        record().end(begun.token, State::Failed);
        throw;
    }
    record().end(begun.token, State::Completed);
    return true;
}

void DeviceFastPath::run_on(DeviceLink& native, uintptr_t stream, PlainCall& call) {
    const auto address = [](const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); };
    const uint64_t from = address(call.in.at(0)), to = address(call.out.at(0));
    const int64_t share = call.count * call.element;
    const bool root = call.op == Op::Broadcast && rank() == call.root;
    const int64_t read = call.op == Op::Broadcast && !root ? 0 : scatters(call.op) ? call.bytes : share;
    const bool reads_nothing = root || (call.op == Op::Reduce && rank() != call.root);
    const int64_t written = reads_nothing ? 0 : gathers(call.op) ? call.bytes : share;
    const nb::object link = link_;  // another thread may close the group while this one runs
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

// --- direct calls -----------------------------------------------------------------------------------------

bool DeviceFastPath::run_direct(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, PlainCall& call) {
    Part part;
    if (call.count == 0 || link.is_capturing(stream) || !find_part(call, manner, part)) return false;
    const auto ranks = static_cast<size_t>(size());
    const size_t results = call.op == Op::AllReduce ? ranks : 1;
    if (reduces(call.op) && (!manner.reduces || kernel(link, Task::Sum, call.dtype, ranks, results, true, false).function == nullptr))
        return false;
    if (link.order().others_pending(&link)) return false;  // the general path waits for them
    int refused = -1;
    const std::vector<std::byte> offer = link.memory().offer(part.offered, false, refused);
    if (refused >= 0) return false;  // the general path copies the tensor to memory that can be shared
    locate(call);
    const GroupRecord::Begun begun = begin(call, call.site);
    call.number = begun.sequence;
    // Until this rank's part is enqueued, a signal handler must make no call of the group: it would come first here, and
    // second on the other ranks.
    record().starting(call.op, begun);
    bool met = false;
    const uint64_t place = link.order().enter(&link);
    const auto end = [&] {
        record().started();
        link.order().leave(place);
    };
    try {
        const std::vector<std::byte> offers = show(call, offer);
        met = true;
        std::vector<Span> spans;
        {
            GilRelease gil;
            spans = link.memory().accept(offers.data(), offers.size(), part.wanted, false);
        }
        link.follow(stream);
        link.arrive(stream, part.worker);
        enqueue(link, manner, stream, call.dtype, part, spans);
        link.depart(stream, part.worker, facts_of(compared(call)), call.timeout_s, {}, begun.token);
    } catch (...) {
        end();
        if (met) group_.fail();  // the others wait for this rank's part
        record().end(begun.token, State::Failed);
        throw;
    }
    end();
    return true;
}

// As the ranks compare it: an all_to_all with its whole input.
Request DeviceFastPath::compared(const PlainCall& call) const {
    Request r = call;
    if (call.op == Op::AllToAllSingle) r.count *= size();
    r.in = r.out = {};
    return r;
}

bool DeviceFastPath::find_part(const PlainCall& call, const DeviceManner& manner, Part& part) const {
    const auto address = [](const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); };
    const uint64_t from = address(call.in.at(0)), to = address(call.out.at(0));
    const int64_t share = call.count * call.element, whole = share * size();
    const auto apart = [](uint64_t one, int64_t bytes, uint64_t other, int64_t more) {
        return one + static_cast<uint64_t>(bytes) <= other || other + static_cast<uint64_t>(more) <= one;
    };
    const auto block = [&](uint64_t base, int which) { return base + static_cast<uint64_t>(which * share); };
    const auto want = [&](int place) {
        for (int peer = 0; peer < size(); ++peer)
            if (peer != rank()) part.wanted.emplace_back(peer, place);
    };
    part.own = from;
    part.bytes = share;
    switch (call.op) {
        case Op::AllReduce: {
            part.offered = {{from, share}};
            if (manner.takes_turns) part.worker = 0;
            if (manner.takes_turns && rank() != 0) return true;
            part.kind = Part::Kind::Reduces;
            want(0);
            const int64_t most = (call.count + size() - 1) / size();
            const int64_t mine = manner.takes_turns ? call.count : (most + kAlignment - 1) / kAlignment * kAlignment;
            const int64_t start = std::min(rank() * mine, call.count);
            part.skipped = start * call.element;
            part.count = std::min(mine, call.count - start);
            return true;
        }
        case Op::Broadcast:
            if (manner.one_gpu) part.worker = call.root;
            if (rank() == call.root) {
                if (!manner.one_gpu) part.offered = {{from, share}};
                else want(0), part.kind = Part::Kind::Spreads;
            } else if (manner.one_gpu) {
                part.offered = {{to, share}};
            } else {
                part.kind = Part::Kind::Pulls;
                part.wanted = {{call.root, 0}};
                part.targets = {to};
            }
            return true;
        case Op::AllGatherSingle:
            part.kind = Part::Kind::Pulls;
            part.offered = {{from, share}};
            want(0);
            for (const auto& [peer, place] : part.wanted) part.targets.push_back(block(to, peer));
            if (from != block(to, rank())) part.to = block(to, rank());
            return part.to == 0 || apart(from, share, to, whole);
        case Op::ReduceScatterSingle:
            part.kind = Part::Kind::Reduces;
            for (int peer = 0; peer < size(); ++peer) part.offered.push_back({block(from, peer), share});
            want(rank());
            part.own = block(from, rank());
            part.to = to;
            part.count = call.count;
            return to == part.own || apart(to, share, from, whole);
        case Op::Reduce:
            part.offered = {{from, share}};
            part.worker = call.root;
            if (rank() != call.root) return true;
            part.kind = Part::Kind::Reduces;
            want(0);
            part.to = to;
            part.count = call.count;
            return true;
        case Op::Gather:
            part.offered = {{from, share}};
            part.worker = call.root;
            if (rank() != call.root) return true;
            part.kind = Part::Kind::Pulls;
            want(0);
            for (const auto& [peer, place] : part.wanted) part.targets.push_back(address(call.out.at(peer)));
            if (from != address(call.out.at(rank()))) part.to = address(call.out.at(rank()));
            return std::all_of(call.listed.begin(), call.listed.end(), [&](const std::byte* each) {
                return address(each) == part.own || apart(from, share, address(each), share);
            });
        case Op::Scatter:
            part.kind = Part::Kind::Pulls;
            if (rank() != call.root) {
                part.wanted = {{call.root, rank()}};
                part.targets = {to};
                return true;
            }
            for (int peer = 0; peer < size(); ++peer) part.offered.push_back({address(call.in.at(peer)), share});
            part.own = address(call.in.at(rank()));
            if (to != part.own) part.to = to;
            return std::all_of(call.listed.begin(), call.listed.end(), [&](const std::byte* each) {
                return address(each) == to ? to == part.own : apart(to, share, address(each), share);
            });
        case Op::AllToAllSingle:
            part.kind = Part::Kind::Pulls;
            for (int peer = 0; peer < size(); ++peer) part.offered.push_back({block(from, peer), share});
            want(rank());
            for (const auto& [peer, place] : part.wanted) part.targets.push_back(block(to, peer));
            part.own = block(from, rank());
            part.to = block(to, rank());
            return apart(from, whole, to, whole);
        default:
            return false;
    }
}

std::vector<std::byte> DeviceFastPath::show(const PlainCall& call, const std::vector<std::byte>& offer) {
    const bool paired = call.op == Op::AllToAllSingle;
    const auto ranks = static_cast<size_t>(size());
    std::vector<std::byte> shown = offer, seen;
    if (paired) {
        const std::vector<int64_t> expected(ranks, call.count * call.element);
        const auto* from = reinterpret_cast<const std::byte*>(expected.data());
        shown.insert(shown.end(), from, from + sizeof(int64_t) * ranks);
    }
    seen.resize(shown.size() * ranks);
    Request r = compared(call);
    r.shown = shown.data();
    r.shown_bytes = static_cast<int64_t>(shown.size());
    r.seen = seen.data();
    r.manner = kDirect;
    GilHost host;
    group_.run(r, host);
    if (!paired) return seen;
    std::vector<std::byte> offers;
    for (size_t source = 0; source < ranks; ++source) {
        const std::byte* theirs = seen.data() + source * shown.size();
        offers.insert(offers.end(), theirs, theirs + offer.size());
        for (size_t target = 0; target < ranks; ++target) {
            if (source == target) continue;
            int64_t expected;
            const std::byte* tail = seen.data() + target * shown.size() + offer.size();
            std::memcpy(&expected, tail + sizeof expected * source, sizeof expected);
            const int64_t sent = DeviceMemory::offered(theirs, offer.size(), static_cast<int>(target));
            if (sent != expected)
                differ(group_, facts_of(r), static_cast<int>(source), static_cast<int>(target), sent, expected);
        }
    }
    return offers;
}

void DeviceFastPath::enqueue(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, DType dtype, const Part& part,
                             const std::vector<Span>& spans) {
    std::vector<uint64_t> addresses;  // of every rank, in order
    size_t next = 0;
    switch (part.kind) {
        case Part::Kind::Nothing:
            return;
        case Part::Kind::Pulls: {
            std::vector<DeviceLink::Copy> copies;
            if (part.to != 0) copies.push_back({{part.own, part.bytes}, part.to});
            for (const uint64_t target : part.targets) copies.push_back({{spans[next++].address, part.bytes}, target});
            return pull(link, manner.one_gpu, stream, copies, part.bytes);
        }
        case Part::Kind::Reduces:
            for (int peer = 0; peer < size(); ++peer)
                addresses.push_back((peer == rank() ? part.own : spans[next++].address) + static_cast<uint64_t>(part.skipped));
            return launch(link, stream, Task::Sum, dtype, addresses,
                          part.to != 0 ? std::vector<uint64_t>{part.to} : addresses, part.count);
        case Part::Kind::Spreads:
            for (const Span& span : spans) addresses.push_back(span.address);
            const DType unit = unit_of({part.own}, addresses, part.bytes);
            return launch(link, stream, Task::Sum, unit, {part.own}, addresses, part.bytes / element_bytes(unit));
    }
}

void DeviceFastPath::pull(DeviceLink& link, bool with_kernel, uintptr_t stream, const std::vector<DeviceLink::Copy>& copies,
                          int64_t bytes) {
    if (!with_kernel || copies.size() < 2 || bytes > kPulledByKernel) return link.copy(stream, copies);
    std::vector<uint64_t> ins, outs;
    for (const auto& [from, to] : copies) {
        ins.push_back(from.address);
        outs.push_back(to);
    }
    const DType unit = unit_of(ins, outs, bytes);
    launch(link, stream, Task::Copy, unit, ins, outs, bytes / element_bytes(unit));
}

void DeviceFastPath::launch(DeviceLink& link, uintptr_t stream, Task task, DType dtype, const std::vector<uint64_t>& ins,
                            const std::vector<uint64_t>& outs, int64_t count) {
    if (count == 0) return;
    const bool aligned = bits_of(ins, outs) % 16 == 0;
    const auto& found = kernel(link, task, dtype, ins.size(), outs.size(), aligned, count > kLargeCount);
    link.launch(stream, found, ins, outs, count);
}

// Compiled at its first use.
const DeviceLink::Kernel& DeviceFastPath::kernel(const DeviceLink& link, Task task, DType dtype, size_t ins, size_t outs,
                                                 bool aligned, bool large) {
    const auto key = std::make_tuple(task, dtype, ins, outs, aligned, large);
    const auto known = kernels_.find(key);
    if (known != kernels_.end()) return known->second;
    const bool copies = task == Task::Copy;
    const nb::object made = kernel_of_(link.device_index(), static_cast<int>(dtype), copies, ins, outs, aligned, large);
    DeviceLink::Kernel found{};
    if (!made.is_none()) {
        const auto [function, threads, shared, block] = nb::cast<std::tuple<uintptr_t, unsigned, unsigned, int64_t>>(made);
        found = {reinterpret_cast<void*>(function), threads, shared, block};
    }
    return kernels_.emplace(key, found).first->second;
}

}  // namespace ringway::shm
