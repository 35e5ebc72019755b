// The kernels for every processor of this architecture: NEON on ARM, SSE2 on x86.
#if defined(__ARM_NEON)
#define PACK_INSTRUCTIONS "neon"
#else
#define PACK_INSTRUCTIONS "baseline"
#endif
#define PACK_NAMESPACE base
#include "pack/steps.h"
