#define RINGWAY_ISA plain
#include "reduce_kernels.h"
