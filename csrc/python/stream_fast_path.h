// The fast path of a group on CUDA streams: one native step reads, records and compares a call, has torch start it, and
// follows it on the device. torch's methods are called through Python objects, because the core has no torch headers.
#pragma once

#include <optional>
#include <unordered_map>

#include "python/fast_path.h"
#include "python/stream_calls.h"

namespace ringway::device {

// An asynchronous call on the fast path. Its Python Work holds it, if it has one.
struct StreamWork {
    nb::object path;
    int kind;  // of the call, by the number that Python gave it
    uint64_t sequence;
    uint64_t token;
    nb::object torchs;   // torch's work
    nb::object outputs;  // None if it has none
    nb::object inputs;   // only if torch may have let go of them
    int device;
    bool is_message;
    int64_t began_ns;
    bool followed;  // the device watch reports its end
};

class StreamFastPath : public FastPath {
  public:
    // `averaged` has a bit for each dtype that can be averaged. `open` gets each asynchronous call that nobody has waited
    // for, a StreamWork, by its token; `work` is the type of a Work. The `streams` are functions of torch: the raw
    // handle of the current stream of a device, its description, and one that makes a described stream the current one.
    // `reductions` are the codes of those that torch does as they are, by the hashes of torch's objects.
    StreamFastPath(GroupRecord& record, int rank, int size, int device, uint64_t moved, uint64_t summed, uint64_t averaged,
                   uint32_t ops, Calls& calls, nb::dict open, nb::object work, nb::tuple streams,
                   std::unordered_map<int64_t, int> reductions);

    // If torch's C++ made the call, the Work is torch's own: nobody can ask it for what ringway's has besides, and DDP's
    // calls need no Python object.
    nb::object run(const FastCall& given) override;
    // The code of a reduction of torch's, if torch does it as it is.
    std::optional<Reduce> reduction(nb::handle torchs) const;

    // Orders the current stream behind an asynchronous call. False if the group has failed: then nothing has happened.
    bool wait(StreamWork& work);

    // Python has changed the open calls: when to look after them again.
    void note_open();

    int variant = 0;  // of the options that torch gets; each has kinds of its own
    bool captures = false;  // a graph has captured a call

  private:
    // Calls that differ in their tensors only.
    struct Kind {
        int number;
        nb::object method;   // torch's
        nb::object options;  // None for messages
    };

    bool read_call(const FastCall& given, PlainCall& call) const;
    // Null if the general path has to take the first call of this kind.
    const Kind* kind_of(const PlainCall& call, bool async);
    uintptr_t current_stream(int device) const;
    nb::object call_torch(const PlainCall& call, const Kind& kind, const FastCall& given) const;
    nb::object begin_and_start(PlainCall& call, const FastCall& given);
    nb::object opened(const Kind& kind, const PlainCall& call, const FastCall& given, const GroupRecord::Begun& begun,
                      nb::object torchs, int64_t began_ns, Mark started);
    void end_passed();
    bool end_from_first(bool also_messages);
    bool take_open(const StreamWork& work);
    void follow_aside(StreamWork& work, Mark started);
    void follow(int kind, uint64_t sequence, uint64_t token, nb::handle outputs, int device, uintptr_t stream, Mark started);
    nb::object self() { return nb::find(this); }

    Calls& calls_;
    const uint64_t averaged_;
    const nb::dict open_;
    const nb::object work_type_, raw_stream_, stream_of_, set_stream_;
    const std::unordered_map<int64_t, int> reductions_;
    std::unordered_map<uint64_t, Kind> kinds_;
    std::unordered_map<int, std::pair<nb::object, uintptr_t>> aside_;  // by device: a stream of ours
};

}  // namespace ringway::device
