// Short cuts for synchronous calls, and for sends that leave at once, on plain tensors: view, record, run, in one
// native call.
// Included by bind_shm.cpp only.
#pragma once

namespace {

class Quick {
  public:
    // `profiler` holds the names of torch.autograd.profiler, which says there whether a profiler is on.
    Quick(PyGroup& group, Lane& lane, nb::dict profiler)
        : group_(group), lane_(lane), profiler_(std::move(profiler)), size_(group.engine().members.size()) {}

    // Each returns 0 when the call is done, 1 when it is not one for a short cut: then nothing has happened.

    int all_reduce(nb::handle tensor, int reduce) {
        TensorView view;
        if (!plain(tensor, view) || !reducible(view.dtype, reduce)) return 1;
        auto* data = static_cast<std::byte*>(view.data);
        Request r = request(Op::AllReduce, view, view.numel, reduce);
        r.in = r.out = Blocks{data, 0, nullptr};
        return run(r, view.nbytes);
    }

    int broadcast(nb::handle tensor, int root) {
        TensorView view;
        if (!plain(tensor, view) || root < 0 || root >= size_) return 1;
        Request r = request(Op::Broadcast, view, view.numel, 0);
        r.root = root;
        r.in = r.out = Blocks{static_cast<std::byte*>(view.data), 0, nullptr};
        return run(r, view.nbytes);
    }

    int reduce(nb::handle tensor, int root, int reduce) {
        TensorView view;
        if (!plain(tensor, view) || !reducible(view.dtype, reduce) || root < 0 || root >= size_) return 1;
        Request r = request(Op::Reduce, view, view.numel, reduce);
        r.root = root;
        r.in = r.out = Blocks{static_cast<std::byte*>(view.data), 0, nullptr};
        return run(r, view.nbytes);
    }

    int all_gather_list(nb::handle outputs, nb::handle input) {
        TensorView in;
        Listed blocks;
        if (!plain(input, in) || !plain_list(outputs, in, blocks)) return 1;
        Request r = request(Op::AllGather, in, in.numel, 0);
        r.in = Blocks{static_cast<std::byte*>(in.data), 0, nullptr};
        r.out = Blocks{nullptr, 0, blocks.data.data()};
        return run(r, in.nbytes * size_);
    }

    int gather(nb::handle input, nb::handle outputs, int root) {
        TensorView in;
        Listed blocks;
        if (!plain(input, in) || !plain_at(root, outputs, in, blocks)) return 1;
        Request r = request(Op::Gather, in, in.numel, 0);
        r.root = root;
        r.in = Blocks{static_cast<std::byte*>(in.data), 0, nullptr};
        r.out = Blocks{nullptr, 0, blocks.data.data()};
        return run(r, in.nbytes * size_);
    }

    int scatter(nb::handle output, nb::handle inputs, int root) {
        TensorView out;
        Listed blocks;
        if (!plain(output, out) || !plain_at(root, inputs, out, blocks)) return 1;
        Request r = request(Op::Scatter, out, out.numel, 0);
        r.root = root;
        r.in = Blocks{nullptr, 0, blocks.data.data()};
        r.out = Blocks{static_cast<std::byte*>(out.data), 0, nullptr};
        return run(r, out.nbytes * size_);
    }

    int all_gather(nb::handle output, nb::handle input) {
        TensorView in, out;
        if (!plain(input, in) || !plain(output, out) || in.dtype != out.dtype || out.numel != in.numel * size_) return 1;
        Request r = request(Op::AllGatherSingle, in, in.numel, 0);
        r.in = Blocks{static_cast<std::byte*>(in.data), 0, nullptr};
        r.out = Blocks{static_cast<std::byte*>(out.data), in.nbytes, nullptr};
        return run(r, out.nbytes);
    }

    int reduce_scatter(nb::handle output, nb::handle input, int reduce) {
        TensorView in, out;
        if (!plain(input, in) || !plain(output, out) || in.dtype != out.dtype || in.numel != out.numel * size_) return 1;
        if (!reducible(in.dtype, reduce)) return 1;
        Request r = request(Op::ReduceScatterSingle, in, out.numel, reduce);
        r.in = Blocks{static_cast<std::byte*>(in.data), out.nbytes, nullptr};
        r.out = Blocks{static_cast<std::byte*>(out.data), 0, nullptr};
        return run(r, in.nbytes);
    }

    int reduce_scatter_list(nb::handle output, nb::handle inputs, int reduce) {
        TensorView out;
        Listed blocks;
        if (!plain(output, out) || !plain_list(inputs, out, blocks) || !reducible(out.dtype, reduce)) return 1;
        Request r = request(Op::ReduceScatter, out, out.numel, reduce);
        r.in = Blocks{nullptr, 0, blocks.data.data()};
        r.out = Blocks{static_cast<std::byte*>(out.data), 0, nullptr};
        return run(r, out.nbytes * size_);
    }

    // With equal splits.
    int all_to_all(nb::handle output, nb::handle input) {
        TensorView in, out;
        if (!plain(input, in) || !plain(output, out) || in.dtype != out.dtype || in.numel != out.numel) return 1;
        if (in.numel % size_ != 0) return 1;
        Request r = request(Op::AllToAllSingle, in, in.numel / size_, 0);
        r.in = Blocks{static_cast<std::byte*>(in.data), in.nbytes / size_, nullptr};
        r.out = Blocks{static_cast<std::byte*>(out.data), out.nbytes / size_, nullptr};
        return run(r, in.nbytes);
    }

    int barrier() {
        TensorView nothing;
        Request r = request(Op::Barrier, nothing, 0, 0);
        return run(r, 0);
    }

