// The largest magnitudes of each chunk: src/ringway/compress/codecs/topk.py describes a record to the bit.
//
// Selection is exact, and takes one vectorized pass, in which fp32 values are also added to their residuals. At least k
// elements reach the k-th largest of the maxima of small groups, so only groups that reach this bound are looked at element
// by element. What was kept of the chunk before is a good guess of the bound, and it is one if at least k maxima reach it,
// so the maxima are rarely sorted.
#pragma once

#include "pack/sources.h"
#include "pack/tiles.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

constexpr int kChunk = 4096;

// The record of a chunk.
struct Record {
    int length;
    int kept;
    int bits;
    int low;
    int unary;

    Record(int64_t length_, Format format)
        : length(static_cast<int>(length_)),
          kept(static_cast<int>((format.block * length_ + kChunk - 1) / kChunk)),
          bits(format.bits),
          low(31 - __builtin_clz(static_cast<unsigned>(length / kept))),
          unary(kept + ((length - 1) >> low)) {}

    int levels() const { return 1 << (bits - 1); }
    int64_t nbytes() const { return 8 + (kept * (bits + low) + unary + 7) / 8; }
};

// The range of the kept magnitudes, as a record begins with it, and its levels.
struct Range {
    float smallest;
    float largest;

    int level(float magnitude, int levels) const {
        if (!(largest > smallest)) return 0;
        const float share = (magnitude - smallest) / (largest - smallest);
        return std::min(static_cast<int>(share * static_cast<float>(levels)), levels - 1);
    }
    float value(int level, int levels, bool at_least_zero) const {
        const float step = (largest - smallest) / static_cast<float>(levels);
        const float middle = smallest + step * (static_cast<float>(level) + 0.5f);
        const float magnitude = smallest == 0 && level == 0 ? 0.0f : middle;
        return at_least_zero ? magnitude : -magnitude;
    }
};

// Bits, the first in the highest place of a byte.
struct BitWriter {
    uint8_t* to;
    uint64_t held = 0;
    int count = 0;

    void put(uint32_t value, int width) {  // width <= 32
        held = held << width | value;
        count += width;
        if (count >= 32) {
            count -= 32;
            const uint32_t word = __builtin_bswap32(static_cast<uint32_t>(held >> count));  // all hosts: little endian
            std::memcpy(to, &word, sizeof word);
            to += sizeof word;
        }
    }
    // `zeros` times 0, then 1.
    void put_unary(int zeros) {
        for (; zeros >= 32; zeros -= 32) put(0, 32);
        put(1, zeros + 1);
    }
    void finish(int zeros) {
        for (; zeros > 0; zeros -= 32) put(0, std::min(zeros, 32));
        for (; count > 0; count -= 8) *to++ = static_cast<uint8_t>(count >= 8 ? held >> (count - 8) : held << (8 - count));
    }
};

struct BitReader {
    const uint8_t* from;
    int64_t at;

    uint32_t take(int width) {
        uint32_t value = 0;
        while (width > 0) {
            const int room = 8 - static_cast<int>(at % 8), n = std::min(room, width);
            value = value << n | (static_cast<uint32_t>(from[at / 8]) >> (room - n) & ((1u << n) - 1));
            at += n;
            width -= n;
        }
        return value;
    }
};

// --- selection --------------------------------------------------------------------------------------------

// Groups are the lanes of four vectors of a block of 64 elements, since maxima of lanes cost nothing: group g holds the
// elements 64 * (g / 4) + g % 4 + 4 * i.
constexpr int kBlock = 64;
constexpr int kGroups = kChunk / 16;

inline uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// The largest magnitude of each group, as bits.
struct Maxima {
    uint32_t of[kGroups];
    uint32_t all;
    int groups;
};

inline Words larger(Words one, Words other) {
#if defined(__ARM_NEON)
    return (Words)vmaxq_u32((uint32x4_t)one, (uint32x4_t)other);
#else
    return one > other ? one : other;
#endif
}

