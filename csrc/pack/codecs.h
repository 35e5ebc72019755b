// Codecs for a strip: at most kStrip fp32 numbers, which stay in the L1 cache.
//
// encode: writes the codes of a strip to the payload, and the encoding error to `lost`. Encoding touches no new memory,
//   so without prefetching the bus would be idle: `ahead.fetch(i, n)` prefetches what comes next.
// decode: codes times the scale, written to a strip or (Add) added to it.
//
// NEON code is written by hand. Elsewhere, plain loops that the compiler vectorizes, and handwritten code only where it
// does not. The plain loops also handle the remainder at the end of a strip.
#pragma once

#include "pack/elements.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

template <bool Add>
inline void put(float value, float& to) {
    to = Add ? to + value : value;
}

template <bool Add>
inline void put(Floats value, float* to) {
    store(Add ? load(to) + value : value, to);
}

// Adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even, if |value| < 2^22.
constexpr float kRounder = 12582912.0f;

#if defined(__ARM_NEON)
// For each group of four elements, the bit of each lane in a word of four sign bytes.
struct SignPlaces {
    uint32x4_t of[8];
    SignPlaces() {
        for (int four = 0; four < 8; ++four) {
            uint32_t places[4];
            for (int lane = 0; lane < 4; ++lane) places[lane] = 1u << (8 * (four / 2) + 7 - 4 * (four % 2) - lane);
            of[four] = vld1q_u32(places);
        }
    }
};

// Conversions between integers and floating point are slow, additions are not: 2^23 + n has n in its lowest bits.
constexpr float kInteger = 8388608.0f;

// Sixteen byte codes, minus `offset`, times the scale.
template <bool Add>
inline void put_sixteen(uint8x16_t codes, float offset, float scale, float* to) {
    const uint8x16_t zero = vdupq_n_u8(0);
    const uint16x8_t exponent = vdupq_n_u16(0x4b00);  // the upper half of kInteger
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(codes, zero));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip2q_u8(codes, zero));
    const uint16x8_t fours[4] = {vzip1q_u16(low, exponent), vzip2q_u16(low, exponent), vzip1q_u16(high, exponent),
                                 vzip2q_u16(high, exponent)};
    for (int four = 0; four < 4; ++four) {
        const float32x4_t code = vsubq_f32(vreinterpretq_f32_u16(fours[four]), vdupq_n_f32(kInteger + offset));
        put<Add>((Floats)vmulq_n_f32(code, scale), to + 4 * four);
    }
}

// Rounds sixteen values in units of the scale to integers, ties to even, as bytes; also computes the rounding error.
inline uint8x16_t rounded_sixteen(const float* from, float scale, float inverse, float* lost) {
    uint16x8_t fours[4];
    for (int four = 0; four < 4; ++four) {
        const float32x4_t value = vld1q_f32(from + 4 * four), rounder = vdupq_n_f32(kRounder);
        const float32x4_t sum = vaddq_f32(vmulq_n_f32(value, inverse), rounder);
        vst1q_f32(lost + 4 * four, vsubq_f32(value, vmulq_n_f32(vsubq_f32(sum, rounder), scale)));
        fours[four] = vreinterpretq_u16_f32(sum);
    }
    const uint8x16_t low = vreinterpretq_u8_u16(vuzp1q_u16(fours[0], fours[1]));
    return vuzp1q_u8(low, vreinterpretq_u8_u16(vuzp1q_u16(fours[2], fours[3])));
}
#endif

template <Kind>
struct Codec;

template <>
struct Codec<Kind::OneBit> {
    static constexpr bool kPeak = false;
    static int64_t payload_offset(int64_t element) { return element / 8; }

