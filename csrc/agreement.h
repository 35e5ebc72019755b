// What the ranks of a group must agree on when they make a call. This is the only table of it: the shared-memory
// engine, the call board of a host and, through the bindings, the comparison across hosts all use it.
//
// Two ranks made the same call exactly when their signatures are equal.
#pragma once

#include <array>
#include <cstdint>

#include "codes.h"

namespace ringway {

enum Agreement : uint8_t { kAgreeBytes = 1, kAgreeDType = 2, kAgreeReduce = 4, kAgreeRoot = 8 };

// all_to_all's blocks differ from pair to pair, so their sizes are compared elsewhere, pair by pair. Messages are
// matched by their peers, and are not compared as calls.
constexpr uint8_t agreement(Op op) {
    switch (op) {
        case Op::Broadcast:
        case Op::Gather:
        case Op::Scatter:
            return kAgreeBytes | kAgreeDType | kAgreeRoot;
        case Op::AllReduce:
        case Op::ReduceScatter:
        case Op::ReduceScatterSingle:
        case Op::AllReduceCoalesced:
        case Op::ReduceScatterCoalesced:
            return kAgreeBytes | kAgreeDType | kAgreeReduce;
        case Op::Reduce:
            return kAgreeBytes | kAgreeDType | kAgreeReduce | kAgreeRoot;
        case Op::AllGather:
        case Op::AllGatherSingle:
        case Op::AllGatherCoalesced:
            return kAgreeBytes | kAgreeDType;
        case Op::AllToAll:
        case Op::AllToAllSingle:
            return kAgreeDType;
        case Op::Barrier:
        case Op::Send:
        case Op::Recv:
            return 0;
    }
    return 0;
}

namespace signature_layout {

// From the top: 5 bits op, 5 dtype, 4 reduction, 14 root, 36 amount.
inline constexpr int kRootBits = 14;
inline constexpr int kRoot = 36;
inline constexpr int kReduce = kRoot + kRootBits;
inline constexpr int kDType = kReduce + 4;
inline constexpr int kOp = kDType + 5;
inline constexpr size_t kOps = 32;

constexpr uint64_t ones(int bits) { return (uint64_t{1} << bits) - 1; }

inline constexpr std::array<uint64_t, kOps> kMasks = [] {
    std::array<uint64_t, kOps> masks{};
    for (size_t op = 0; op < kOps; ++op) {
        const uint8_t agree = agreement(static_cast<Op>(op));
        masks[op] = ones(5) << kOp;
        if ((agree & kAgreeBytes) != 0) masks[op] |= ones(kRoot);
        if ((agree & kAgreeRoot) != 0) masks[op] |= ones(kRootBits) << kRoot;
        if ((agree & kAgreeReduce) != 0) masks[op] |= ones(4) << kReduce;
        if ((agree & kAgreeDType) != 0) masks[op] |= ones(5) << kDType;
    }
    return masks;
}();

}  // namespace signature_layout

// A call in one word, without what may differ between ranks. `amount` is in any unit that all ranks use: bytes or
// elements. Amounts that differ by a multiple of 2^36, and roots that differ by a multiple of 2^14, look the same.
constexpr uint64_t signature(Op op, int64_t amount, DType dtype, Reduce reduce, int root) {
    using namespace signature_layout;
    const uint64_t code = static_cast<uint64_t>(op) & ones(5);
    const uint64_t packed = (code << kOp) | ((static_cast<uint64_t>(dtype) & ones(5)) << kDType) |
                            ((static_cast<uint64_t>(reduce) & ones(4)) << kReduce) |
                            ((static_cast<uint64_t>(root + 1) & ones(kRootBits)) << kRoot) |
                            (static_cast<uint64_t>(amount) & ones(kRoot));
    return packed & kMasks[code];
}

}  // namespace ringway
