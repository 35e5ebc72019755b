// Reduction of the same elements of several ranks, in rank order.
//
// result[i] = f(f(f(source 0[i], source 1[i]), source 2[i]), ...), the same bits whichever rank computes it. Half types
// are widened to float, accumulated over all sources, and rounded once. Integers wrap as in C; AVG adds in 64 bits and
// divides toward zero. bool: SUM, MAX and BOR are `or`; PRODUCT, MIN and BAND are `and`. MIN and MAX propagate NaN.
#pragma once

#include <cstdint>

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

inline int64_t element_bytes(DType dtype) {
    switch (dtype) {
        case DType::F64:
        case DType::I64:
        case DType::U64:
        case DType::C64:
            return 8;
        case DType::C128:
            return 16;
        case DType::F32:
        case DType::I32:
        case DType::U32:
        case DType::C32:
            return 4;
        case DType::F16:
        case DType::BF16:
        case DType::I16:
        case DType::U16:
            return 2;
        default:
            return 1;
    }
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