// Stores from + more in `to`, which may be `more`, and what was in `more` in `before`. Takes the maxima in passing. `more`
// and `before` are null if there is nothing to add, and `to` is `from` if there is nothing to store. The next chunk is
// prefetched at the same time, or the bus would be idle.
template <bool kMore, bool kStore, class Next>
void add_and_take_maxima(const float* from, const float* more, int n, float* to, float* before, Maxima& maxima,
                         const Next& next) {
    int begin = 0;
    Words all = {};
    for (; begin + kBlock <= n; begin += kBlock) {
        next.fetch(begin, kBlock);
        Words most = {};
        for (int i = begin; i < begin + kBlock; i += kLanes) {
            Floats value = load(from + i);
            if constexpr (kMore) {
                const Floats added = load(more + i);
                store(added, before + i);
                value += added;
            }
            if constexpr (kStore) store(value, to + i);
            most = larger((Words)magnitudes(value), most);
        }
        uint32_t lanes[kLanes];
        std::memcpy(lanes, &most, sizeof lanes);
        for (int lane = 4; lane < kLanes; ++lane) lanes[lane % 4] = std::max(lanes[lane % 4], lanes[lane]);
        std::memcpy(maxima.of + begin / 16, lanes, 4 * sizeof(uint32_t));
        all = larger(most, all);
    }
    maxima.all = 0;
    for (int lane = 0; lane < kLanes; ++lane) maxima.all = std::max(maxima.all, static_cast<uint32_t>(all[lane]));
    maxima.groups = (n + kBlock - 1) / kBlock * 4;
    if (begin < n) std::fill(maxima.of + begin / 16, maxima.of + begin / 16 + 4, 0u);
    for (int i = begin; i < n; ++i) {
        if constexpr (kMore) before[i] = more[i];
        const float value = kMore ? from[i] + before[i] : from[i];
        if constexpr (kStore) to[i] = value;
        uint32_t& most = maxima.of[begin / 16 + i % 4];
        most = std::max(most, magnitude_bits(value));
        maxima.all = std::max(maxima.all, magnitude_bits(value));
    }
}

// The n-th largest of the numbers.
inline uint32_t nth_largest(const uint32_t* numbers, int count, int n) {
    uint32_t sorted[kChunk];
    std::copy(numbers, numbers + count, sorted);
    std::nth_element(sorted, sorted + n - 1, sorted + count, std::greater<uint32_t>());
    return sorted[n - 1];
}

// Selects the largest magnitudes of chunk after chunk.
struct Selection {
    uint32_t guess = 0;           // a magnitude a little below the smallest that was kept
    uint16_t places[kChunk];      // of what is kept, in ascending order

    // The `kept` largest; of equal ones, the first.
    void take(const float* values, int n, int kept, const Maxima& maxima) {
        const int found = find(values, n, maxima.of, bound_of(maxima, kept));
        if (found == kept) return;
        uint32_t magnitudes[kChunk];
        for (int i = 0; i < found; ++i) magnitudes[i] = magnitude_bits(values[places[i]]);
        const uint32_t smallest = nth_largest(magnitudes, found, kept);
        int ties = kept;  // of those that equal the smallest, as many as are left
        for (int i = 0; i < found; ++i) ties -= magnitudes[i] > smallest;
        for (int i = 0, taken = 0; taken < kept; ++i) {
            places[taken] = places[i];
            const int equal = magnitudes[i] == smallest && ties > 0;
            ties -= equal;
            taken += equal | (magnitudes[i] > smallest);
        }
        guess = smallest - std::min(smallest, 1u << 19);  // about 6 % less
    }

private:
    // A magnitude that at least `kept` elements reach.
    uint32_t bound_of(const Maxima& maxima, int kept) const {
        if (maxima.groups < kept) return 0;
        int reached = 0;
        for (int group = 0; group < maxima.groups; ++group) reached += maxima.of[group] >= guess;
        if (reached >= kept && reached <= 2 * kept) return guess;
        return nth_largest(maxima.of, maxima.groups, kept);
    }

