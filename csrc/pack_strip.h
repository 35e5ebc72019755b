// Codecs on a strip: at most kStrip fp32 numbers that stay in the first-level cache.
//
// Plain loops that the compiler turns into vector code, and by hand only what it does not see: sums in
// several lanes, and signs to bits. Included once for each set of instructions (pack_steps.h), hence the
// anonymous namespace: nothing here may be merged across them by the linker.
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

#include "pack.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

constexpr int kStrip = 1024;

// Vectors as wide as the registers: what is wider, compilers take apart element by element.
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

// --- elements in memory -------------------------------------------------------------------------------

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
    const uint32_t exponent_shift = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;  // infinity and NaN stay so
    const float normal = float_of((magnitude << 13) + exponent_shift);
    const float unsigned_value = magnitude < 0x400u ? small : normal;
    return float_of(bits_of(unsigned_value) | static_cast<uint32_t>(value.bits & 0x8000u) << 16);
}
inline float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

inline void narrow(float value, float& out) { out = value; }
inline void narrow(float value, Float16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // in steps of 2^-24
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;  // NaN, or infinity
    const uint32_t finite = magnitude < 0x38800000u ? small : normal;
    out.bits = static_cast<uint16_t>((magnitude < 0x47800000u ? finite : huge) | (bits >> 16 & 0x8000u));
}
inline void narrow(float value, BFloat16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Pointers into different memory: without the promise a byte may alias anything, and no loop becomes vector code.
#define PACK_APART __restrict__

template <class Element>
void load_strip(const Element* PACK_APART from, int n, float* PACK_APART strip) {
    for (int i = 0; i < n; ++i) strip[i] = widen(from[i]);
}

template <class Element>
void store_strip(const float* PACK_APART strip, int n, Element* PACK_APART to) {
    for (int i = 0; i < n; ++i) narrow(strip[i], to[i]);
}

// --- statistics ---------------------------------------------------------------------------------------

// What is taken from the numbers on their way: a sum of magnitudes or of squares, or the largest magnitude. Several
// sets of lanes, so that one addition need not wait for the last.
constexpr int kSets = 4;

inline double sum_lanes(const Floats* sets) {
    double sum = 0;
    for (int set = 0; set < kSets; ++set)
        for (int i = 0; i < kLanes; ++i) sum += sets[set][i];
    return sum;
}

struct Nothing {
    void take(int, Floats) {}
    void take(float) {}
};

struct SumOfMagnitudes {
    Floats lanes[kSets] = {};
    double rest = 0;
    void take(int set, Floats value) { lanes[set] += magnitudes(value); }
    void take(float value) { rest += std::fabs(value); }
    double sum() const { return sum_lanes(lanes) + rest; }
};

struct SumOfSquares {
    Floats lanes[kSets] = {};
    double rest = 0;
    void take(int set, Floats value) { lanes[set] += value * value; }
    void take(float value) { rest += static_cast<double>(value) * value; }
    double sum() const { return sum_lanes(lanes) + rest; }
};

// As bits: magnitudes are in the order of their bits, and NaN and infinity are above every number.
struct Peak {
    Words lanes[kSets] = {};
    uint32_t rest = 0;
    void take(int set, Floats value) {
        const Words next = (Words)magnitudes(value);
        lanes[set] = next > lanes[set] ? next : lanes[set];
    }
    void take(float value) { rest = std::max(rest, bits_of(value) & 0x7fffffffu); }
    uint32_t bits() const {
        uint32_t highest = rest;
        for (int set = 0; set < kSets; ++set)
            for (int i = 0; i < kLanes; ++i) highest = std::max(highest, static_cast<uint32_t>(lanes[set][i]));
        return highest;
    }
};

// strip = values + more, and what is taken of it. `values` may be the strip; `more` is null where there is nothing.
template <class Taker>
void add_and_take(const float* values, const float* PACK_APART more, int n, float* strip, Taker& taker) {
    Taker local;
    int i = 0;
    for (; i + kSets * kLanes <= n; i += kSets * kLanes) {
        for (int set = 0; set < kSets; ++set) {
            Floats value = load(values + i + set * kLanes);
            if (more != nullptr) value += load(more + i + set * kLanes);
            store(value, strip + i + set * kLanes);
            local.take(set, value);
        }
    }
    for (; i < n; ++i) {
        strip[i] = more != nullptr ? values[i] + more[i] : values[i];
        local.take(strip[i]);
    }
    taker = local;
}

// --- codecs -------------------------------------------------------------------------------------------
// encode: the codes of a strip into the payload, and what they lose into `lost`.
// add: codes times the scale, added to a strip.

// Adding and taking away 1.5 * 2^23 rounds to an integer, ties to even, where |value| < 2^22.
constexpr float kRounder = 12582912.0f;

template <Kind>
struct Codec;

template <>
struct Codec<Kind::OneBit> {
    static constexpr bool kPeak = false;
    static int64_t payload_offset(int64_t element) { return element / 8; }

    static void encode(const float* PACK_APART strip, int n, float scale, float, uint8_t* PACK_APART payload,
                       float* PACK_APART lost) {
        int i = 0;
#if defined(__ARM_NEON)
        const uint8x16_t weights = {128, 64, 32, 16, 8, 4, 2, 1, 128, 64, 32, 16, 8, 4, 2, 1};
        const float32x4_t up = vdupq_n_f32(scale), down = vdupq_n_f32(-scale);
        const auto four = [&](int at) {
            const float32x4_t value = vld1q_f32(strip + at);
            const uint32x4_t at_least_zero = vcgezq_f32(value);
            vst1q_f32(lost + at, vsubq_f32(value, vbslq_f32(at_least_zero, up, down)));
            return vreinterpretq_u16_u32(at_least_zero);
        };
        const auto sixteen = [&](int at) {
            const uint16x8_t low = vuzp1q_u16(four(at), four(at + 4));
            const uint16x8_t high = vuzp1q_u16(four(at + 8), four(at + 12));
            return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), weights);
        };
        for (; i + 32 <= n; i += 32) {
            const uint8x16_t pairs = vpaddq_u8(sixteen(i), sixteen(i + 16));
            const uint8x16_t fours = vpaddq_u8(pairs, pairs);
            const uint32_t bytes = vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(fours, fours)), 0);
            std::memcpy(payload + i / 8, &bytes, sizeof bytes);
        }
