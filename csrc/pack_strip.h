// Codecs on a strip: at most kStrip fp32 numbers that stay in the first-level cache.
//
// Plain loops that the compiler turns into vector code, and by hand only what it does not see: sums in
// several lanes, and signs to bits. Included once for each set of instructions (pack_steps.h), hence the
// anonymous namespace: nothing here may be merged across them by the linker.
#pragma once

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

typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

inline f32x8 load8(const float* from) {
    f32x8 out;
    std::memcpy(&out, from, sizeof out);
    return out;
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

template <class Element>
void load_strip(const Element* from, int n, float* strip) {
    for (int i = 0; i < n; ++i) strip[i] = widen(from[i]);
}

template <class Element>
void add_strip(const Element* from, int n, float* strip) {
    for (int i = 0; i < n; ++i) strip[i] += widen(from[i]);
}

template <class Element>
void load_sum_strip(const Element* from, const float* more, int n, float* strip) {
    for (int i = 0; i < n; ++i) strip[i] = widen(from[i]) + more[i];
}

template <class Element>
void store_strip(const float* strip, int n, Element* to) {
    for (int i = 0; i < n; ++i) narrow(strip[i], to[i]);
}

// --- statistics ---------------------------------------------------------------------------------------

inline double sum_lanes(f32x8 lanes) {
    double sum = 0;
    for (int i = 0; i < 8; ++i) sum += lanes[i];
    return sum;
}

inline double sum_of_magnitudes(const float* strip, int n) {
    f32x8 first{}, second{};
    const u32x8 magnitude = u32x8{} + 0x7fffffffu;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        first += (f32x8)((u32x8)load8(strip + i) & magnitude);
        second += (f32x8)((u32x8)load8(strip + i + 8) & magnitude);
    }
    double sum = sum_lanes(first) + sum_lanes(second);
    for (; i < n; ++i) sum += std::fabs(strip[i]);
    return sum;
}

inline double sum_of_squares(const float* strip, int n) {
    f32x8 first{}, second{};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const f32x8 a = load8(strip + i), b = load8(strip + i + 8);
        first += a * a;
        second += b * b;
    }
    double sum = sum_lanes(first) + sum_lanes(second);
    for (; i < n; ++i) sum += static_cast<double>(strip[i]) * strip[i];
    return sum;
}

// As bits: magnitudes are in the order of their bits, and NaN and infinity are above every number.
inline uint32_t peak_bits(const float* strip, int n) {
    u32x8 peak{};
    const u32x8 magnitude = u32x8{} + 0x7fffffffu;
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const u32x8 next = (u32x8)load8(strip + i) & magnitude;
        peak = next > peak ? next : peak;
    }
    uint32_t highest = 0;
    for (int lane = 0; lane < 8; ++lane) highest = peak[lane] > highest ? peak[lane] : highest;
    for (; i < n; ++i) {
        const uint32_t next = bits_of(strip[i]) & 0x7fffffffu;
        highest = next > highest ? next : highest;
    }
    return highest;
}

// --- codecs -------------------------------------------------------------------------------------------
// encode: the codes of a strip into the payload, and what they lose into the strip.
// add: codes times the scale, added to a strip.

// Adding and taking away 1.5 * 2^23 rounds to an integer, ties to even, where |value| < 2^22.
constexpr float kRounder = 12582912.0f;

template <Kind>
struct Codec;

template <>
struct Codec<Kind::OneBit> {
    static constexpr bool kPeak = false;
    static int64_t payload_offset(int64_t element) { return element / 8; }

    static void encode(float* strip, int n, float scale, float, uint8_t* payload) {
        const int whole = n / 8;
        signs(strip, whole, payload);
        if (n % 8) {
            unsigned byte = 0;
            for (int i = whole * 8; i < n; ++i) byte |= (strip[i] >= 0 ? 128u : 0u) >> (i - whole * 8);
            payload[whole] = static_cast<uint8_t>(byte);
        }
        for (int i = 0; i < n; ++i) strip[i] -= strip[i] >= 0 ? scale : -scale;
    }

    static void add(const uint8_t* payload, int n, float scale, float* strip) {
        const int whole = n / 8;
        const u32x8 places = {24, 25, 26, 27, 28, 29, 30, 31};
        const u32x8 magnitude = u32x8{} + bits_of(scale);
        for (int byte = 0; byte < whole; ++byte) {
            const uint32_t below_zero = ~static_cast<uint32_t>(payload[byte]);
            const u32x8 sign = ((u32x8{} + below_zero) << places) & 0x80000000u;
            const f32x8 sum = load8(strip + byte * 8) + (f32x8)(magnitude ^ sign);
            std::memcpy(strip + byte * 8, &sum, sizeof sum);
        }
        for (int i = whole * 8; i < n; ++i)
            strip[i] += (payload[whole] << (i - whole * 8)) & 128 ? scale : -scale;
    }

