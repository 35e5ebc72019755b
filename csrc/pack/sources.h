// Sources of numbers: flat memory, or the mean of frames; adding residuals to them; and prefetching.
#pragma once

#include "pack/codecs.h"
#include "pack/statistics.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

struct NoElement {};

// --- frames -----------------------------------------------------------------------------------------------

struct Frame {
    uint8_t* data;
    int64_t block;
    int64_t count;

    int64_t scales() const { return block > 0 ? (count + block - 1) / block : 1; }
    uint8_t* payload() const { return data + kHeaderBytes + 4 * scales(); }
    int64_t scale_index(int64_t element) const { return block > 0 ? element / block : 0; }

    float scale(int64_t element) const {
        float value;
        std::memcpy(&value, data + kHeaderBytes + 4 * scale_index(element), sizeof value);
        return value;
    }
    void set_scale(int64_t element, float value) const {
        std::memcpy(data + kHeaderBytes + 4 * scale_index(element), &value, sizeof value);
    }
    int32_t status() const {
        int32_t value;
        std::memcpy(&value, data, sizeof value);
        return value;
    }
    void set_status(int32_t value) const { std::memcpy(data, &value, sizeof value); }
};

// --- sources of values ------------------------------------------------------------------------------------

template <class Of>
struct FromArray {
    using Element = Of;
    const Element* data;
    void load(int64_t begin, int n, float* strip) const { load_strip(data + begin, n, strip); }
    const Element* at(int64_t element) const { return data + element; }
};

template <Kind K>
struct FromFrames {
    using Element = NoElement;
    Frames frames;
    int64_t block;
    int64_t count;

    void load(int64_t begin, int n, float* strip) const {
        const float factor = static_cast<float>(1.0 / static_cast<double>(frames.rows));
        for (int64_t row = 0; row < frames.rows; ++row) {
            const Frame frame{frames.data + row * frames.stride, block, count};
            const uint8_t* codes = frame.payload() + Codec<K>::payload_offset(begin);
            const float scale = frame.scale(begin) * factor;
            if (row == 0) Codec<K>::template decode<false>(codes, n, scale, strip);
            else Codec<K>::template decode<true>(codes, n, scale, strip);
        }
    }
    const NoElement* at(int64_t) const { return nullptr; }  // few bytes: the hardware prefetches them
};

// Computes a strip of the source plus the residual, and its statistic.
template <class Taker, class Source, class Residual>
Taker load_compensated(const Source& source, const Residual* residual, int64_t at, int n, float* strip) {
    Taker taker;
    const float* values = strip;
    if constexpr (std::is_same_v<Source, FromArray<float>>) values = source.data + at;
    else source.load(at, n, strip);
    if constexpr (std::is_same_v<Residual, NoElement>) {
        add_and_take(values, nullptr, n, strip, taker);
    } else if constexpr (std::is_same_v<Residual, float>) {
        add_and_take(values, residual + at, n, strip, taker);
    } else {
        float more[kStrip];
        load_strip(residual + at, n, more);
        add_and_take(values, more, n, strip, taker);
    }
    return taker;
}

// --- prefetching ------------------------------------------------------------------------------------------

template <class Residual>
Residual* offset(Residual* residual, int64_t by) {
    if constexpr (std::is_same_v<Residual, NoElement>) return residual;
    else return residual + by;
}

// Values and residuals that will be read soon. Prefetching beyond their end is harmless.
template <class Value, class Residual>
struct Ahead {
    const Value* values;
    const Residual* residual;

    void fetch(int i, int n) const {
        fetch(values, i, n);
        fetch(residual, i, n);
    }
    template <class Element>
    static void fetch(const Element* from, int i, int n) {
        if constexpr (!std::is_same_v<Element, NoElement>) {
            const uintptr_t begin = reinterpret_cast<uintptr_t>(from) + sizeof(Element) * static_cast<unsigned>(i);
            for (uintptr_t byte = 0; byte < sizeof(Element) * static_cast<unsigned>(n); byte += 64)
                __builtin_prefetch(reinterpret_cast<const void*>(begin + byte));
        }
    }
};

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