    template <class Ahead>
    static void encode(const float* PACK_APART strip, int n, float scale, float, uint8_t* PACK_APART payload,
                       float* PACK_APART lost, [[maybe_unused]] const Ahead& ahead) {
        int i = 0;
#if defined(__ARM_NEON)
        const uint8x16_t weights = {128, 64, 32, 16, 8, 4, 2, 1, 128, 64, 32, 16, 8, 4, 2, 1};
        const float32x4_t up = vdupq_n_f32(scale), down = vdupq_n_f32(-scale);
        const auto four = [&](int at) {
            const float32x4_t value = vld1q_f32(strip + at);
            const float32x4_t kept = vbslq_f32(vcgezq_f32(value), up, down);
            vst1q_f32(lost + at, vsubq_f32(value, kept));
            return vreinterpretq_u16_f32(kept);
        };
        // Read the sign from the top bytes of the kept value: up and down always carry it, and -0.0 counts as positive.
        const auto sixteen = [&](int at) {
            const uint16x8_t low = vuzp2q_u16(four(at), four(at + 4));
            const uint16x8_t high = vuzp2q_u16(four(at + 8), four(at + 12));
            const uint8x16_t upper = vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
            return vandq_u8(vcgezq_s8(vreinterpretq_s8_u8(upper)), weights);
        };
        for (; i + 64 <= n; i += 64) {
            ahead.fetch(i, 64);
            const uint8x16_t first = vpaddq_u8(sixteen(i), sixteen(i + 16));
            const uint8x16_t second = vpaddq_u8(sixteen(i + 32), sixteen(i + 48));
            const uint8x16_t fours = vpaddq_u8(first, second);
            vst1_u8(payload + i / 8, vget_low_u8(vpaddq_u8(fours, fours)));
        }
#elif defined(__AVX2__)
        // movemask makes the first lane the lowest bit; reversing the lanes first makes it the highest.
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

    template <bool Add>
    static void decode(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        int byte = 0;
#if defined(__ARM_NEON)
        const SignPlaces places;
        const float32x4_t up = vdupq_n_f32(scale), down = vdupq_n_f32(-scale);
        for (; (byte + 4) * 8 <= n; byte += 4) {
            uint32_t word;
            std::memcpy(&word, payload + byte, sizeof word);
            const uint32x4_t signs = vdupq_n_u32(word);
            for (int four = 0; four < 8; ++four)
                put<Add>((Floats)vbslq_f32(vtstq_u32(signs, places.of[four]), up, down), strip + byte * 8 + 4 * four);
        }
#else
        const Words magnitude = Words{} + bits_of(scale);
        Words places;
        for (int lane = 0; lane < kLanes; ++lane) places[lane] = 24u + static_cast<uint32_t>(lane);
        for (; (byte + 1) * 8 <= n; ++byte) {
            const Words below_zero = Words{} + ~static_cast<uint32_t>(payload[byte]);
            for (int half = 0; half < 8; half += kLanes) {
                const Words sign = (below_zero << (places + static_cast<uint32_t>(half))) & 0x80000000u;
                put<Add>((Floats)(magnitude ^ sign), strip + byte * 8 + half);
            }
        }
#endif
        for (int i = byte * 8; i < n; ++i) put<Add>((payload[i / 8] << i % 8) & 128 ? scale : -scale, strip[i]);
    }
};

// Rounds a value in units of the scale to an integer. The scale comes from the largest magnitude, so no value exceeds
// the limit by enough to round to the next integer; integers are clamped where that costs nothing.
inline int32_t rounded(float value, int32_t limit) {
    const int32_t code = static_cast<int32_t>((value + kRounder) - kRounder);
    return std::min(std::max(code, -limit), limit);
}

template <>
struct Codec<Kind::Int8> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 127.0f;
    static int64_t payload_offset(int64_t element) { return element; }

