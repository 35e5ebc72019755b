#include "pack/keyed_hash.h"

#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ringway {
namespace {

// One pass: the sum modulo 2^64 of (m + k) * (m' + k'), where m is one of four words and m' the word 16 bytes further on.
// The ranks of a job have the same byte order.
#if defined(__aarch64__)

struct Sum {
    uint64x2_t lanes = vdupq_n_u64(0);

    static uint32x4_t load(const uint8_t* at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }

    void add(const uint8_t* data, const uint8_t* key) {
        const uint32x4_t a = vaddq_u32(load(data), load(key)), b = vaddq_u32(load(data + 16), load(key + 16));
        lanes = vmlal_high_u32(vmlal_u32(lanes, vget_low_u32(a), vget_low_u32(b)), a, b);
    }

    uint64_t total() const { return vaddvq_u64(lanes); }
};

#elif defined(__x86_64__)

struct Sum {
    __m128i lanes = _mm_setzero_si128();

    static __m128i load(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

    void add(const uint8_t* data, const uint8_t* key) {
        const __m128i a = _mm_add_epi32(load(data), load(key)), b = _mm_add_epi32(load(data + 16), load(key + 16));
        const __m128i odd = _mm_mul_epu32(_mm_srli_epi64(a, 32), _mm_srli_epi64(b, 32));
        lanes = _mm_add_epi64(lanes, _mm_add_epi64(_mm_mul_epu32(a, b), odd));
    }

    uint64_t total() const {
        uint64_t each[2];
        std::memcpy(each, &lanes, sizeof(each));
        return each[0] + each[1];
    }
};

#else

struct Sum {
    uint64_t sum = 0;

    void add(const uint8_t* data, const uint8_t* key) {
        uint32_t m[8], k[8];
        std::memcpy(m, data, sizeof(m));
        std::memcpy(k, key, sizeof(k));
        for (int i = 0; i < 4; ++i) {
            const uint32_t a = m[i] + k[i], b = m[i + 4] + k[i + 4];
            sum += static_cast<uint64_t>(a) * b;
        }
    }

    uint64_t total() const { return sum; }
};

#endif

void hash_block(const uint8_t* key, const uint8_t* data, uint8_t* hashes) {
    Sum first, second, third;
    for (size_t at = 0; at < kHashBlock; at += 32) {
        first.add(data + at, key + at);
        second.add(data + at, key + at + 32);
        third.add(data + at, key + at + 64);
    }
    const uint64_t totals[kHashPasses] = {first.total(), second.total(), third.total()};
    std::memcpy(hashes, totals, sizeof(totals));
}

}  // namespace

void keyed_hash(const uint8_t* key, const uint8_t* data, size_t size, uint8_t* hashes) {
    for (; size >= kHashBlock; data += kHashBlock, size -= kHashBlock, hashes += kHashBytes)
        hash_block(key, data, hashes);
    if (size == 0) return;
    uint8_t padded[kHashBlock] = {};
    std::memcpy(padded, data, size);
    hash_block(key, padded, hashes);
}

}  // namespace ringway
