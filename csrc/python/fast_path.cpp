#include "python/fast_path.h"

#include "agreement.h"

namespace ringway {
namespace {

bool same_kind(const TensorView& one, const TensorView& other) {
    return one.dtype == other.dtype && one.device_index == other.device_index;
}

}  // namespace

FastPath::FastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed, uint32_t ops,
                   uint32_t async_ops, bool takes_options)
    : record_(record),
      rank_(rank),
      size_(size),
      device_(device),
      moved_(moved),
      summed_(summed),
      ops_(ops & ~(uint32_t{1} << static_cast<int>(Op::AllToAll))),
      async_ops_(async_ops),
      takes_options_(takes_options) {
    served_.fill({{0, INT64_MAX}});
}

PyObject* FastPath::run_from_python(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    FastCall call;
    if (count != FastCall::kArguments) {
        PyErr_SetString(PyExc_TypeError, "run takes op, outputs, inputs, peer, async_op, tag, reduce");
        return nullptr;
    }
    const FastCall::Read read = call.read(given, count);
    if (read == FastCall::Read::Error) return nullptr;
    if (read == FastCall::Read::TooLarge) Py_RETURN_FALSE;
    return or_raise([&] { return nb::inst_ptr<FastPath>(self)->run(call).release().ptr(); });
}

FastPath* FastPath::behind(PyObject* method) {
    static const PyMethodDef native = fast_method("run", &run_from_python);
    const bool is_native = PyCFunction_Check(method) && PyCFunction_GET_FUNCTION(method) == native.ml_meth;
    return is_native ? nb::inst_ptr<FastPath>(PyCFunction_GET_SELF(method)) : nullptr;
}

bool FastPath::serves(const PlainCall& call) const {
    for (const auto& [least, most] : served_[static_cast<size_t>(call.op)])
        if (least <= call.bytes && call.bytes <= most) return true;
    return false;
}

// A list with one plain tensor for each rank, all like `share`.
bool FastPath::read_list(nb::handle list, const TensorView& share, PlainCall& call) const {
    if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != size_) return false;
    call.listed.reserve(size_);
    for (int rank = 0; rank < size_; ++rank) {
        PyObject* tensor = PyList_GET_ITEM(list.ptr(), rank);
        TensorView view;
        if (!plain(tensor, view) || !same_kind(view, share) || view.numel != share.numel) return false;
        call.listed.add(tensor, view.data);
    }
    return true;
}

// One block for each rank, as large as `share`: a list of tensors, which only the root of a gather or scatter has, or
// the equal parts of one tensor.
bool FastPath::read_blocks(nb::handle blocks, const TensorView& share, PlainCall& call, shm::Blocks& at) const {
    if (call.op == Op::AllGatherSingle || call.op == Op::ReduceScatterSingle) {
        TensorView all;
        if (!plain(blocks, all) || !same_kind(all, share) || all.numel != share.numel * size_) return false;
        at = {all.data, share.nbytes, nullptr};
        return true;
    }
    const bool rooted = call.op == Op::Gather || call.op == Op::Scatter;
    if (rooted && rank_ != call.root) return blocks.is_none();
    if (!read_list(blocks, share, call)) return false;
    at = {nullptr, 0, call.listed.blocks()};
    return true;
}

bool FastPath::read_all_to_all(nb::handle outputs, nb::handle inputs, PlainCall& call) const {
    TensorView in, out;
    if (!plain(inputs, in) || !plain(outputs, out) || !same_kind(in, out) || in.numel != out.numel) return false;
    call.in = {in.data, in.nbytes / size_, nullptr};
    call.out = {out.data, out.nbytes / size_, nullptr};
    call.dtype = in.dtype;
    call.bytes = in.nbytes;
    call.device_index = in.device_index;
    call.count = in.numel / size_;
    return in.rows % size_ == 0 && out.rows % size_ == 0;
}

bool FastPath::read_tensors(nb::handle outputs, nb::handle inputs, PlainCall& call) const {
    if (call.op == Op::Barrier) return true;
    if (call.op == Op::AllToAllSingle) return read_all_to_all(outputs, inputs, call);
    const bool gathers = shm::gathers(call.op), scatters = shm::scatters(call.op);
    TensorView share;  // what this rank contributes or gets
    if (!plain(gathers || call.op == Op::Send ? inputs : outputs, share)) return false;
    call.in = call.out = {share.data, 0, nullptr};
    call.dtype = share.dtype;
    call.device_index = share.device_index;
    call.count = share.numel;
    call.bytes = gathers || scatters ? share.nbytes * size_ : share.nbytes;
    if (gathers) return read_blocks(outputs, share, call, call.out);
    if (scatters) return read_blocks(inputs, share, call, call.in);
    return true;
}

bool FastPath::read(Op op, nb::handle outputs, nb::handle inputs, int peer, PlainCall& call) const {
    if (held_ != 0 || record_.is_starting() || !has(static_cast<int>(op)) || peer >= size_) return false;
    if ((agreement(op) & kAgreeRoot) != 0 && peer < 0) return false;
    call.op = op;
    call.dtype = DType::Unknown;
    call.root = peer;
    if (!read_tensors(outputs, inputs, call) || !serves(call)) return false;
    if (op == Op::Barrier) return true;
    return ((shm::reduces(op) ? summed_ : moved_) >> static_cast<int>(call.dtype) & 1) != 0;
}

GroupRecord::Begun FastPath::begin(const PlainCall& call, uint32_t site) {
    return record_.begin(call.op, call.bytes, call.dtype, call.reduce, call.root, 0, site);
}

}  // namespace ringway
