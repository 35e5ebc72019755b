// The steps of pack.h, over strips. Included once per instruction set, with PACK_NAMESPACE and PACK_INSTRUCTIONS
// defined.
//
// A block's scale is known only after the whole block was read. A block of up to kHeld elements stays in the cache
// between the two passes, so memory is read once; a larger one is read twice.
#include "pack/sources.h"
#include "pack/statistics.h"
#include "pack/tiles.h"
#include "pack/topk.h"

namespace ringway::pack::PACK_NAMESPACE {
namespace {

constexpr int64_t kHeld = 4096;
constexpr int64_t kAhead = 3072;             // elements by which prefetching is ahead
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// --- statistics -------------------------------------------------------------------------------------------

// The statistic of a block or a tensor, from its strips: sums are in double precision.
template <Kind K>
struct Statistic {
    double sum = 0;
    uint32_t peak = 0;

    void add(const Peak& taken) { peak = std::max(peak, taken.bits()); }
    template <bool kSquares>
    void add(const Sum<kSquares>& taken) { sum += taken.sum(); }

    float block_scale(int64_t n) const {
        float scale;
        if constexpr (Codec<K>::kPeak) {
            if (peak >= kInfinity) return kNaN;
            scale = float_of(peak) * (1.0f / Codec<K>::kLargest);
        } else {
            scale = static_cast<float>(sum / static_cast<double>(n));
        }
        return std::isfinite(scale) ? scale : kNaN;
    }
    double tensor_statistic() const {
        if constexpr (Codec<K>::kPeak) return peak >= kInfinity ? kNaN : float_of(peak);
        else return std::isfinite(sum) ? std::sqrt(sum) : kNaN;
    }
};

template <Kind K>
using ForBlock = std::conditional_t<Codec<K>::kPeak, Peak, SumOfMagnitudes>;
template <Kind K>
using ForTensor = std::conditional_t<Codec<K>::kPeak, Peak, SumOfSquares>;

template <Kind K, class Source, class Residual>
double measure_source(const Source& source, const Residual* residual, int64_t count, int threads) {
    const int64_t tiles = (count + kTile - 1) / kTile;
    std::vector<Statistic<K>> parts(static_cast<size_t>(tiles));
    in_tiles(count, 0, threads, [&](int64_t begin, int64_t end) {
        float strip[kStrip];
        in_strips(begin, end, kStrip, [&](int64_t at, int n) {
            parts[static_cast<size_t>(begin / kTile)].add(
                load_compensated<ForTensor<K>>(source, residual, at, n, strip));
        });
    });
    Statistic<K> whole;
    for (const Statistic<K>& part : parts) {  // in order, so that the sum does not depend on the threads
        whole.sum += part.sum;
        whole.peak = std::max(whole.peak, part.peak);
    }
    return whole.tensor_statistic();
}

// --- encoding ---------------------------------------------------------------------------------------------

// A scale whose reciprocal is not finite is sent as zero: the values stay in the residual.
inline float usable(float scale) { return scale < std::numeric_limits<float>::min() ? 0.0f : scale; }

template <Kind K, class Source, class Residual>
struct Encoder {
    const Source& source;
    Residual* residual;
    Frame frame;
    uint8_t* payload = frame.payload();

    void emit(const float* strip, int64_t at, int n, float scale, float inverse) const {
        uint8_t* codes = payload + Codec<K>::payload_offset(at);
        const Ahead<typename Source::Element, Residual> ahead{source.at(at + kAhead), offset(residual, at + kAhead)};
        if constexpr (std::is_same_v<Residual, float>) {
            Codec<K>::encode(strip, n, scale, inverse, codes, residual + at, ahead);
        } else {
            float lost[kStrip];
            Codec<K>::encode(strip, n, scale, inverse, codes, lost, ahead);
            if constexpr (!std::is_same_v<Residual, NoElement>) store_strip(lost, n, residual + at);
        }
    }