   private:
    static void signs(const float* strip, int bytes, uint8_t* payload) {
        int byte = 0;
#if defined(__ARM_NEON)
        const uint8x16_t weights = {128, 64, 32, 16, 8, 4, 2, 1, 128, 64, 32, 16, 8, 4, 2, 1};
        const auto sixteen = [&](const float* from) {
            const uint16x8_t low = vcombine_u16(vmovn_u32(vcgezq_f32(vld1q_f32(from))),
                                                vmovn_u32(vcgezq_f32(vld1q_f32(from + 4))));
            const uint16x8_t high = vcombine_u16(vmovn_u32(vcgezq_f32(vld1q_f32(from + 8))),
                                                 vmovn_u32(vcgezq_f32(vld1q_f32(from + 12))));
            return vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), weights);
        };
        for (; byte + 8 <= bytes; byte += 8) {
            const float* from = strip + byte * 8;
            const uint8x16_t left = vpaddq_u8(sixteen(from), sixteen(from + 16));
            const uint8x16_t right = vpaddq_u8(sixteen(from + 32), sixteen(from + 48));
            const uint8x16_t both = vpaddq_u8(left, right);
            vst1_u8(payload + byte, vget_low_u8(vpaddq_u8(both, both)));
        }
#elif defined(__AVX2__)
        // movemask makes the first lane the lowest bit; turning the lanes around first makes it the highest.
        const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        for (; byte < bytes; ++byte) {
            const __m256 at_least_zero =
                _mm256_cmp_ps(_mm256_loadu_ps(strip + byte * 8), _mm256_setzero_ps(), _CMP_GE_OQ);
            payload[byte] =
                static_cast<uint8_t>(_mm256_movemask_ps(_mm256_permutevar8x32_ps(at_least_zero, backwards)));
        }
#endif
        for (; byte < bytes; ++byte) {
            unsigned packed = 0;
            for (int i = 0; i < 8; ++i) packed |= (strip[byte * 8 + i] >= 0 ? 128u : 0u) >> i;
            payload[byte] = static_cast<uint8_t>(packed);
        }
    }
};

inline float clamped(float value, float limit) {
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

template <>
struct Codec<Kind::Int8> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 127.0f;
    static int64_t payload_offset(int64_t element) { return element; }

    static void encode(float* strip, int n, float scale, float inverse, uint8_t* payload) {
        for (int i = 0; i < n; ++i) {
            const float code = (clamped(strip[i] * inverse, kLargest) + kRounder) - kRounder;
            payload[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
            strip[i] -= code * scale;
        }
    }

    static void add(const uint8_t* payload, int n, float scale, float* strip) {
        for (int i = 0; i < n; ++i) strip[i] += static_cast<float>(static_cast<int8_t>(payload[i])) * scale;
    }
};

template <>
struct Codec<Kind::Int4> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 7.0f;
    static int64_t payload_offset(int64_t element) { return element / 2; }

    static void encode(float* strip, int n, float scale, float inverse, uint8_t* payload) {
        uint8_t halves[kStrip + 1];
        for (int i = 0; i < n; ++i) {
            const float code = (clamped(strip[i] * inverse, kLargest) + kRounder) - kRounder;
            halves[i] = static_cast<uint8_t>(static_cast<int32_t>(code) + 8);
            strip[i] -= code * scale;
        }
        halves[n] = 0;  // the padding of an odd length
        for (int i = 0; i < (n + 1) / 2; ++i)
            payload[i] = static_cast<uint8_t>(halves[2 * i] << 4 | halves[2 * i + 1]);
    }

    static void add(const uint8_t* payload, int n, float scale, float* strip) {
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
    static void encode(float* strip, int n, float scale, float inverse, uint8_t* payload) {
        for (int i = 0; i < n; ++i) {
            const float value = clamped(strip[i] * inverse, kLargest);
            const uint32_t bits = bits_of(value);
            const uint32_t magnitude = bits & 0x7fffffffu;
            const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
            const float small = float_of(magnitude) + 16384.0f;
            const bool is_small = magnitude < 0x3c800000u;  // 2^-6
            const uint32_t code = is_small ? bits_of(small) - 0x46800000u : (rounded >> 20) - (120u << 3);
            const float kept = is_small ? small - 16384.0f : float_of(rounded);
            payload[i] = static_cast<uint8_t>(code | (bits >> 31) << 7);
            strip[i] -= float_of(bits_of(kept) | (bits & 0x80000000u)) * scale;
        }
    }

    static void add(const uint8_t* payload, int n, float scale, float* strip) {
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
