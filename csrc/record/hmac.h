// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the few hundred bytes that prove a responder's questions and answers.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace ringway {

using Tag = std::array<uint8_t, 32>;

Tag hmac_sha256(const std::string& key, const std::string& message);

// Compares in a time that does not depend on the content.
bool same_tag(const Tag& expected, const char* given);

}  // namespace ringway
