// The codes of ops, reductions and dtypes. src/ringway/call.py has the same codes, and a test compares the two.
#pragma once

#include <cstdint>

namespace ringway {

enum class Op : uint8_t {
    Broadcast = 0,
    AllReduce = 1,
    Reduce = 2,
    AllGather = 3,
    AllGatherSingle = 4,
    Gather = 5,
    Scatter = 6,
    ReduceScatter = 7,
    ReduceScatterSingle = 8,
    AllToAll = 9,
    AllToAllSingle = 10,
    Barrier = 11,
    Send = 12,
    Recv = 13,
    AllReduceCoalesced = 14,
    AllGatherCoalesced = 15,
    ReduceScatterCoalesced = 16,
};

inline bool is_point_to_point(Op op) { return op == Op::Send || op == Op::Recv; }

enum class Reduce : uint8_t {
    Sum = 0,
    Avg = 1,
    Product = 2,
    Min = 3,
    Max = 4,
    Band = 5,
    Bor = 6,
    Bxor = 7,
    PremulSum = 8,
};

enum class DType : uint8_t {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 3,
    I8 = 4,
    U8 = 5,
    I16 = 6,
    I32 = 7,
    I64 = 8,
    Bool = 9,
    C64 = 10,
    C128 = 11,
    U16 = 12,
    U32 = 13,
    U64 = 14,
    F8E4M3FN = 15,
    F8E5M2 = 16,
    C32 = 17,
    F8E4M3FNUZ = 18,
    F8E5M2FNUZ = 19,
    F8E8M0FNU = 20,
    Unknown = 255,
};

}  // namespace ringway
