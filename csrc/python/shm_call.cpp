#include "python/shm_call.h"

#include <cstring>
#include <string>
#include <unordered_map>

#include "python/call_view.h"
#include "python/tensor_view.h"
#include "record/callsite.h"

namespace ringway::shm {
namespace {

struct Place {
    std::byte* data;
    int64_t bytes;
    int64_t rows;  // of the first dimension
};

// Any contiguous CPU tensor: read through DLPack if DLPack knows it, else through its attributes.
Place place_of(nb::handle tensor) {
    TensorView view;
    if (view_tensor(tensor.ptr(), view)) return {static_cast<std::byte*>(view.data), view.nbytes, view.rows};
    const auto data = nb::cast<uintptr_t>(tensor.attr("data_ptr")());
    const auto shape = nb::cast<std::vector<int64_t>>(nb::list(tensor.attr("shape")));
    return {reinterpret_cast<std::byte*>(data), nb::cast<int64_t>(tensor.attr("nbytes")), shape.empty() ? 1 : shape[0]};
}

std::vector<Place> places_of(const nb::sequence& tensors, Attachment& attachment) {
    std::vector<Place> places;
    for (nb::handle tensor : tensors) {
        places.push_back(place_of(tensor));
        attachment.keep(tensor);
    }
    return places;
}

// One block for each rank: the tensors of a list, or equal parts of a single tensor.
Blocks blocks_of(const std::vector<Place>& places, bool split, int size, std::vector<std::byte*>& list) {
    if (places.size() == 1) return {places[0].data, split ? places[0].bytes / size : 0, nullptr};
    for (const Place& place : places) list.push_back(place.data);
    return {nullptr, 0, list.data()};
}

// The pieces of one tensor that go to, or come from, each rank.
Blocks pieces_of(const Place& whole, const std::vector<int64_t>& bytes, std::vector<std::byte*>& list) {
    std::byte* at = whole.data;
    for (const int64_t piece : bytes) {
        list.push_back(at);
        at += piece;
    }
    return {nullptr, 0, list.data()};
}

// The bytes for each rank. Splits count rows of the first dimension.
std::vector<int64_t> sizes_of(const std::vector<Place>& places, const CallView::Splits& splits, int size) {
    std::vector<int64_t> sizes;
    if (splits) {
        const int64_t row = places[0].rows != 0 ? places[0].bytes / places[0].rows : 0;
        for (const int64_t rows : *splits) sizes.push_back(rows * row);
    } else if (places.size() == 1 && size != 1) {
        sizes.assign(static_cast<size_t>(size), places[0].bytes / size);
    } else {
        for (const Place& place : places) sizes.push_back(place.bytes);
    }
    return sizes;
}

// The bytes that one rank contributes or gets.
int64_t block_bytes(Op op, const std::vector<Place>& in, const std::vector<Place>& out) {
    switch (op) {
        case Op::Barrier:
            return 0;
        case Op::Scatter:
        case Op::ReduceScatter:
        case Op::ReduceScatterSingle:
            return out[0].bytes;
        default:
            return in[0].bytes;
    }
}

}  // namespace

const char* text_of_site(uint32_t id) {
    static auto* texts = new std::unordered_map<uint32_t, std::string>;
    const auto found = texts->find(id);
    if (found != texts->end()) return found->second.c_str();
    const CallSite where = site(id);
    std::string text = where.file + ":" + std::to_string(where.line) + " in " + where.function;
    if (text.size() >= kTextBytes) text = "..." + text.substr(text.size() - (kTextBytes - 4));
    return texts->emplace(id, id == 0 ? std::string() : text).first->second.c_str();
}

nb::object collective(PyGroup& group, nb::handle call, double timeout_s) {
    const CallView view(call);
    auto task = std::make_shared<PythonCollective>();
    Request& r = task->request;
    r.op = view.op();
    r.dtype = view.dtype();
    r.reduce = view.reduce();
    r.root = view.peer();
    r.factor = view.factor();
    r.timeout_s = timeout_s;
    r.number = view.sequence();
    r.site = view.site();
    r.place = text_of_site(r.site);
    r.element = element_bytes(r.dtype);
    const int size = group.engine().members.size();
    const auto in = places_of(view.inputs(), task->attachment);
    const auto out = places_of(view.outputs(), task->attachment);
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
        r.count = block_bytes(r.op, in, out) / r.element;
        r.in = blocks_of(in, r.op == Op::ReduceScatterSingle, size, task->in);
        r.out = blocks_of(out, r.op == Op::AllGatherSingle, size, task->out);
    }
    if (view.async_op()) return nb::cast(group.submit(std::move(task)));
    GilHost host;
    if (r.count * r.element >= kLarge) host.block();
    group.run(r, host);
    return nb::none();
}

void fill(Message& message, const MessageFacts& facts) {
    message.sends = facts.op == Op::Send;
    message.peer = facts.peer < 0 ? kAnyone : facts.peer;
    message.tag = facts.tag;
    message.data = facts.data;
    message.bytes = facts.bytes;
    message.timeout_s = facts.timeout_s;
    message.facts.op = facts.op;
    message.facts.dtype = facts.dtype;
    message.facts.count = facts.bytes / element_bytes(facts.dtype);
    message.facts.root = facts.peer;
    message.facts.number = facts.number;
    std::strncpy(message.facts.place, text_of_site(facts.site), kTextBytes - 1);
}

PyTask message(PyGroup& group, nb::handle call, double timeout_s) {
    const CallView view(call);
    auto task = std::make_shared<PythonMessage>();
    const Op op = view.op();
    const auto places = places_of(op == Op::Send ? view.inputs() : view.outputs(), task->attachment);
    fill(*task, {op, view.dtype(), view.peer(), view.tag(), places[0].data, places[0].bytes, timeout_s,
                 view.sequence(), view.site()});
    return group.start(std::move(task), view.async_op());
}

}  // namespace ringway::shm
