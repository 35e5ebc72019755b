#include "reduce/reduce.h"

#include "vectors.h"

namespace ringway::shm {
namespace {

struct Isa {
    const char* name;
    Reducer (*find)(DType, Reduce);
};

Isa detect() {
#if defined(__x86_64__)
    const Vectors has;
    if (has.avx2) return has.avx512 ? Isa{"avx512", avx512::find} : Isa{"avx2", avx2::find};
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
