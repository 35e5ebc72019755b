// The fast path of small calls on CUDA tensors: through host memory, in one native call.
#pragma once

#include "python/fast_path.h"
#include "python/shm_group.h"
#include "shm/device_link.h"

namespace ringway::shm {

class DeviceFastPath final : public FastPath {
  public:
    // `profiler` holds the names of torch.autograd.profiler, and `stream_of` returns the current stream of a device.
    DeviceFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler, nb::object stream_of);

    // Takes calls of at most `bytes`, from now on. None takes no more.
    void attach(nb::object link, int64_t bytes);
    bool run(int op, nb::handle outputs, nb::handle inputs, int peer);

  private:
    bool profiled() const;
    void run_on(uintptr_t stream, PlainCall& call);

    PyGroup& group_;
    const nb::dict profiler_;
    const nb::object stream_of_;
    nb::object link_;
    DeviceLink* native_ = nullptr;
    int64_t most_ = -1;
};

}  // namespace ringway::shm
