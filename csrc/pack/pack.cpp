#include "pack/pack.h"

#include "vectors.h"

namespace ringway::pack {

const Steps& steps() {
#if defined(__x86_64__)
    static const bool wide = Vectors().avx2;
    if (wide) return avx2::steps;
#endif
    return base::steps;
}

}  // namespace ringway::pack