    // One block; false if a value is not finite.
    bool block(int64_t begin, int64_t end) const {
        float held[kHeld];
        const bool fits = end - begin <= kHeld;
        Statistic<K> statistic;
        in_strips(begin, end, kStrip, [&](int64_t at, int n) {
            float* strip = fits ? held + (at - begin) : held;
            statistic.add(load_compensated<ForBlock<K>>(source, residual, at, n, strip));
        });
        const float scale = usable(statistic.block_scale(end - begin));
        frame.set_scale(begin, scale);
        if (std::isnan(scale)) return false;
        const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
        in_strips(begin, end, kStrip, [&](int64_t at, int n) {
            float* strip = fits ? held + (at - begin) : held;
            if (!fits) load_compensated<Nothing>(source, residual, at, n, strip);
            emit(strip, at, n, scale, inverse);
        });
        return true;
    }

    // A part of a tensor with one known scale.
    void stretch(int64_t begin, int64_t end, float scale) const {
        float strip[kStrip];
        const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
        in_strips(begin, end, kStrip, [&](int64_t at, int n) {
            load_compensated<Nothing>(source, residual, at, n, strip);
            emit(strip, at, n, scale, inverse);
        });
    }

    // The whole frame; false if a value is not finite.
    bool run(float tensor_scale, int threads) const {
        if (frame.count == 0) return true;
        if (frame.block == 0) {
            if (!std::isfinite(tensor_scale)) return false;
            const float scale = usable(tensor_scale);
            frame.set_scale(0, scale);
            in_tiles(frame.count, 0, threads, [&](int64_t begin, int64_t end) { stretch(begin, end, scale); });
            return true;
        }
        std::atomic<bool> finite{true};
        in_tiles(frame.count, frame.block, threads, [&](int64_t begin, int64_t end) {
            for (int64_t at = begin; at < end; at += frame.block)
                if (!block(at, std::min(end, at + frame.block))) finite = false;
        });
        return finite;
    }
};

// --- from run-time codes to types -------------------------------------------------------------------------

template <class Use>
auto with_kind(Kind kind, Use use) {
    switch (kind) {
        case Kind::OneBit: return use(std::integral_constant<Kind, Kind::OneBit>{});
        case Kind::Int8: return use(std::integral_constant<Kind, Kind::Int8>{});
        case Kind::Int4: return use(std::integral_constant<Kind, Kind::Int4>{});
        default: return use(std::integral_constant<Kind, Kind::Fp8>{});
    }
}

template <class Use>
auto with_values(Array array, Use use) {
    switch (array.dtype) {
        case DType::F16: return use(static_cast<Float16*>(array.data));
        case DType::BF16: return use(static_cast<BFloat16*>(array.data));
        default: return use(static_cast<float*>(array.data));
    }
}

template <class Use>
auto with_residual(Array array, Use use) {
    if (array.data == nullptr) return use(static_cast<NoElement*>(nullptr));
    if (array.dtype == DType::BF16) return use(static_cast<BFloat16*>(array.data));
    return use(static_cast<float*>(array.data));
}

// Calls work(row, where, count) for each shard that has elements in the window.
template <class Work>
void in_rows(Window window, int64_t rows, Work work) {
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = std::min(window.stop, window.numel - row * window.shard) - window.start;
        if (count > 0) work(row, row * window.shard + window.start, count);
    }
}

// The first frame whose status is not zero; frames.rows if there is none.
int64_t first_failed(Frames frames) {
    int64_t row = 0;
    while (row < frames.rows && Frame{frames.data + row * frames.stride, 0, 0}.status() == 0) ++row;
    return row;
}

// --- the steps --------------------------------------------------------------------------------------------

double measure(Format format, Array values, Array residual, int64_t numel, int threads) {
    return with_kind(format.kind, [&](auto kind) {
        return with_values(values, [&](auto* data) {
            return with_residual(residual, [&](auto* lost) {
                const FromArray<std::remove_pointer_t<decltype(data)>> source{data};
                return measure_source<kind.value>(source, lost, numel, threads);
            });
        });
    });
}

void encode(Format format, Array values, Array residual, Window window, Frames frames, float scale, int threads) {
    if (format.kind == Kind::TopK) {
        return with_values(values, [&](auto* data) {
            with_residual(residual, [&](auto* lost) {
                in_rows(window, frames.rows, [&](int64_t row, int64_t where, int64_t count) {
                    const Frame frame{frames.data + row * frames.stride, 0, count};
                    if (!encode_largest(format, data + where, offset(lost, where), count, frame.data, threads))
                        frame.set_status(1);
                });
            });
        });
    }
    with_kind(format.kind, [&](auto kind) {
        with_values(values, [&](auto* data) {
            with_residual(residual, [&](auto* lost) {
                using Source = FromArray<std::remove_pointer_t<decltype(data)>>;
                using Residual = std::remove_pointer_t<decltype(lost)>;
                in_rows(window, frames.rows, [&](int64_t row, int64_t where, int64_t count) {
                    const Frame frame{frames.data + row * frames.stride, format.block, count};
                    const Source source{data + where};
                    const Encoder<kind.value, Source, Residual> encoder{source, offset(lost, where), frame};
                    if (!encoder.run(scale, threads)) frame.set_status(1);
                });
            });
        });
    });
}

double measure_mean(Format format, Frames frames, Array residual, int64_t count, int threads) {
    return with_kind(format.kind, [&](auto kind) {
        return with_residual(residual, [&](auto* lost) {
            const FromFrames<kind.value> source{frames, format.block, count};
            return measure_source<kind.value>(source, lost, count, threads);
        });
    });
}

void encode_mean(Format format, Frames frames, Array residual, int64_t count, uint8_t* to, float scale,
                 int threads) {
    const Frame out{to, format.block, count};
    const int64_t failed = first_failed(frames);
    if (failed < frames.rows) return out.set_status(static_cast<int32_t>(1 + failed));
    if (format.kind == Kind::TopK) {
        return with_residual(residual, [&](auto* lost) {
            if (!encode_mean_of_largest(format, frames, lost, count, to, threads))
                out.set_status(static_cast<int32_t>(1 + frames.rows));
        });
    }
    with_kind(format.kind, [&](auto kind) {
        with_residual(residual, [&](auto* lost) {
            using Source = FromFrames<kind.value>;
            const Source source{frames, format.block, count};
            const Encoder<kind.value, Source, std::remove_pointer_t<decltype(lost)>> encoder{source, lost, out};
            if (!encoder.run(scale, threads)) out.set_status(static_cast<int32_t>(1 + frames.rows));
        });
    });
}

// Strips never cross a block, since each block of the source has its own scale.
template <Kind K, class Element>
void decode_source(const FromFrames<K>& source, Element* to, int64_t count, int threads) {
    const int64_t block = source.block > 0 ? source.block : kTile;
    in_tiles(count, source.block, threads, [&](int64_t begin, int64_t end) {
        [[maybe_unused]] float strip[kStrip];
        for (int64_t at = begin; at < end; at += block)
            in_strips(at, std::min(end, at + block), kStrip, [&](int64_t from, int n) {
                if constexpr (std::is_same_v<Element, float>) {
                    source.load(from, n, to + from);
                } else {
                    source.load(from, n, strip);
                    store_strip(strip, n, to + from);
                }
            });
    });
}

template <class Element>
void fill_nan(Element* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) narrow(kNaN, to[i]);
}

