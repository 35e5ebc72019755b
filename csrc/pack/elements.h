// Numbers in memory and in registers: vectors, and the dtypes of values and residuals.
//
// Included once per instruction set (steps.h). The anonymous namespace keeps the linker from merging code of different
// instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "pack/pack.h"

// Pointers to separate memory. Without this promise a byte may alias anything, and no loop is vectorized.
#define PACK_APART __restrict__

namespace ringway::pack::PACK_NAMESPACE {
namespace {

constexpr int kStrip = 1024;  // fp32 numbers that stay in the L1 cache

// Vectors as wide as the registers. Compilers split wider ones into single elements.
#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline Floats load(const float* from) {
    Floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline void store(Floats value, float* to) { std::memcpy(to, &value, sizeof value); }

inline Floats magnitudes(Floats value) {
#if defined(__ARM_NEON)
    return (Floats)vabsq_f32((float32x4_t)value);
#else
    return (Floats)((Words)value & 0x7fffffffu);
#endif
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

constexpr uint32_t kInfinity = 0x7f800000u;

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(Float16 value) {
    const uint32_t magnitude = value.bits & 0x7fffu;
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t exponent_shift = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;  // keeps infinity and NaN
    const float normal = float_of((magnitude << 13) + exponent_shift);
    const float unsigned_value = magnitude < 0x400u ? small : normal;
    return float_of(bits_of(unsigned_value) | static_cast<uint32_t>(value.bits & 0x8000u) << 16);
}
inline float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

// Numbers beyond the range of the narrow type become its largest one: a residual can push a mean of finite values there.
inline void narrow(float value, float& out) { out = value; }
inline void narrow(float value, Float16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // in steps of 2^-24
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t finite = magnitude < 0x38800000u ? small : magnitude < 0x477fe000u ? normal : 0x7bffu;
    out.bits = static_cast<uint16_t>((magnitude > 0x7f800000u ? 0x7e00u : finite) | (bits >> 16 & 0x8000u));
}
inline void narrow(float value, BFloat16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;  // to nearest, ties to even
    const uint32_t finite = std::min(rounded, 0x7f7fu);
    out.bits = static_cast<uint16_t>((magnitude > 0x7f800000u ? 0x7fc0u : finite) | (bits >> 16 & 0x8000u));
}

#if defined(__ARM_NEON)
// Eight at a time; the plain forms above handle the remainder.
inline float32x4x2_t widen_eight(const Float16* from) {
    const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(&from->bits));
    return {vcvt_f32_f16(vget_low_f16(eight)), vcvt_high_f32_f16(eight)};
}
inline float32x4x2_t widen_eight(const BFloat16* from) {
    const uint16x8_t eight = vld1q_u16(&from->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(eight), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(eight, 16))};
}
inline float32x4_t within(float32x4_t value, float limit) {  // keeps NaN
    return vmaxq_f32(vminq_f32(value, vdupq_n_f32(limit)), vdupq_n_f32(-limit));
}
inline void narrow_eight(float32x4_t low, float32x4_t high, Float16* to) {
    const float16x4_t first = vcvt_f16_f32(within(low, 65504.0f));
    vst1q_u16(&to->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(first, within(high, 65504.0f))));
}
inline uint32x4_t rounded_to_bfloat16(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(within(value, 0x1.fep127f));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vbslq_u32(vceqq_f32(value, value), rounded, vdupq_n_u32(0x7fc00000));
}
inline void narrow_eight(float32x4_t low, float32x4_t high, BFloat16* to) {
    const uint16x4_t first = vshrn_n_u32(rounded_to_bfloat16(low), 16);
    vst1q_u16(&to->bits, vshrn_high_n_u32(first, rounded_to_bfloat16(high), 16));
}

template <class Element>
int load_eights(const Element* PACK_APART from, int n, float* PACK_APART strip) {
    int i = 0;
    for (; i + 8 <= n; i += 8) vst1q_f32_x2(strip + i, widen_eight(from + i));
    return i;
}
template <class Element>
int store_eights(const float* PACK_APART strip, int n, Element* PACK_APART to) {
    int i = 0;
    for (; i + 8 <= n; i += 8) narrow_eight(vld1q_f32(strip + i), vld1q_f32(strip + i + 4), to + i);
    return i;
}
#else
template <class Element>
int load_eights(const Element*, int, float*) {
    return 0;
}
template <class Element>
int store_eights(const float*, int, Element*) {
    return 0;
}
#endif

template <class Element>
void load_strip(const Element* PACK_APART from, int n, float* PACK_APART strip) {
    for (int i = load_eights(from, n, strip); i < n; ++i) strip[i] = widen(from[i]);
}
inline void load_strip(const float* PACK_APART from, int n, float* PACK_APART strip) {
    std::memcpy(strip, from, sizeof(float) * static_cast<size_t>(n));
}

template <class Element>
void store_strip(const float* PACK_APART strip, int n, Element* PACK_APART to) {
    for (int i = store_eights(strip, n, to); i < n; ++i) narrow(strip[i], to[i]);
}
inline void store_strip(const float* PACK_APART strip, int n, float* PACK_APART to) {
    std::memcpy(to, strip, sizeof(float) * static_cast<size_t>(n));
}

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
