// The keyed hash of object messages: NH, the first layer of UMAC (RFC 4418), on 32-bit words in three passes.
//
// It compresses 1024 bytes to 24. Without the key, nobody can find two different blocks with the same hash, except with a
// probability of 2^-96. That is not a MAC yet: the caller authenticates the hashes, together with the exact length, by
// HMAC (groups/object_frames.py). That is quicker than HMAC over the whole message.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringway {

constexpr size_t kHashBlock = 1024, kHashPasses = 3, kHashBytes = 8 * kHashPasses;
// Each pass uses the key from 32 bytes further on (Toeplitz), where 32 bytes are the unit in which words are paired.
constexpr size_t kHashKeyBytes = kHashBlock + 32 * (kHashPasses - 1);

// Writes kHashBytes for each block. The last block counts as padded with zeros.
void keyed_hash(const uint8_t* key, const uint8_t* data, size_t size, uint8_t* hashes);

}  // namespace ringway
