// The fast path of shared memory: one native call goes from Python's tensors to the engine and back.
#pragma once

#include "python/fast_path.h"
#include "python/shm_group.h"

namespace ringway::shm {

class ShmFastPath final : public FastPath {
  public:
    // `profiler` holds the names of torch.autograd.profiler, which say whether a profiler is on. `work` makes the Work of an
    // asynchronous message, `sent` that of a send that has left; `failed` is called with the outcome of a message that
    // failed.
    ShmFastPath(PyGroup& group, GroupRecord& record, nb::dict profiler, nb::object work, nb::object sent, nb::object failed);

    nb::object run(const FastCall& given) override;

  private:
    bool profiled() const;
    bool read_here(const FastCall& given, PlainCall& call) const;
    // The Work of a send that has left. One that the program has dropped is used again.
    nb::object sent();
    // The Work of an asynchronous message. It gets this path, its task and its tensor as attributes.
    nb::object start(PlainCall& call, nb::handle tensor, int tag);
    template <class Run>
    void run_recorded(uint64_t token, const Run& run);
    void run_collective(PlainCall& call);
    // False if a send cannot leave at once: then nothing has happened.
    bool send_at_once(PlainCall& call, int tag, bool async);
    void run_message(PlainCall& call, nb::handle tensor, int tag);
    bool run_at_once(const Message& message);

    PyGroup& group_;
    const nb::dict profiler_;
    const nb::object work_, sent_, failed_;
    nb::object spare_;
};

}  // namespace ringway::shm
