// The fast path of shared memory: one native call from Python's tensors to the engine and back.
#pragma once

#include "python/fast_path.h"
#include "python/shm_group.h"

namespace ringway::shm {

class ShmFastPath final : public FastPath {
  public:
    // `profiler` holds the names of torch.autograd.profiler, which say whether a profiler is on.
    ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler);

    // Whether the call is done. A send that has to wait is done only if `wait` allows it.
    bool run(int op, nb::handle outputs, nb::handle inputs, int peer, int tag, bool wait);

  private:
    bool profiled() const;
    void run_collective(const PlainCall& call);
    bool run_message(const PlainCall& call, nb::handle tensor, int tag, bool wait);

    PyGroup& group_;
    const nb::dict profiler_;
};

}  // namespace ringway::shm