#elif defined(__AVX2__)
        // movemask makes the first lane the lowest bit; turning the lanes around first makes it the highest.
        const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        const __m256 up = _mm256_set1_ps(scale), down = _mm256_set1_ps(-scale);
        for (; i + 8 <= n; i += 8) {
            const __m256 value = _mm256_loadu_ps(strip + i);
            const __m256 at_least_zero = _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_GE_OQ);
            _mm256_storeu_ps(lost + i, _mm256_sub_ps(value, _mm256_blendv_ps(down, up, at_least_zero)));
            payload[i / 8] =
                static_cast<uint8_t>(_mm256_movemask_ps(_mm256_permutevar8x32_ps(at_least_zero, backwards)));
        }
#endif
        for (; i < n; i += 8) {
            unsigned byte = 0;
            for (int j = i; j < n && j < i + 8; ++j) {
                const bool at_least_zero = strip[j] >= 0;
                byte |= (at_least_zero ? 128u : 0u) >> (j - i);
                lost[j] = strip[j] - (at_least_zero ? scale : -scale);
            }
            payload[i / 8] = static_cast<uint8_t>(byte);
        }
    }

    static void add(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        const Words magnitude = Words{} + bits_of(scale);
        Words places;
        for (int lane = 0; lane < kLanes; ++lane) places[lane] = 24u + static_cast<uint32_t>(lane);
        const int whole = n / 8;
        for (int byte = 0; byte < whole; ++byte) {
            const Words below_zero = Words{} + ~static_cast<uint32_t>(payload[byte]);
            for (int half = 0; half < 8; half += kLanes) {
                float* to = strip + byte * 8 + half;
                const Words sign = (below_zero << (places + static_cast<uint32_t>(half))) & 0x80000000u;
                store(load(to) + (Floats)(magnitude ^ sign), to);
            }
        }
        for (int i = whole * 8; i < n; ++i)
            strip[i] += (payload[whole] << (i - whole * 8)) & 128 ? scale : -scale;
    }
};

