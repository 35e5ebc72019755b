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

// A call whose tensors are known to be plain. `root` may also be the destination or the source of a message, whose memory
// is `in`.
struct PlainCall : shm::Request {
    int64_t bytes = 0;               // of the message, as the recorder counts them
    int device_index = 0;
    std::vector<std::byte*> blocks;  // of a list of tensors,
    std::vector<nb::object> kept;    // which the program may change while the call runs
};

class FastPath {
  public:
    // `device` is the kind of device, `moved` and `summed` have a bit for each dtype that the backend moves and sums as
    // it is, `ops` a bit for each op that the path takes, and `async_ops` one for each that it also takes asynchronously. It
    // never takes an all_to_all of lists. With `takes_options` it is a StreamFastPath, which a BridgeMethod can use.
    FastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed, uint32_t ops,
             uint32_t async_ops = 0, bool takes_options = false);

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
    bool has(int op) const { return op >= 0 && op < kOps && (ops_ >> op & 1) != 0; }
    bool has_async(int op) const { return has(op) && (async_ops_ >> op & 1) != 0; }
    bool takes_options() const { return takes_options_; }

    GroupRecord& record() { return record_; }

  protected:
    int rank() const { return rank_; }
    int size() const { return size_; }
    // Whether other backends do some of the group's calls. Then one order must know which calls are in flight.
    bool shares_group() const { return shares_group_; }

  private:
    static constexpr int kOps = 14;  // all up to Recv; coalesced calls have no fast path
    static_assert(static_cast<int>(Op::Recv) == kOps - 1);

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
    std::array<std::vector<std::pair<int64_t, int64_t>>, kOps> served_;  // by op: least and most bytes
    int held_ = 0;
    bool shares_group_ = false;
};

}  // namespace ringway
