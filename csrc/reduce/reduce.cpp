#include "reduce/reduce.h"

namespace ringway::shm {
namespace {

enum class Isa { Plain, Avx2, Avx512 };

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return Isa::Plain;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? Isa::Avx512 : Isa::Avx2;
#else
    return Isa::Plain;
#endif
}

Isa isa() {
    static const Isa found = detect();
    return found;
}

}  // namespace

Reducer find_reducer(DType dtype, Reduce reduce) {
#if defined(__x86_64__)
    if (isa() == Isa::Avx512) return avx512::find(dtype, reduce);
    if (isa() == Isa::Avx2) return avx2::find(dtype, reduce);
#endif
    return plain::find(dtype, reduce);
}

const char* reducer_isa() {
    if (isa() == Isa::Avx512) return "avx512";
    if (isa() == Isa::Avx2) return "avx2";
#if defined(__aarch64__)
    return "neon";
#else
    return "plain";
#endif
}

}  // namespace ringway::shm
