// One call as the recorder keeps it.
#pragma once

#include <cstdint>

#include "codes.h"

namespace ringway {

enum class State : uint8_t { Issued = 0, Completed = 1, Failed = 2 };

// Nanoseconds of a monotonic clock, the same for all processes of a host.
int64_t monotonic_ns();

// When a call ran on a device, in the host's clock, and on which of its streams. All 0 if nobody asked the device.
struct DeviceTimes {
    int64_t started_ns = 0;
    int64_t completed_ns = 0;
    uint32_t stream = 0;
    bool beside = false;  // on a stream of its own, not on the one that the program had made current
};

struct Entry {
    uint64_t token = 0;
    uint64_t sequence = 0;
    int64_t bytes = 0;
    int64_t issued_ns = 0;
    int64_t completed_ns = 0;
    int64_t started_ns = 0;  // on a device; 0 if the device was not asked
    uint32_t stream = 0;     // of the device, numbered from 1
    bool beside = false;     // on a stream of its own, so that the program's stream could go on
    uint32_t group = 0;
    uint32_t label = 0;
    uint32_t site = 0;
    int32_t peer = -1;
    int32_t size = 1;  // ranks of the group
    Op op = Op::Barrier;
    DType dtype = DType::Unknown;
    Reduce reduce = Reduce::Sum;
    State state = State::Issued;
    bool quiet = false;     // never logged
    bool profiled = false;  // logged even if its op is not chosen
};

}  // namespace ringway
