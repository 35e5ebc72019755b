// Reduction of the same elements of several ranks, in rank order.
//
// result[i] = f(f(f(source 0[i], source 1[i]), source 2[i]), ...), the same bits whichever rank computes it. Half types
// are widened to float, accumulated over all sources, and rounded once. Integers wrap as in C; AVG adds in 64 bits and
// divides toward zero. bool: SUM, MAX and BOR are `or`; PRODUCT, MIN and BAND are `and`. MIN and MAX propagate NaN.
#pragma once

#include <cstdint>
#include <iterator>

#include "codes.h"

namespace ringway::shm {

struct Reduction {
    const void* const* sources;  // in rank order
    int count_sources;
    int64_t elements;
    const double* factors;  // PREMUL_SUM: one per source; otherwise null
    void* result;           // may be one of the sources
    void* copy;             // a second destination for the result, or null
};

using Reducer = void (*)(const Reduction&);

// The fastest kernel that this CPU can run; null if the dtype does not support the reduction.
Reducer find_reducer(DType dtype, Reduce reduce);

// Complex numbers reduce like twice as many reals.
inline int64_t reals_per_element(DType dtype) { return dtype == DType::C64 || dtype == DType::C128 ? 2 : 1; }

// By the dtype's code.
inline constexpr int8_t kElementBytes[] = {
    4, 8,  2, 2,        // F32, F64, F16, BF16
    1, 1,  2, 4, 8, 1,  // I8, U8, I16, I32, I64, Bool
    8, 16, 2, 4, 8,     // C64, C128, U16, U32, U64
    1, 1,  4, 1, 1, 1,  // F8E4M3FN, F8E5M2, C32, F8E4M3FNUZ, F8E5M2FNUZ, F8E8M0FNU
};
static_assert(std::size(kElementBytes) == static_cast<size_t>(DType::F8E8M0FNU) + 1);

inline int64_t element_bytes(DType dtype) {
    const auto code = static_cast<size_t>(dtype);
    return code < std::size(kElementBytes) ? kElementBytes[code] : 1;
}

// The instruction set that find_reducer picks: "avx512", "avx2", "neon" or "plain".
const char* reducer_isa();

// One table per instruction set; each is the same source compiled for it.
namespace plain {
Reducer find(DType dtype, Reduce reduce);
}
#if defined(__x86_64__)
namespace avx2 {
Reducer find(DType dtype, Reduce reduce);
}
namespace avx512 {
Reducer find(DType dtype, Reduce reduce);
}
#endif

}  // namespace ringway::shm
