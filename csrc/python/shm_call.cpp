#include "python/shm_call.h"

#include <cstring>
#include <stdexcept>

#include "python/call_view.h"
#include "python/tensor_view.h"
#include "record/callsite.h"
#include "record/group_record.h"

namespace ringway::shm {
namespace {

using Views = std::vector<TensorView>;

// Any contiguous CPU tensors. Those that DLPack cannot describe are read through their attributes: address and sizes.
Views views_of(const nb::sequence& tensors, Attachment& attachment) {
    Views views;
    for (nb::handle tensor : tensors) {
        attachment.keep(tensor);
        TensorView& view = views.emplace_back();
        if (view_tensor(tensor.ptr(), view)) continue;
        const auto shape = nb::cast<std::vector<int64_t>>(nb::list(tensor.attr("shape")));
        view.data = reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
        view.nbytes = nb::cast<int64_t>(tensor.attr("nbytes"));
        view.rows = shape.empty() ? 1 : shape[0];
    }
    return views;
}

// One block for each rank: the tensors of a list, or equal parts of a single tensor.
Blocks blocks_of(const Views& views, bool split, int size, std::vector<std::byte*>& list) {
    if (views.size() == 1) return {views[0].data, split ? views[0].nbytes / size : 0, nullptr};
    for (const TensorView& view : views) list.push_back(view.data);
    return {nullptr, 0, list.data()};
}

// The pieces of one tensor that go to, or come from, each rank.
Blocks pieces_of(const TensorView& whole, const std::vector<int64_t>& bytes, std::vector<std::byte*>& list) {
    std::byte* at = whole.data;
    for (const int64_t piece : bytes) {
        list.push_back(at);
        at += piece;
    }
    return {nullptr, 0, list.data()};
}

// The bytes for each rank. Splits count rows of the first dimension.
std::vector<int64_t> sizes_of(const Views& views, const CallView::Splits& splits, int size) {
    std::vector<int64_t> sizes;
    if (splits) {
        const int64_t row = views[0].rows != 0 ? views[0].nbytes / views[0].rows : 0;
        for (const int64_t rows : *splits) sizes.push_back(rows * row);
    } else if (views.size() == 1 && size != 1) {
        sizes.assign(static_cast<size_t>(size), views[0].nbytes / size);
    } else {
        for (const TensorView& view : views) sizes.push_back(view.nbytes);
    }
    return sizes;
}

void read_facts(const CallView& view, double timeout_s, Request& r) {
    r.op = view.op();
    r.dtype = view.dtype();
    r.root = view.peer();
    r.timeout_s = timeout_s;
    r.number = view.sequence();
    r.site = view.site();
    r.place = place_of(r.site);
    r.element = element_bytes(r.dtype);
}

// Nothing but the engine runs between this and the start of the call, so no signal handler can come first. What earlier
// calls kept is released before: a finalizer may run Python.
void starts(const CallView& view) {
    GroupRecord::passing_on();
    const nb::object record = view.record();
    if (!record.is_none()) nb::cast<GroupRecord&>(record).started();
}

}  // namespace

const char* place_of(uint32_t id) {
    static_assert(kPlaceBytes <= kTextBytes);
    const CallSite* where = site(id);
    return where == nullptr ? "" : where->place.c_str();
}

nb::object collective(PyGroup& group, nb::handle call, double timeout_s) {
    const CallView view(call);
    auto task = std::make_shared<PythonCollective>();
    Request& r = task->request;
    read_facts(view, timeout_s, r);
    r.reduce = view.reduce();
    r.factor = view.factor();
    const int size = group.engine().members.size();
    const auto in = views_of(view.inputs(), task->attachment);
    const auto out = views_of(view.outputs(), task->attachment);
    if (r.op == Op::AllToAll || r.op == Op::AllToAllSingle) {
        task->send_bytes = sizes_of(in, view.input_splits(), size);
        task->recv_bytes = sizes_of(out, view.output_splits(), size);
        const bool lists = r.op == Op::AllToAll;
        r.in = lists ? blocks_of(in, false, size, task->in) : pieces_of(in[0], task->send_bytes, task->in);
        r.out = lists ? blocks_of(out, false, size, task->out) : pieces_of(out[0], task->recv_bytes, task->out);
        r.send_bytes = task->send_bytes.data();
        r.recv_bytes = task->recv_bytes.data();
        for (const int64_t bytes : task->send_bytes) r.count += bytes / r.element;
    } else {
        r.count = r.op == Op::Barrier ? 0 : (scatters(r.op) ? out : in)[0].nbytes / r.element;
        r.in = blocks_of(in, r.op == Op::ReduceScatterSingle, size, task->in);
        r.out = blocks_of(out, r.op == Op::AllGatherSingle, size, task->out);
    }
    const bool async = view.async_op();
    if (async) group.engine().progress.sweep();
    starts(view);
    if (async) return nb::cast(group.submit(std::move(task)));
    GilHost host;
    if (r.count * r.element >= kLarge) host.block();
    group.run(r, host);
    return nb::none();
}

nb::object show(PyGroup& group, nb::handle call, double timeout_s, int64_t count, nb::bytes shown, uint64_t manner) {
    const CallView view(call);
    auto task = std::make_shared<PythonCollective>();
    Request& r = task->request;
    read_facts(view, timeout_s, r);
    r.reduce = view.reduce();
    r.count = count;
    r.manner = manner;
    const auto* from = static_cast<const std::byte*>(shown.data());
    const size_t bytes = shown.size();
    if (bytes == 0 || bytes > group.engine().members.segment().payload_capacity())
        throw std::invalid_argument("these bytes do not fit into an entry");
    task->shown.assign(from, from + bytes);
    task->seen.resize(bytes * static_cast<size_t>(group.engine().members.size()));
    r.shown = task->shown.data();
    r.shown_bytes = static_cast<int64_t>(bytes);
    r.seen = task->seen.data();
    const bool async = view.async_op();
    if (async) group.engine().progress.sweep();
    starts(view);
    if (async) return nb::cast(group.submit(std::move(task)));
    GilHost host;
    group.run(r, host);
    return nb::bytes(task->seen.data(), task->seen.size());
}

CallFacts facts_of(nb::handle call, int64_t count) {
    const CallView view(call);
    Request r;
    read_facts(view, 0, r);
    r.reduce = view.reduce();
    r.count = count;
    return facts_of(r);
}

CallFacts facts_of(const Request& call) {
    CallFacts facts{};
    fill_facts(call, facts);
    std::strncpy(facts.place, call.place, kTextBytes - 1);
    return facts;
}

void differ(PyGroup& group, const CallFacts& call, int source, int target, int64_t sent, int64_t expected) {
    Membership& members = group.engine().members;
    const int rank = members.rank();
    const int peer = source == rank ? target : source;
    members.report(FaultKind::Mismatch, peer, call, [&](Fault& fault) {
        fault.theirs = group.engine().collectives.facts_of(peer);
        fault.pair = {source, target, sent, expected};
    });
    group.check(Outcome::Faulted);
}

void describe(Message& message, const Request& call, int64_t bytes, int tag) {
    message.sends = call.op == Op::Send;
    message.peer = call.root < 0 ? kAnyone : call.root;
    message.tag = tag;
    message.data = call.in.base;
    message.bytes = bytes;
    message.timeout_s = call.timeout_s;
    fill_facts(call, message.facts);
    message.facts.site = call.site;
    std::strncpy(message.facts.place, call.place, kTextBytes - 1);
}

PyTask message(PyGroup& group, nb::handle call, double timeout_s, nb::handle reference, nb::handle room) {
    const CallView view(call);
    auto task = std::make_shared<PythonMessage>();
    Request r;
    read_facts(view, timeout_s, r);
    const TensorView tensor = views_of(r.op == Op::Send ? view.inputs() : view.outputs(), task->attachment)[0];
    r.in.base = tensor.data;
    r.count = tensor.nbytes / r.element;
    describe(*task, r, tensor.nbytes, view.tag());
    task->may_be_offered = task->sends && view.async_op() && reference.is_none();
    if (!reference.is_none()) {
        const auto given = nb::cast<nb::bytes>(reference);
        if (given.size() != Message::kReferenceBytes) throw std::invalid_argument("not a reference");
        std::memcpy(task->reference.data(), given.data(), given.size());
        task->by_reference = true;
    }
    if (!room.is_none()) {
        nb::list listed;
        listed.append(room);
        const TensorView memory = views_of(nb::cast<nb::sequence>(listed), task->attachment)[0];
        task->data = memory.data;
        task->room = memory.nbytes;
    }
    const bool async = view.async_op();
    group.engine().messages.sweep();
    starts(view);
    return group.start(std::move(task), async);
}

}  // namespace ringway::shm