    // `at_once`: only if it need not be waited for.
    int send(nb::handle tensor, int peer, int tag, bool at_once) {
        TensorView view;
        if (!takes_message(Op::Send, tensor, peer, view)) return 1;
        Message message;
        describe(message, Op::Send, view, peer, tag);
        GilHost host;
        if (view.nbytes >= kLarge) host.block();
        const bool sent = group_.engine().messages.send_now(message);
        host.resume();
        if (!sent) return at_once ? 1 : move(Op::Send, tensor, view, peer, tag);
        lane_.end(lane_.begin(Op::Send, view.nbytes, view.dtype, Reduce::Sum, peer, 0, current_site()), State::Completed);
        return 0;
    }

    int recv(nb::handle tensor, int peer, int tag) {
        TensorView view;
        return takes_message(Op::Recv, tensor, peer, view) ? move(Op::Recv, tensor, view, peer, tag) : 1;
    }

    // Another backend of the same group does the calls of an op that are smaller or larger.
    void serve(int op, int64_t least, int64_t most) { range_.at(static_cast<size_t>(op)) = {least, most}; }
    // While the sum of changes is not zero, something that was issued elsewhere before has to end first.
    void hold(int change) { held_ += change; }

  private:
    struct Range {
        int64_t least = 0, most = INT64_MAX;
        bool holds(int64_t bytes) const { return least <= bytes && bytes <= most; }
    };

    // The tensors of a list, which the program may change meanwhile.
    struct Listed {
        std::vector<std::byte*> data;
        std::vector<nb::object> kept;
    };

    static bool plain(nb::handle tensor, TensorView& view) {
        return view_tensor(tensor.ptr(), view) && view.on(kCpu);
    }

    // A list of one plain tensor a rank, each like `one`.
    bool plain_list(nb::handle list, const TensorView& one, Listed& blocks) const {
        if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != size_) return false;
        blocks.data.reserve(static_cast<size_t>(size_));
        blocks.kept.reserve(static_cast<size_t>(size_));
        for (int rank = 0; rank < size_; ++rank) {
            TensorView view;
            if (!plain(PyList_GET_ITEM(list.ptr(), rank), view)) return false;
            if (view.dtype != one.dtype || view.numel != one.numel) return false;
            blocks.data.push_back(static_cast<std::byte*>(view.data));
            blocks.kept.push_back(nb::borrow(PyList_GET_ITEM(list.ptr(), rank)));
        }
        return true;
    }

    // The same on the root; the others have no list.
    bool plain_at(int root, nb::handle list, const TensorView& one, Listed& blocks) const {
        if (root < 0 || root >= size_) return false;
        return rank() == root ? plain_list(list, one, blocks) : list.is_none();
    }

    static bool reducible(DType dtype, int reduce) {
        return reduce != static_cast<int>(Reduce::PremulSum) &&
               find_reducer(dtype, static_cast<Reduce>(reduce)) != nullptr;
    }

    static Request request(Op op, const TensorView& view, int64_t count, int reduce) {
        Request r;
        r.op = op;
        r.dtype = view.dtype;
        r.reduce = static_cast<Reduce>(reduce);
        r.count = count;
        r.element = element_bytes(view.dtype);
        return r;
    }

    // A call that a profiler is to see takes the long way, where it becomes an event.
    bool profiled() const {
        static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
        return PyDict_GetItem(profiler_.ptr(), name) == Py_True;
    }

    bool takes(Op op, int64_t bytes) const {
        return !profiled() && held_ == 0 && range_[static_cast<size_t>(op)].holds(bytes);
    }

    int rank() const { return group_.engine().members.rank(); }

    int run(Request& r, int64_t bytes) {
        if (!takes(r.op, bytes)) return 1;
        r.timeout_s = group_.timeout_s();
        r.site = current_site();
        r.place = text_of_site(r.site);
        uint64_t token;
        try {
            token = lane_.begin(r.op, bytes, r.dtype, r.reduce, r.root, 0, r.site);
        } catch (const DifferentCalls&) {
            return 1;  // the long way finds the same, and raises it
        }
        r.number = lane_.collectives() - 1;
        GilHost host;
        if (bytes >= kLarge) host.block();
        try {
            group_.run(r, host);
        } catch (...) {
            lane_.end(token, State::Failed);
            throw;
        }
        lane_.end(token, State::Completed);
        return 0;
    }

    bool takes_message(Op op, nb::handle tensor, int peer, TensorView& view) const {
        return plain(tensor, view) && peer >= 0 && peer < size_ && peer != rank() && takes(op, view.nbytes);
    }

    void describe(Message& message, Op op, const TensorView& view, int peer, int tag) const {
        fill(message, {static_cast<std::byte*>(view.data), view.nbytes}, op, view.dtype, element_bytes(view.dtype), peer,
             tag, group_.timeout_s(), lane_.messages());
    }

    // A message whose sender or receiver waits for it.
    int move(Op op, nb::handle tensor, const TensorView& view, int peer, int tag) {
        auto message = std::make_shared<PythonMessage>();
        message->attachment.keep(tensor);
        describe(*message, op, view, peer, tag);
        const uint64_t token = lane_.begin(op, view.nbytes, view.dtype, Reduce::Sum, peer, 0, current_site());
        try {
            group_.run(message);
        } catch (...) {
            lane_.end(token, State::Failed);
            throw;
        }
        lane_.end(token, State::Completed);
        return 0;
    }

    PyGroup& group_;
    Lane& lane_;
    const nb::dict profiler_;
    const int size_;
    std::array<Range, 14> range_;  // by op; the last that has a short cut is the receive
    int held_ = 0;
};
static_assert(static_cast<int>(Op::Recv) == 13);

}  // namespace
