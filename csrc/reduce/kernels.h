// The reduction kernels. Included once by each instruction set's .cpp, which is compiled for that set and gives the
// namespace as RINGWAY_ISA. Everything but `find` is local to that file, so that the linker cannot pick code for a
// newer CPU on an older one. The loops are plain C++ that compilers vectorize.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce/reduce.h"

// The iterations of the loop that follows do not depend on each other.
#ifdef __clang__
#define RINGWAY_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RINGWAY_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ringway::shm::RINGWAY_ISA {
namespace {

// The number of elements accumulated at a time: they stay in the L1 cache.
constexpr int kBlock = 512;

struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
struct Boolean {
    uint8_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widen(Brain value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

inline void narrow(float value, Brain& to) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#if defined(__aarch64__)
inline float widen(Half value) { return static_cast<float>(bit_cast<__fp16>(value.bits)); }
inline void narrow(float value, Half& to) { to.bits = bit_cast<uint16_t>(static_cast<__fp16>(value)); }
#else
// Branch-free, so that it vectorizes: multiplying by powers of two adjusts the exponents, including denormals.
inline float widen(Half value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    const uint32_t sign = wide & 0x80000000u;
    const uint32_t twice = wide + wide;
    const float normal = bit_cast<float>((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float denormal = bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
    return bit_cast<float>(sign | (twice < (1u << 27) ? bit_cast<uint32_t>(denormal) : bit_cast<uint32_t>(normal)));
}
inline void narrow(float value, Half& to) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t twice = bits + bits;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const float magnitude = bit_cast<float>(bits & 0x7fffffffu);
    const uint32_t bias = twice & 0xff000000u;
    const uint32_t floor = bias < 0x71000000u ? 0x71000000u : bias;
    const float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t sum = bit_cast<uint32_t>(bit_cast<float>((floor >> 1) + 0x07800000u) + base);
    const uint32_t exponent = (sum >> 13) & 0x7c00u;
    const uint32_t mantissa = sum & 0x0fffu;
    to.bits = static_cast<uint16_t>(sign | (twice > 0xff000000u ? 0x7e00u : exponent + mantissa));
}
#endif

template <class T>
inline T widen(T value) {
    return value;
}
inline uint8_t widen(Boolean value) { return value.bits != 0; }
inline void narrow(uint8_t value, Boolean& to) { to.bits = value; }
template <class Wide, class T>
inline void narrow(Wide value, T& to) {
    to = static_cast<T>(value);
}

// The type in which a dtype is accumulated.
template <class T>
using Wide = decltype(widen(T{}));

// Integers are added and multiplied as unsigned ones, whose overflow is defined.
struct Add {
    template <class A>
    A operator()(A a, A b) const {
        if constexpr (std::is_integral_v<A>) {
            using U = std::make_unsigned_t<A>;
            return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
        } else {
            return a + b;
        }
    }
};
struct Multiply {
    template <class A>
    A operator()(A a, A b) const {
        if constexpr (std::is_integral_v<A>)
            return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
        else
            return a * b;
    }
};
template <bool kLeast>
struct Extreme {
    template <class A>
    A operator()(A a, A b) const {
        return ((kLeast ? a < b : a > b) || a != a) ? a : b;
    }
};
template <Reduce kReduce>
struct Bitwise {
    template <class A>
    A operator()(A a, A b) const {
        if constexpr (kReduce == Reduce::Band) return static_cast<A>(a & b);
        else if constexpr (kReduce == Reduce::Bor) return static_cast<A>(a | b);
        else return static_cast<A>(a ^ b);
    }
};
using And = Bitwise<Reduce::Band>;
using Or = Bitwise<Reduce::Bor>;
using Xor = Bitwise<Reduce::Bxor>;

template <class T>
const T* source(const Reduction& r, int index) {
    return static_cast<const T*>(r.sources[index]);
}

#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX2__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif

// The sum of two sources, one cache line at a time, with both prefetched: one of them comes from another core's cache,
// and an all_reduce of two ranks spends its time in this loop. Returns the number of elements done.
template <class T>
int64_t sum_lines(const T* a, const T* b, T* result, T* copy, int64_t n) {
    typedef T Vector __attribute__((vector_size(kVector), aligned(alignof(T)), may_alias));
    constexpr int64_t kCount = 64 / sizeof(T);
    constexpr int64_t kAhead = 8 * kCount;
    constexpr int64_t kPart = kVector / sizeof(T);
    int64_t i = 0;
    for (; i + kCount <= n; i += kCount) {
        __builtin_prefetch(a + i + kAhead);
        __builtin_prefetch(b + i + kAhead);
#pragma GCC unroll 4
        for (int64_t j = i; j < i + kCount; j += kPart) {
            const Vector sum = *reinterpret_cast<const Vector*>(a + j) + *reinterpret_cast<const Vector*>(b + j);
            *reinterpret_cast<Vector*>(result + j) = sum;
            if (copy != nullptr) *reinterpret_cast<Vector*>(copy + j) = sum;
        }
    }
    return i;
}

// Two sources, with no operation before or after.
template <class T, class F>
void pair(const T* a, const T* b, T* result, T* copy, int64_t n) {
    constexpr F f{};
    int64_t start = 0;
    if constexpr (std::is_floating_point_v<T> && std::is_same_v<F, Add>) start = sum_lines(a, b, result, copy, n);
    if (copy == nullptr) {
        RINGWAY_INDEPENDENT
        for (int64_t i = start; i < n; ++i) narrow(f(widen(a[i]), widen(b[i])), result[i]);
        return;
    }
    RINGWAY_INDEPENDENT
    for (int64_t i = start; i < n; ++i) {
        T value;
        narrow(f(widen(a[i]), widen(b[i])), value);
        result[i] = value;
        copy[i] = value;
    }
}

// Any number of sources, one block at a time in `acc`: `first` and `next` add a source, `last` finishes the block.
template <class T, class A, class First, class Next, class Last>
void blocks(const Reduction& r, First first, Next next, Last last) {
    alignas(64) A acc[kBlock];
    auto* result = static_cast<T*>(r.result);
    auto* copy = static_cast<T*>(r.copy);
    for (int64_t at = 0; at < r.elements; at += kBlock) {
        const int n = static_cast<int>(r.elements - at < kBlock ? r.elements - at : kBlock);
        const T* from = source<T>(r, 0) + at;
        for (int i = 0; i < n; ++i) acc[i] = first(from[i]);
        for (int s = 1; s < r.count_sources; ++s) {
            from = source<T>(r, s) + at;
            for (int i = 0; i < n; ++i) acc[i] = next(acc[i], from[i], s);
        }
        for (int i = 0; i < n; ++i) narrow(last(acc[i]), result[at + i]);
        if (copy != nullptr) std::memcpy(copy + at, result + at, static_cast<size_t>(n) * sizeof(T));
    }
}

template <class T, class F>
void fold(const Reduction& r) {
    if (r.count_sources == 2)
        return pair<T, F>(source<T>(r, 0), source<T>(r, 1), static_cast<T*>(r.result), static_cast<T*>(r.copy),
                          r.elements);
    constexpr F f{};
    using A = Wide<T>;
    blocks<T, A>(
        r, [](T x) { return widen(x); }, [f](A acc, T x, int) { return f(acc, widen(x)); }, [](A acc) { return acc; });
}

template <class T>
void average(const Reduction& r) {
    using A = std::conditional_t<std::is_integral_v<T>, int64_t, Wide<T>>;
    const A count = static_cast<A>(r.count_sources);
    blocks<T, A>(
        r, [](T x) { return static_cast<A>(widen(x)); },
        [](A acc, T x, int) { return Add{}(acc, static_cast<A>(widen(x))); }, [count](A acc) { return acc / count; });
}

template <class T>
void premultiplied(const Reduction& r) {
    using A = Wide<T>;
    const A first = static_cast<A>(r.factors[0]);
    blocks<T, A>(
        r, [first](T x) { return widen(x) * first; },
        [&r](A acc, T x, int s) { return acc + widen(x) * static_cast<A>(r.factors[s]); }, [](A acc) { return acc; });
}

template <class T>
Reducer number(Reduce reduce) {
    switch (reduce) {
        case Reduce::Sum:
            return fold<T, Add>;
        case Reduce::Avg:
            return average<T>;
        case Reduce::Product:
            return fold<T, Multiply>;
        case Reduce::Min:
            return fold<T, Extreme<true>>;
        case Reduce::Max:
            return fold<T, Extreme<false>>;
        default:
            return nullptr;
    }
}

template <class T>
Reducer real(Reduce reduce) {
    return reduce == Reduce::PremulSum ? premultiplied<T> : number<T>(reduce);
}

template <class T>
Reducer integer(Reduce reduce) {
    switch (reduce) {
        case Reduce::Band:
            return fold<T, And>;
        case Reduce::Bor:
            return fold<T, Or>;
        case Reduce::Bxor:
            return fold<T, Xor>;
        default:
            return number<T>(reduce);
    }
}

Reducer boolean(Reduce reduce) {
    switch (reduce) {
        case Reduce::Sum:
        case Reduce::Max:
        case Reduce::Bor:
            return fold<Boolean, Or>;
        case Reduce::Product:
        case Reduce::Min:
        case Reduce::Band:
            return fold<Boolean, And>;
        case Reduce::Bxor:
            return fold<Boolean, Xor>;
        default:
            return nullptr;
    }
}

bool linear(Reduce reduce) { return reduce == Reduce::Sum || reduce == Reduce::Avg || reduce == Reduce::PremulSum; }

}  // namespace

Reducer find(DType dtype, Reduce reduce) {
    switch (dtype) {
        case DType::F32:
            return real<float>(reduce);
        case DType::F64:
            return real<double>(reduce);
        case DType::F16:
            return real<Half>(reduce);
        case DType::BF16:
            return real<Brain>(reduce);
        case DType::C64:
            return linear(reduce) ? real<float>(reduce) : nullptr;
        case DType::C128:
            return linear(reduce) ? real<double>(reduce) : nullptr;
        case DType::I8:
            return integer<int8_t>(reduce);
        case DType::U8:
            return integer<uint8_t>(reduce);
        case DType::I16:
            return integer<int16_t>(reduce);
        case DType::I32:
            return integer<int32_t>(reduce);
        case DType::I64:
            return integer<int64_t>(reduce);
        case DType::Bool:
            return boolean(reduce);
        default:
            return nullptr;
    }
}

}  // namespace ringway::shm::RINGWAY_ISA
