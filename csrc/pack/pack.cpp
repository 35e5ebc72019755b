#include "pack/pack.h"

namespace ringway::pack {

const Steps& steps() {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2");
    if (wide) return avx2::steps;
#endif
    return base::steps;
}

}  // namespace ringway::pack