    // Writes the places of the elements that reach the bound, and counts them.
    int find(const float* values, int n, const uint32_t* maxima, uint32_t bound) {
        int found = 0;
        for (int begin = 0; begin < n; begin += kBlock) {
            const uint32_t* lanes = maxima + begin / 16;
            if (std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3])) < bound) continue;
            for (uint64_t left = reaching(values + begin, std::min(n - begin, kBlock), bound); left != 0; left &= left - 1)
                places[found++] = static_cast<uint16_t>(begin + __builtin_ctzll(left));
        }
        return found;
    }

    // The elements of a block that reach the bound, one bit each, the first lowest.
    static uint64_t reaching(const float* values, int n, uint32_t bound) {
#if defined(__ARM_NEON)
        if (n == kBlock) {
            const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
            const auto four = [&](int at) {
                const uint32x4_t bits = vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(values + at)));
                return vreinterpretq_u16_u32(vcgeq_u32(bits, vdupq_n_u32(bound)));
            };
            const auto sixteen = [&](int at) {
                const uint16x8_t low = vuzp1q_u16(four(at), four(at + 4));
                const uint16x8_t high = vuzp1q_u16(four(at + 8), four(at + 12));
                return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), weights);
            };
            const uint8x16_t first = vpaddq_u8(sixteen(0), sixteen(16)), second = vpaddq_u8(sixteen(32), sixteen(48));
            const uint8x16_t fours = vpaddq_u8(first, second);
            return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(fours, fours)), 0);
        }
#endif
        uint64_t reached = 0;
        for (int i = 0; i < n; ++i) reached |= static_cast<uint64_t>(magnitude_bits(values[i]) >= bound) << i;
        return reached;
    }
};

// --- records ----------------------------------------------------------------------------------------------

// Writes the record of a chunk, and leaves the encoding error in `values`. False if a value is not finite.
inline bool encode_record(const Record& record, Selection& selection, const Maxima& maxima, float* values, uint8_t* to) {
    if (maxima.all >= kInfinity) return false;
    selection.take(values, record.length, record.kept, maxima);
    const uint16_t* places = selection.places;
    float magnitudes[kChunk];
    for (int i = 0; i < record.kept; ++i) magnitudes[i] = std::fabs(values[places[i]]);
    const auto [smallest, largest] = std::minmax_element(magnitudes, magnitudes + record.kept);
    const Range range{*smallest, *largest};
    std::memcpy(to, &range, sizeof range);
    int levels[kChunk];
    for (int i = 0; i < record.kept; ++i) levels[i] = range.level(magnitudes[i], record.levels());
    BitWriter bits{to + sizeof range};
    for (int i = 0; i < record.kept; ++i) {
        float& value = values[places[i]];
        const bool at_least_zero = value >= 0;
        bits.put(static_cast<uint32_t>(levels[i] + (at_least_zero ? record.levels() : 0)), record.bits);
        value -= range.value(levels[i], record.levels(), at_least_zero);
    }
    for (int i = 0; i < record.kept; ++i) bits.put(places[i] & ((1u << record.low) - 1), record.low);
    int upper = 0;
    for (int i = 0; i < record.kept; ++i) {
        const int next = places[i] >> record.low;
        bits.put_unary(next - upper);
        upper = next;
    }
    bits.finish(record.unary - record.kept - upper);
    return true;
}

// Calls use(place, value) for each kept element. A peer's bytes never lead beyond the chunk.
template <class Use>
void in_record(const Record& record, const uint8_t* from, Use use) {
    Range range;
    std::memcpy(&range, from, sizeof range);
    from += sizeof range;
    BitReader codes{from, 0}, lowest{from, static_cast<int64_t>(record.kept) * record.bits};
    BitReader unary{from, static_cast<int64_t>(record.kept) * (record.bits + record.low)};
    int upper = 0;
    for (int bit = 0, i = 0; bit < record.unary && i < record.kept; ++bit) {
        if (unary.take(1) == 0) {
            ++upper;
            continue;
        }
        ++i;
        const int code = static_cast<int>(codes.take(record.bits));
        const int place = (upper << record.low) + static_cast<int>(lowest.take(record.low));
        const bool at_least_zero = code >= record.levels();
        if (place < record.length) use(place, range.value(code % record.levels(), record.levels(), at_least_zero));
    }
}

// Calls work(at, record, offset of the record, selection) for each chunk of [0, count), on several threads.
template <class Work>
void in_chunks(Format format, int64_t count, int threads, Work work) {
    const int64_t stride = Record(kChunk, format).nbytes();
    in_tiles(count, kChunk, threads, [&](int64_t begin, int64_t end) {
        Selection selection;
        for (int64_t at = begin; at < end; at += kChunk)
            work(at, Record(std::min<int64_t>(kChunk, end - at), format), kHeaderBytes + at / kChunk * stride,
                 selection);
    });
}

