// The fast path of shared memory: one native call goes from Python's tensors to the engine and back.
#pragma once

#include "python/fast_path.h"
#include "python/shm_group.h"

namespace ringway::shm {

class ShmFastPath final : public FastPath {
  public:
    // `profiler` holds the names of torch.autograd.profiler, which say whether a profiler is on.
    ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler);

    // Whether the call is done. A send that cannot leave at once is done only if `wait` is true.
    bool run(int op, nb::handle outputs, nb::handle inputs, int peer, int tag, bool wait);

  private:
    bool profiled() const;
    template <class Run>
    void run_recorded(uint64_t token, const Run& run);
    void run_collective(PlainCall& call);
    bool run_message(PlainCall& call, nb::handle tensor, int tag, bool wait);

    PyGroup& group_;
    const nb::dict profiler_;
};

}  // namespace ringway::shm
