#define RINGWAY_ISA avx2
#include "reduce/kernels.h"
