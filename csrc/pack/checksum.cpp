#include "pack/checksum.h"

#include <array>
#include <cstring>

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace ringway {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, reflected

Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; ++byte)
        for (size_t slice = 1; slice < 8; ++slice)
            tables[slice][byte] = (tables[slice - 1][byte] >> 8) ^ tables[0][tables[slice - 1][byte] & 0xff];
    return tables;
}

// Eight bytes per step, with one table for each position of a byte.
uint32_t crc_portable(uint32_t crc, const unsigned char* data, size_t size) {
    static const Tables t = make_tables();
    for (; size >= 8; data += 8, size -= 8) {
        crc ^= uint32_t(data[0]) | uint32_t(data[1]) << 8 | uint32_t(data[2]) << 16 | uint32_t(data[3]) << 24;
        crc = t[7][crc & 0xff] ^ t[6][(crc >> 8) & 0xff] ^ t[5][(crc >> 16) & 0xff] ^ t[4][crc >> 24] ^
              t[3][data[4]] ^ t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
    }
    for (; size > 0; ++data, --size) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 0xff];
    return crc;
}

#if defined(__aarch64__)
__attribute__((target("+crc"))) uint32_t crc_native(uint32_t crc, const unsigned char* data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        crc = __crc32cd(crc, word);
    }
    for (; size > 0; ++data, --size) crc = __crc32cb(crc, *data);
    return crc;
}
bool has_native() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#elif defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc_native(uint32_t crc, const unsigned char* data, size_t size) {
    uint64_t wide = crc;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = static_cast<uint32_t>(wide);
    for (; size > 0; ++data, --size) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
bool has_native() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
uint32_t crc_native(uint32_t crc, const unsigned char* data, size_t size) { return crc_portable(crc, data, size); }
bool has_native() { return false; }
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
    static const bool native = has_native();
    const auto* bytes = static_cast<const unsigned char*>(data);
    return ~(native ? crc_native(~crc, bytes, size) : crc_portable(~crc, bytes, size));
}

}  // namespace ringway
