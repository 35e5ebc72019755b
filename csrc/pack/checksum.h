// CRC-32C of object messages. Uses the CPU's instruction if it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringway {

// The CRC of `size` bytes that follow bytes whose CRC was `crc` (0 at the start).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

}  // namespace ringway
