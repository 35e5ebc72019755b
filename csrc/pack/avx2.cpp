// The kernels for x86 processors with AVX2, compiled with -mavx2 and called only where it is available.
#if defined(__x86_64__)
#define PACK_INSTRUCTIONS "avx2"
#define PACK_NAMESPACE avx2
#include "pack/steps.h"
#endif
