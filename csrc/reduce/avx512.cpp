#define RINGWAY_ISA avx512
#include "reduce/kernels.h"
