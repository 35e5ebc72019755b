// The kernels for x86 processors with AVX2; compiled with -mavx2, called only where it exists.
#if defined(__x86_64__)
#define PACK_INSTRUCTIONS "avx2"
#define PACK_NAMESPACE avx2
#include "pack/steps.h"
#endif