void decode(Format format, Frames frames, Window window, Array values, int threads) {
    with_kind(format.kind, [&](auto kind) {
        with_values(values, [&](auto* data) {
            in_rows(window, frames.rows, [&](int64_t row, int64_t where, int64_t count) {
                const Frames only{frames.data + row * frames.stride, frames.stride, 1};
                if (Frame{only.data, format.block, count}.status() != 0) return fill_nan(data + where, count);
                if (format.kind == Kind::TopK) return decode_largest(format, only, data + where, count, threads);
                decode_source(FromFrames<kind.value>{only, format.block, count}, data + where, count, threads);
            });
        });
    });
}

void decode_mean(Format format, Frames frames, int64_t count, Array values, int threads) {
    with_kind(format.kind, [&](auto kind) {
        with_values(values, [&](auto* data) {
            if (first_failed(frames) < frames.rows) return fill_nan(data, count);
            if (format.kind == Kind::TopK) return decode_largest(format, frames, data, count, threads);
            decode_source(FromFrames<kind.value>{frames, format.block, count}, data, count, threads);
        });
    });
}

}  // namespace

const Steps steps = {measure, encode, measure_mean, encode_mean, decode, decode_mean, PACK_INSTRUCTIONS};

}  // namespace ringway::pack::PACK_NAMESPACE
