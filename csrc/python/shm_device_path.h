// The fast path of calls on CUDA tensors, in one native call: small ones through host memory, large ones direct
// (src/ringway/backends/shm/cuda.py describes both ways).
#pragma once

#include <map>
#include <tuple>

#include "python/fast_path.h"
#include "python/shm_group.h"
#include "shm/device_link.h"

namespace ringway::shm {

// How the ranks of a group share their devices.
struct DeviceManner {
    std::vector<int64_t> direct_from;  // by op: the bytes of a call from which it is direct
    bool reduces = false;              // there are kernels
    bool takes_turns = false;          // one rank does a whole all_reduce
    bool one_gpu = false;              // all memory is in one GPU, and there are kernels
};

// The use of a link's bounce memory, if no other thread, or call that this one interrupts, has it.
class Bounce {
  public:
    explicit Bounce(DeviceLink& link) : is_ours(link.take_bounce()), link_(link) {}
    ~Bounce() {
        if (is_ours) link_.give_back_bounce();
    }
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;
    const bool is_ours;

  private:
    DeviceLink& link_;
};

class DeviceFastPath final : public FastPath {
  public:
    // `kind` is the kind of device. `profiler` holds the names of torch.autograd.profiler, `stream_of` returns the current
    // stream of a device, and `kernel_of` its kernel for a dtype, copies or a sum, numbers of inputs and outputs, alignment and large
    // counts.
    DeviceFastPath(PyGroup& group, GroupRecord& record, int kind, nb::dict profiler, nb::object stream_of,
                   nb::object kernel_of);

    // Takes calls from now on. None takes no more.
    void attach(nb::object link, const DeviceManner& manner);
    nb::object run(const FastCall& given) override;

  private:
    // A rank's part of a direct call (src/ringway/backends/shm/cuda_parts.py): what it offers, whose memory it needs, and
    // what it does with it.
    struct Part {
        enum class Kind { Nothing, Pulls, Reduces, Spreads } kind = Kind::Nothing;
        int worker = DeviceLink::kEveryRank;
        std::vector<Span> offered;
        std::vector<DeviceMemory::Wanted> wanted;
        uint64_t own = 0;               // this rank's own input
        uint64_t to = 0;                // where it goes, or its result; 0 if nowhere
        std::vector<uint64_t> targets;  // where the wanted spans are pulled to, one by one
        int64_t bytes = 0;              // of each span
        int64_t skipped = 0;            // bytes before the elements that this rank reduces, in every rank's memory,
        int64_t count = 0;              // and how many these are
    };

    bool takes(const FastCall& given);
    bool profiled() const;
    // Notes where the program made the call.
    static void locate(PlainCall& call);
    void run_on(DeviceLink& link, uintptr_t stream, PlainCall& call);
    bool send(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, PlainCall& call, int tag);
    bool receive(DeviceLink& link, uintptr_t stream, PlainCall& call, int tag);
    bool run_direct(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, PlainCall& call);
    // False if the general path has to copy the tensors first.
    bool find_part(const PlainCall& call, const DeviceManner& manner, Part& part) const;
    Request compared(const PlainCall& call) const;
    // Shows the other ranks the offer and what this rank expects, and returns their offers.
    std::vector<std::byte> show(const PlainCall& call, const std::vector<std::byte>& offer);
    // What a kernel does: sums its inputs into every output, or copies each to its own output.
    enum class Task { Sum, Copy };
    void enqueue(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, DType dtype, const Part& part,
                 const std::vector<Span>& spans);
    void pull(DeviceLink& link, bool with_kernel, uintptr_t stream, const std::vector<DeviceLink::Copy>& copies, int64_t bytes);
    void launch(DeviceLink& link, uintptr_t stream, Task task, DType dtype, const std::vector<uint64_t>& ins,
                const std::vector<uint64_t>& outs, int64_t count);
    // Without a function if there is no such kernel.
    const DeviceLink::Kernel& kernel(const DeviceLink& link, Task task, DType dtype, size_t ins, size_t outs, bool aligned,
                                     bool large);

    PyGroup& group_;
    const nb::dict profiler_;
    const nb::object stream_of_, kernel_of_;
    nb::object link_;
    DeviceLink* native_ = nullptr;
    DeviceManner manner_;
    std::map<std::tuple<Task, DType, size_t, size_t, bool, bool>, DeviceLink::Kernel> kernels_;
};

}  // namespace ringway::shm
