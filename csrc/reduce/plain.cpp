#define RINGWAY_ISA plain
#include "reduce/kernels.h"
