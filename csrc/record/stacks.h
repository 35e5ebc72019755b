// The Python stacks of this process, read without the GIL.
#pragma once

#include <cstddef>
#include <string>

namespace ringway {

inline constexpr size_t kMaxStackBytes = 32768;

// Whether this interpreter has a function that reads its frames without the GIL.
bool dumps_stacks();

// Reads them in a copy of the process: only the reader runs there, so no frame changes while it reads, and if it meets a
// half-made frame, only the copy crashes. `signal` and `fd` are for interpreters without that function: the signal at
// which faulthandler writes to `fd`. Empty if nothing could be read.
std::string stacks_of_a_copy(int signal, int fd);

}  // namespace ringway
