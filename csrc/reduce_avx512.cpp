#define RINGWAY_ISA avx512
#include "reduce_kernels.h"