// The nearest integer of a value in units of the scale. The scale comes from the largest magnitude, so no value
// lies beyond the limit by more than a rounding error; integers are clamped all the same, as that costs nothing.
inline int32_t rounded(float value, int32_t limit) {
    const int32_t code = static_cast<int32_t>((value + kRounder) - kRounder);
    return std::min(std::max(code, -limit), limit);
}

template <>
struct Codec<Kind::Int8> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 127.0f;
    static int64_t payload_offset(int64_t element) { return element; }

    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost) {
        int32_t codes[kStrip];
        for (int i = 0; i < n; ++i) {
            codes[i] = rounded(strip[i] * inverse, 127);
            lost[i] = strip[i] - static_cast<float>(codes[i]) * scale;
        }
        for (int i = 0; i < n; ++i) payload[i] = static_cast<uint8_t>(codes[i]);
    }

    static void add(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        for (int i = 0; i < n; ++i) strip[i] += static_cast<float>(static_cast<int8_t>(payload[i])) * scale;
    }
};

template <>
struct Codec<Kind::Int4> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 7.0f;
    static int64_t payload_offset(int64_t element) { return element / 2; }

    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost) {
        uint32_t codes[kStrip + 1];
        for (int i = 0; i < n; ++i) {
            const int32_t code = rounded(strip[i] * inverse, 7);
            codes[i] = static_cast<uint32_t>(code + 8);
            lost[i] = strip[i] - static_cast<float>(code) * scale;
        }
        codes[n] = 0;  // the padding of an odd length
        for (int i = 0; i < (n + 1) / 2; ++i) payload[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
    }

    static void add(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        for (int i = 0; i < n / 2; ++i) {
            strip[2 * i] += static_cast<float>(static_cast<int32_t>(payload[i] >> 4) - 8) * scale;
            strip[2 * i + 1] += static_cast<float>(static_cast<int32_t>(payload[i] & 15) - 8) * scale;
        }
        if (n % 2) strip[n - 1] += static_cast<float>(static_cast<int32_t>(payload[n / 2] >> 4) - 8) * scale;
    }
};

template <>
struct Codec<Kind::Fp8> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 448.0f;
    static int64_t payload_offset(int64_t element) { return element; }

    // e4m3 has 3 mantissa bits, a bias of 7, and steps of 2^-9 below 2^-6. Adding 2^14 rounds to those steps.
    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost) {
        uint32_t codes[kStrip];
        for (int i = 0; i < n; ++i) {
            const uint32_t bits = bits_of(strip[i] * inverse);
            const uint32_t magnitude = std::min(bits & 0x7fffffffu, 0x43e00000u);  // 448
            const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
            const float small = float_of(magnitude) + 16384.0f;
            const bool is_small = magnitude < 0x3c800000u;  // 2^-6
            const uint32_t code = is_small ? bits_of(small) - 0x46800000u : (rounded >> 20) - (120u << 3);
            const float kept = is_small ? small - 16384.0f : float_of(rounded);
            codes[i] = code | (bits >> 31) << 7;
            lost[i] = strip[i] - float_of(bits_of(kept) | (bits & 0x80000000u)) * scale;
        }
        for (int i = 0; i < n; ++i) payload[i] = static_cast<uint8_t>(codes[i]);
    }

    static void add(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        for (int i = 0; i < n; ++i) {
            const uint32_t code = payload[i] & 127u;
            const float normal = float_of((code << 20) + (120u << 23));
            const float small = static_cast<float>(static_cast<int32_t>(code)) * 0x1p-9f;
            const float magnitude = code < 8 ? small : normal;
            strip[i] += float_of(bits_of(magnitude) | (payload[i] & 128u) << 24) * scale;
        }
    }
};

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
