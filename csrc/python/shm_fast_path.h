// The fast path of shared memory: one native call goes from Python's tensors to the engine and back.
#pragma once

#include "python/fast_path.h"
#include "python/shm_group.h"

namespace ringway::shm {

class ShmFastPath final : public FastPath {
  public:
    // `profiler` holds the names of torch.autograd.profiler, which say whether a profiler is on. `work` makes the Work of an
    // asynchronous message, `failed` is called with the outcome of one that failed.
    ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler, nb::object work, nb::object failed);

    // Whether the call is done. A send that cannot leave at once is done only if `wait` is true.
    bool run(int op, nb::handle outputs, nb::handle inputs, int peer, int tag, bool wait);
    // The Work of a message; None for other calls. The Work gets this path, its task and its tensor as attributes.
    nb::object start(int op, nb::handle outputs, nb::handle inputs, int peer, int tag);

  private:
    bool profiled() const;
    bool read_here(int op, nb::handle outputs, nb::handle inputs, int peer, PlainCall& call) const;
    template <class Run>
    void run_recorded(uint64_t token, const Run& run);
    void run_collective(PlainCall& call);
    bool run_message(PlainCall& call, nb::handle tensor, int tag, bool wait);
    bool run_at_once(const Message& message);

    PyGroup& group_;
    const nb::dict profiler_;
    const nb::object work_, failed_;
};

}  // namespace ringway::shm
