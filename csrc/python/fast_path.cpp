#include "python/fast_path.h"

namespace ringway {
namespace {

std::byte* memory(const TensorView& view) { return static_cast<std::byte*>(view.data); }
shm::Blocks whole(const TensorView& view) { return {memory(view), 0, nullptr}; }
shm::Blocks parts(const TensorView& view, int64_t bytes) { return {memory(view), bytes, nullptr}; }
shm::Blocks listed(const PlainCall& call) { return {nullptr, 0, call.blocks.data()}; }

}  // namespace

FastPath::FastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed, uint32_t ops)
    : record_(record), rank_(rank), size_(size), device_(device), moved_(moved), summed_(summed), ops_(ops) {
    served_.fill({{0, INT64_MAX}});
}

bool FastPath::serves(const PlainCall& call) const {
    for (const auto& [least, most] : served_[static_cast<size_t>(call.op)])
        if (least <= call.bytes && call.bytes <= most) return true;
    return false;
}

bool FastPath::same_kind(const TensorView& one, const TensorView& other) const {
    return one.dtype == other.dtype && one.device_index == other.device_index;
}

// A list with one plain tensor for each rank, all like `one`.
bool FastPath::list_like(nb::handle list, const TensorView& one, PlainCall& call) const {
    if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != size_) return false;
    call.blocks.reserve(static_cast<size_t>(size_));
    call.kept.reserve(static_cast<size_t>(size_));
    for (int rank = 0; rank < size_; ++rank) {
        PyObject* tensor = PyList_GET_ITEM(list.ptr(), rank);
        TensorView view;
        if (!plain(tensor, view) || !same_kind(view, one) || view.numel != one.numel) return false;
        call.blocks.push_back(memory(view));
        call.kept.push_back(nb::borrow(tensor));
    }
    return true;
}

// The same at the root; the other ranks have no list.
bool FastPath::list_at_root(nb::handle list, const TensorView& one, PlainCall& call) const {
    return rank_ == call.peer ? list_like(list, one, call) : list.is_none();
}

bool FastPath::read_tensors(nb::handle outputs, nb::handle inputs, PlainCall& call) const {
    TensorView in, out;
    switch (call.op) {
        case Op::Barrier:
            return true;
        case Op::AllReduce:
        case Op::Broadcast:
        case Op::Reduce:
        case Op::Recv:
            if (!plain(outputs, out)) return false;
            call.in = call.out = whole(out);
            call.bytes = out.nbytes;
            call.count = out.numel;
            call.dtype = out.dtype;
            return true;
        case Op::Send:
            if (!plain(inputs, in)) return false;
            call.in = whole(in);
            call.bytes = in.nbytes;
            call.count = in.numel;
            call.dtype = in.dtype;
            return true;
        case Op::AllGather:
        case Op::Gather:
            if (!plain(inputs, in)) return false;
            if (!(call.op == Op::Gather ? list_at_root(outputs, in, call) : list_like(outputs, in, call))) return false;
            call.in = whole(in);
            call.out = listed(call);
            call.bytes = in.nbytes * size_;
            call.count = in.numel;
            call.dtype = in.dtype;
            return true;
        case Op::Scatter:
        case Op::ReduceScatter:
            if (!plain(outputs, out)) return false;
            if (!(call.op == Op::Scatter ? list_at_root(inputs, out, call) : list_like(inputs, out, call))) return false;
            call.in = listed(call);
            call.out = whole(out);
            call.bytes = out.nbytes * size_;
            call.count = out.numel;
            call.dtype = out.dtype;
            return true;
        default:
            break;
    }
    if (!plain(inputs, in) || !plain(outputs, out) || !same_kind(in, out)) return false;
    call.dtype = in.dtype;
    switch (call.op) {
        case Op::AllGatherSingle:
            call.in = whole(in);
            call.out = parts(out, in.nbytes);
            call.bytes = out.nbytes;
            call.count = in.numel;
            return out.numel == in.numel * size_;
        case Op::ReduceScatterSingle:
            call.in = parts(in, out.nbytes);
            call.out = whole(out);
            call.bytes = in.nbytes;
            call.count = out.numel;
            return in.numel == out.numel * size_;
        case Op::AllToAllSingle:
            call.in = parts(in, in.nbytes / size_);
            call.out = parts(out, out.nbytes / size_);
            call.bytes = in.nbytes;
            call.count = in.numel / size_;
            return in.numel == out.numel && in.rows % size_ == 0 && out.rows % size_ == 0;
        default:
            return false;
    }
}

bool FastPath::read(Op op, nb::handle outputs, nb::handle inputs, int peer, PlainCall& call) const {
    if (held_ != 0 || !has(static_cast<int>(op)) || peer >= size_) return false;
    call.op = op;
    call.peer = peer;
    if (!read_tensors(outputs, inputs, call)) return false;
    if (!serves(call)) return false;
    if (op == Op::Barrier) return true;
    return ((shm::reduces(op) ? summed_ : moved_) >> static_cast<int>(call.dtype) & 1) != 0;
}

GroupRecord::Begun FastPath::begin(const PlainCall& call, uint32_t site) {
    return record_.begin(call.op, call.bytes, call.dtype, Reduce::Sum, call.peer, 0, site);
}

}  // namespace ringway
