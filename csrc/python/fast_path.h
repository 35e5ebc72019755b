// The fast path: one native step reads, checks, records and compares a call on plain tensors.
//
// A path belongs to one backend of one group. It takes only dense, contiguous tensors on its device. Every path has one
// method, `run`, which takes a FastCall and returns the Work of an asynchronous call, or True for a synchronous one that
// is done. False says that nothing has happened: then the general path converts the call or says what is wrong with it. Every
// path takes synchronous sums and moves; its fields say what else it takes.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "python/fast_method.h"
#include "python/tensor_view.h"
#include "record/group_record.h"
#include "shm/collectives.h"

namespace ringway {

namespace nb = nanobind;

inline constexpr int kFastOps = 14;  // all up to Recv; coalesced calls have no fast path
static_assert(static_cast<int>(Op::Recv) == kFastOps - 1);

// The tensors of a list, kept: the program may change the list while a call runs. Few of them need no allocation.
class TensorList {
  public:
    TensorList() = default;
    TensorList(const TensorList&) = delete;
    TensorList& operator=(const TensorList&) = delete;
    ~TensorList() {
        for (int i = 0; i < count_; ++i) Py_DECREF(kept()[i]);
    }

    void reserve(int count) {
        if (count <= kFew) return;
        many_blocks_.resize(static_cast<size_t>(count));
        many_kept_.resize(static_cast<size_t>(count));
    }
    void add(PyObject* tensor, std::byte* data) {
        Py_INCREF(tensor);
        kept()[count_] = tensor;
        blocks()[count_++] = data;
    }
    std::byte** blocks() { return many_blocks_.empty() ? few_blocks_ : many_blocks_.data(); }
    std::byte* const* begin() const { return many_blocks_.empty() ? few_blocks_ : many_blocks_.data(); }
    std::byte* const* end() const { return begin() + count_; }

  private:
    static constexpr int kFew = 16;
    PyObject** kept() { return many_kept_.empty() ? few_kept_ : many_kept_.data(); }

    int count_ = 0;
    std::byte* few_blocks_[kFew];
    PyObject* few_kept_[kFew];
    std::vector<std::byte*> many_blocks_;
    std::vector<PyObject*> many_kept_;
};

// A call whose tensors are known to be plain. `root` may also be the destination or the source of a message, whose memory
// is `in`.
struct PlainCall : shm::Request {
    int64_t bytes = 0;  // of the message, as the recorder counts them
    int device_index = 0;
    TensorList listed;
};

class FastPath {
  public:
    virtual ~FastPath() = default;
    // `device` is the kind of device, `moved` and `summed` have a bit for each dtype that the backend moves and sums as
    // it is, `ops` a bit for each op that the path takes, and `async_ops` one for each that it also takes asynchronously. It
    // never takes an all_to_all of lists. With `takes_options` it is a StreamFastPath, which a BridgeMethod can use.
    FastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed, uint32_t ops,
             uint32_t async_ops = 0, bool takes_options = false);

    // A path that is written in Python has a `run` of its own.
    virtual nb::object run(const FastCall&) { return nb::bool_(false); }
    // The native `run`, as a method of Python; and the path behind such a method, null if `method` is another function.
    static PyObject* run_from_python(PyObject* self, PyObject* const* given, Py_ssize_t count);
    static FastPath* behind(PyObject* method);

    // Fills `call` and returns true if the path takes it. False leaves no trace.
    bool read(Op op, nb::handle outputs, nb::handle inputs, int peer, PlainCall& call) const;
    // Numbers, records and compares a call that was read. Throws DifferentCalls.
    GroupRecord::Begun begin(const PlainCall& call, uint32_t site);

    // The path takes calls of an op only if their bytes lie in one of these ranges; the rest go to another backend.
    void serve(int op, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
        served_.at(static_cast<size_t>(op)) = ranges;
        shares_group_ = true;
    }
    // While the sum of all changes is not zero, the path takes no calls: an earlier call runs on another backend.
    void hold(int change) { held_ += change; }
    bool has(int op) const { return op >= 0 && op < kFastOps && (ops_ >> op & 1) != 0; }
    bool has_async(int op) const { return has(op) && (async_ops_ >> op & 1) != 0; }
    bool takes_options() const { return takes_options_; }

    GroupRecord& record() { return record_; }

  protected:
    int rank() const { return rank_; }
    int size() const { return size_; }
    // Whether other backends do some of the group's calls. Then one order must know which calls are in flight.
    bool shares_group() const { return shares_group_; }

  private:
    bool plain(nb::handle tensor, TensorView& view) const { return view_tensor(tensor.ptr(), view) && view.on(device_); }
    bool serves(const PlainCall& call) const;
    bool read_list(nb::handle list, const TensorView& share, PlainCall& call) const;
    bool read_blocks(nb::handle blocks, const TensorView& share, PlainCall& call, shm::Blocks& at) const;
    bool read_all_to_all(nb::handle outputs, nb::handle inputs, PlainCall& call) const;
    bool read_tensors(nb::handle outputs, nb::handle inputs, PlainCall& call) const;

    GroupRecord& record_;
    const int rank_, size_, device_;
    const uint64_t moved_, summed_;
    const uint32_t ops_, async_ops_;
    const bool takes_options_;
    std::array<std::vector<std::pair<int64_t, int64_t>>, kFastOps> served_;  // by op: least and most bytes
    int held_ = 0;
    bool shares_group_ = false;
};

}  // namespace ringway
