// Fused compression kernels for the CPU: one pass over memory per step of a compressed collective.
//
// A frame is a 16-byte header (its first int32 is the status), the codec's scales (fp32), its payload.
// src/ringway/compress/windows.py and the codecs' own files describe the bytes. The reference in plain torch defines
// them, and tests compare the two.
#pragma once

#include <cstdint>

#include "codes.h"

namespace ringway::pack {

enum class Kind : int { OneBit = 0, Int8 = 1, Int4 = 2, Fp8 = 3, TopK = 4 };

constexpr int64_t kHeaderBytes = 16;

// Describes the codec. block == 0 means one scale for the whole tensor, given by the caller. For TopK, block is the
// number of elements kept of each chunk, and bits the length of a kept element's code.
struct Format {
    Kind kind;
    int64_t block;
    int bits = 0;
};

// Flat memory of a floating-point dtype; data == nullptr if there is none.
struct Array {
    void* data;
    DType dtype;
};

// Columns [start, stop) of every shard of a tensor of numel elements.
struct Window {
    int64_t numel;
    int64_t shard;
    int64_t start;
    int64_t stop;
};

// Consecutive frames, each `stride` bytes long.
struct Frames {
    uint8_t* data;
    int64_t stride;
    int64_t rows;
};

// The steps, as described by ringway.compress.kernels.base.Kernels. `measure*` return the root of the sum of squares
// (OneBit) or the largest magnitude (the others), and NaN if a value is not finite.
struct Steps {
    double (*measure)(Format, Array values, Array residual, int64_t numel, int threads);
    void (*encode)(Format, Array values, Array residual, Window, Frames, float scale, int threads);
    double (*measure_mean)(Format, Frames, Array residual, int64_t count, int threads);
    void (*encode_mean)(Format, Frames, Array residual, int64_t count, uint8_t* frame, float scale, int threads);
    void (*decode)(Format, Frames, Window, Array values, int threads);
    void (*decode_mean)(Format, Frames, int64_t count, Array values, int threads);
    const char* instructions;
};

// The widest instruction set that this processor supports.
const Steps& steps();

namespace base {
extern const Steps steps;
}
namespace avx2 {
extern const Steps steps;
}

}  // namespace ringway::pack
