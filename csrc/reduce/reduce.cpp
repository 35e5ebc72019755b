#include "reduce/reduce.h"

namespace ringway::shm {
namespace {

struct Isa {
    const char* name;
    Reducer (*find)(DType, Reduce);
};

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (__builtin_cpu_supports("avx2")) return wide ? Isa{"avx512", avx512::find} : Isa{"avx2", avx2::find};
#elif defined(__aarch64__)
    return {"neon", plain::find};
#endif
    return {"plain", plain::find};
}

const Isa isa = detect();

}  // namespace

Reducer find_reducer(DType dtype, Reduce reduce) { return isa.find(dtype, reduce); }

const char* reducer_isa() { return isa.name; }

}  // namespace ringway::shm