// Adds the mean of the frames' records of one chunk to `values`.
inline void add_mean(const Record& record, Frames frames, int64_t offset, float* values) {
    const float factor = static_cast<float>(1.0 / static_cast<double>(frames.rows));
    for (int64_t row = 0; row < frames.rows; ++row)
        in_record(record, frames.data + row * frames.stride + offset,
                  [&](int place, float value) { values[place] += value * factor; });
}

template <class Residual>
void add_residual(const Residual* residual, int n, float* values) {
    if constexpr (!std::is_same_v<Residual, NoElement>) {
        float more[kChunk];
        load_strip(residual, n, more);
        for (int i = 0; i < n; ++i) values[i] += more[i];
    }
}

// --- the steps --------------------------------------------------------------------------------------------

// Encodes chunk after chunk into a frame; false if a value is not finite. `load(at, record, offset of the record, values)`
// reads a chunk of the source plus the residual.
template <class Element, class Residual, class Load>
bool encode_chunks(Format format, int64_t count, const Element* from, Residual* residual, uint8_t* frame, int threads,
                   Load load) {
    std::atomic<bool> finite{true};
    in_chunks(format, count, threads, [&](int64_t at, const Record& record, int64_t offset_of, Selection& selection) {
        float values[kChunk];
        Maxima maxima;
        load(at, record, offset_of, values);
        const Ahead<Element, Residual> next{offset(from, at + kChunk), offset(residual, at + kChunk)};
        add_and_take_maxima<false, false>(values, nullptr, record.length, values, nullptr, maxima, next);
        if (!encode_record(record, selection, maxima, values, frame + offset_of)) finite = false;
        else if constexpr (!std::is_same_v<Residual, NoElement>) store_strip(values, record.length, residual + at);
    });
    return finite;
}

// The same for fp32, in one pass over memory: the sums replace the residuals at once, and come back if one is not finite.
inline bool encode_in_place(Format format, int64_t count, const float* from, float* residual, uint8_t* frame, int threads) {
    std::atomic<bool> finite{true};
    in_chunks(format, count, threads, [&](int64_t at, const Record& record, int64_t offset_of, Selection& selection) {
        float before[kChunk];
        Maxima maxima;
        float* values = residual + at;
        const Ahead<float, float> next{from + at + kChunk, values + kChunk};
        add_and_take_maxima<true, true>(from + at, values, record.length, values, before, maxima, next);
        if (encode_record(record, selection, maxima, values, frame + offset_of)) return;
        std::copy(before, before + record.length, values);
        finite = false;
    });
    return finite;
}

template <class Element, class Residual>
bool encode_largest(Format format, const Element* from, Residual* residual, int64_t count, uint8_t* frame,
                    int threads) {
    if constexpr (std::is_same_v<Element, float> && std::is_same_v<Residual, float>)
        return encode_in_place(format, count, from, residual, frame, threads);
    const auto load = [&](int64_t at, const Record& record, int64_t, float* values) {
        in_strips(at, at + record.length, kStrip, [&](int64_t begin, int n) {
            load_compensated<Nothing>(FromArray<Element>{from}, residual, begin, n, values + (begin - at));
        });
    };
    return encode_chunks(format, count, from, residual, frame, threads, load);
}

template <class Residual>
bool encode_mean_of_largest(Format format, Frames frames, Residual* residual, int64_t count, uint8_t* frame,
                            int threads) {
    const auto load = [&](int64_t at, const Record& record, int64_t offset_of, float* values) {
        std::fill(values, values + record.length, 0.0f);
        add_mean(record, frames, offset_of, values);
        add_residual(offset(residual, at), record.length, values);
    };
    return encode_chunks(format, count, static_cast<const NoElement*>(nullptr), residual, frame, threads, load);
}

template <class Element>
void decode_largest(Format format, Frames frames, Element* to, int64_t count, int threads) {
    in_chunks(format, count, threads, [&](int64_t at, const Record& record, int64_t offset_of, Selection&) {
        float values[kChunk];
        std::fill(values, values + record.length, 0.0f);
        add_mean(record, frames, offset_of, values);
        store_strip(values, record.length, to + at);
    });
}

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