    template <class Ahead>
    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost, [[maybe_unused]] const Ahead& ahead) {
        int begin = 0;
#if defined(__ARM_NEON)
        for (; begin + 16 <= n; begin += 16) {
            ahead.fetch(begin, 16);
            vst1q_u8(payload + begin, rounded_sixteen(strip + begin, scale, inverse, lost + begin));
        }
#endif
        int32_t codes[kStrip];
        for (int i = begin; i < n; ++i) {
            codes[i] = rounded(strip[i] * inverse, 127);
            lost[i] = strip[i] - static_cast<float>(codes[i]) * scale;
        }
        for (int i = begin; i < n; ++i) payload[i] = static_cast<uint8_t>(codes[i]);
    }

    template <bool Add>
    static void decode(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        int i = 0;
#if defined(__ARM_NEON)
        for (; i + 16 <= n; i += 16) {
            // Map -128..127 to 0..255, in order.
            const uint8x16_t codes = veorq_u8(vld1q_u8(payload + i), vdupq_n_u8(128));
            put_sixteen<Add>(codes, 128.0f, scale, strip + i);
        }
#endif
        for (; i < n; ++i) put<Add>(static_cast<float>(static_cast<int8_t>(payload[i])) * scale, strip[i]);
    }
};

template <>
struct Codec<Kind::Int4> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 7.0f;
    static int64_t payload_offset(int64_t element) { return element / 2; }

    template <class Ahead>
    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost, [[maybe_unused]] const Ahead& ahead) {
        int begin = 0;
#if defined(__ARM_NEON)
        const uint8x16_t offset = vdupq_n_u8(8);
        for (; begin + 32 <= n; begin += 32) {
            ahead.fetch(begin, 32);
            const uint8x16_t low = rounded_sixteen(strip + begin, scale, inverse, lost + begin);
            const uint8x16_t high = rounded_sixteen(strip + begin + 16, scale, inverse, lost + begin + 16);
            const uint8x16_t even = vaddq_u8(vuzp1q_u8(low, high), offset);
            const uint8x16_t odd = vaddq_u8(vuzp2q_u8(low, high), offset);
            vst1q_u8(payload + begin / 2, vsliq_n_u8(odd, even, 4));
        }
#endif
        uint32_t codes[kStrip + 1];
        for (int i = begin; i < n; ++i) {
            const int32_t code = rounded(strip[i] * inverse, 7);
            codes[i] = static_cast<uint32_t>(code + 8);
            lost[i] = strip[i] - static_cast<float>(code) * scale;
        }
        codes[n] = 0;  // the padding of an odd length
        for (int i = begin / 2; i < (n + 1) / 2; ++i)
            payload[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
    }

    template <bool Add>
    static void decode(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        int pair = 0;
#if defined(__ARM_NEON)
        for (; 2 * pair + 32 <= n; pair += 16) {
            const uint8x16_t bytes = vld1q_u8(payload + pair);
            const uint8x16_t even = vshrq_n_u8(bytes, 4), odd = vandq_u8(bytes, vdupq_n_u8(15));
            put_sixteen<Add>(vzip1q_u8(even, odd), 8.0f, scale, strip + 2 * pair);
            put_sixteen<Add>(vzip2q_u8(even, odd), 8.0f, scale, strip + 2 * pair + 16);
        }
#endif
        for (; 2 * pair + 1 < n; ++pair) {
            put<Add>(static_cast<float>(static_cast<int32_t>(payload[pair] >> 4) - 8) * scale, strip[2 * pair]);
            put<Add>(static_cast<float>(static_cast<int32_t>(payload[pair] & 15) - 8) * scale, strip[2 * pair + 1]);
        }
        if (n % 2) put<Add>(static_cast<float>(static_cast<int32_t>(payload[n / 2] >> 4) - 8) * scale, strip[n - 1]);
    }
};

// e4m3: 4 exponent bits with a bias of 7, 3 mantissa bits, steps of 2^-9 below 2^-6.
template <>
struct Codec<Kind::Fp8> {
    static constexpr bool kPeak = true;
    static constexpr float kLargest = 448.0f;
    static int64_t payload_offset(int64_t element) { return element; }

#if defined(__ARM_NEON)
    // Rounds four values in units of the scale to e4m3: adding 1.5 * 2^20 times the value's own power of two (or 2^-6,
    // if that is larger) leaves three mantissa bits.
    static float32x4_t on_the_grid(float32x4_t value) {
        const uint32x4_t power = vandq_u32(vreinterpretq_u32_f32(value), vdupq_n_u32(0x7f800000));
        const uint32x4_t rounder = vaddq_u32(vmaxq_u32(power, vdupq_n_u32(121u << 23)), vdupq_n_u32(0x0a400000));
        return vsubq_f32(vaddq_f32(value, vreinterpretq_f32_u32(rounder)), vreinterpretq_f32_u32(rounder));
    }

