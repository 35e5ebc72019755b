// Statistics computed in passing: a sum of magnitudes or of squares, or the largest magnitude.
#pragma once

#include "pack/elements.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

// Several sets of lanes, so that an addition does not wait for the previous one.
constexpr int kSets = 4;

inline double sum_lanes(const Floats* sets) {
#if defined(__ARM_NEON)
    float64x2_t wide[kSets];
    for (int set = 0; set < kSets; ++set) {
        const float32x4_t lanes = (float32x4_t)sets[set];
        wide[set] = vaddq_f64(vcvt_f64_f32(vget_low_f32(lanes)), vcvt_high_f64_f32(lanes));
    }
    return vaddvq_f64(vaddq_f64(vaddq_f64(wide[0], wide[1]), vaddq_f64(wide[2], wide[3])));
#else
    double sum = 0;
    for (int set = 0; set < kSets; ++set)
        for (int i = 0; i < kLanes; ++i) sum += sets[set][i];
    return sum;
#endif
}

struct Nothing {
    void take(int, Floats) {}
    void take(float) {}
};

template <bool kSquares>
struct Sum {
    Floats lanes[kSets] = {};
    double rest = 0;
    void take(int set, Floats value) { lanes[set] += kSquares ? value * value : magnitudes(value); }
    void take(float value) { rest += kSquares ? static_cast<double>(value) * value : std::fabs(value); }
    double sum() const { return sum_lanes(lanes) + rest; }
};
using SumOfMagnitudes = Sum<false>;
using SumOfSquares = Sum<true>;

// Compared as bits: magnitudes order like their bits, and NaN and infinity are above every number.
struct Peak {
    Words lanes[kSets] = {};
    uint32_t rest = 0;
    void take(int set, Floats value) {
        const Words next = (Words)magnitudes(value);
#if defined(__ARM_NEON)
        lanes[set] = (Words)vmaxq_u32((uint32x4_t)next, (uint32x4_t)lanes[set]);
#else
        lanes[set] = next > lanes[set] ? next : lanes[set];
#endif
    }
    void take(float value) { rest = std::max(rest, bits_of(value) & 0x7fffffffu); }
    uint32_t bits() const {
        uint32_t highest = rest;
#if defined(__ARM_NEON)
        for (int set = 0; set < kSets; ++set) highest = std::max(highest, vmaxvq_u32((uint32x4_t)lanes[set]));
#else
        for (int set = 0; set < kSets; ++set)
            for (int i = 0; i < kLanes; ++i) highest = std::max(highest, static_cast<uint32_t>(lanes[set][i]));
#endif
        return highest;
    }
};

// strip = values + more, and its statistic. `values` may be the strip itself; `more` is null if there is none.
template <bool kMore, class Taker>
void add_and_take_from(const float* values, const float* PACK_APART more, int n, float* strip, Taker& taker) {
    Taker local;
    int i = 0;
    for (; i + kSets * kLanes <= n; i += kSets * kLanes) {
        Floats set_of[kSets];
        for (int set = 0; set < kSets; ++set) {
            set_of[set] = load(values + i + set * kLanes);
            if constexpr (kMore) set_of[set] += load(more + i + set * kLanes);
        }
        for (int set = 0; set < kSets; ++set) {
            if (kMore || values != strip) store(set_of[set], strip + i + set * kLanes);
            local.take(set, set_of[set]);
        }
    }
    for (; i < n; ++i) {
        strip[i] = kMore ? values[i] + more[i] : values[i];
        local.take(strip[i]);
    }
    taker = local;
}

template <class Taker>
void add_and_take(const float* values, const float* more, int n, float* strip, Taker& taker) {
    if (more != nullptr) add_and_take_from<true>(values, more, n, strip, taker);
    else add_and_take_from<false>(values, more, n, strip, taker);
}

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