    // Times 2^-8, an e4m3 number is an fp16 number with the same mantissa and exponent bits, also if subnormal: the
    // code is bits 7 to 13 of it, plus the sign.
    static void encode_sixteen(const float* from, float scale, float inverse, uint8_t* payload, float* lost) {
        float16x4_t halves[4];
        for (int four = 0; four < 4; ++four) {
            const float32x4_t value = vld1q_f32(from + 4 * four);
            const float32x4_t kept = on_the_grid(vmulq_n_f32(value, inverse));
            vst1q_f32(lost + 4 * four, vsubq_f32(value, vmulq_n_f32(kept, scale)));
            halves[four] = vcvt_f16_f32(vmulq_n_f32(kept, 0x1p-8f));
        }
        const uint8x16_t low = vreinterpretq_u8_f16(vcombine_f16(halves[0], halves[1]));
        const uint8x16_t high = vreinterpretq_u8_f16(vcombine_f16(halves[2], halves[3]));
        const uint8x16_t upper = vuzp2q_u8(low, high), lower = vuzp1q_u8(low, high);
        const uint8x16_t magnitude = vorrq_u8(vshlq_n_u8(upper, 1), vshrq_n_u8(lower, 7));
        vst1q_u8(payload, vbslq_u8(vdupq_n_u8(128), upper, magnitude));
    }

    template <bool Add>
    static void decode_sixteen(const uint8_t* payload, float scale, float* to) {
        const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(payload));
        const int16x8_t widened[2] = {vshll_n_s8(vget_low_s8(codes), 7), vshll_high_n_s8(codes, 7)};
        for (int eight = 0; eight < 2; ++eight) {
            // The sign was spread over two bits; the upper one is its final position.
            const uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(widened[eight]), vdupq_n_u16(0xbfff));
            const float16x8_t halves = vreinterpretq_f16_u16(bits);
            put<Add>((Floats)vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves)), scale * 256.0f), to + 8 * eight);
            put<Add>((Floats)vmulq_n_f32(vcvt_high_f32_f16(halves), scale * 256.0f), to + 8 * eight + 4);
        }
    }
#endif

    // Adding 2^14 rounds to the steps below 2^-6.
    template <class Ahead>
    static void encode(const float* PACK_APART strip, int n, float scale, float inverse, uint8_t* PACK_APART payload,
                       float* PACK_APART lost, [[maybe_unused]] const Ahead& ahead) {
        int begin = 0;
#if defined(__ARM_NEON)
        for (; begin + 16 <= n; begin += 16) {
            ahead.fetch(begin, 16);
            encode_sixteen(strip + begin, scale, inverse, payload + begin, lost + begin);
        }
#endif
        uint32_t codes[kStrip];
        for (int i = begin; i < n; ++i) {
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
        for (int i = begin; i < n; ++i) payload[i] = static_cast<uint8_t>(codes[i]);
    }

    template <bool Add>
    static void decode(const uint8_t* PACK_APART payload, int n, float scale, float* PACK_APART strip) {
        int i = 0;
#if defined(__ARM_NEON)
        for (; i + 16 <= n; i += 16) decode_sixteen<Add>(payload + i, scale, strip + i);
#endif
        for (; i < n; ++i) {
            const uint32_t code = payload[i] & 127u;
            const float normal = float_of((code << 20) + (120u << 23));
            const float small = static_cast<float>(static_cast<int32_t>(code)) * 0x1p-9f;
            const float magnitude = code < 8 ? small : normal;
            put<Add>(float_of(bits_of(magnitude) | (payload[i] & 128u) << 24) * scale, strip[i]);
        }
    }
};

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
