// The Python stacks of this process, read without the GIL.
#pragma once

#include <string>

namespace ringway {

// Whether this interpreter lets its frames be read without the GIL by a plain call.
bool dumps_stacks();

// Reads them in a copy of the process: there nothing runs but the reader, so no frame changes under it, and if it
// meets one half made, it is the copy that crashes. `signal` and `fd` serve interpreters that cannot be asked by a
// plain call: the signal at which faulthandler writes to `fd`. Empty where nothing could be read.
std::string stacks_of_a_copy(int signal, int fd);

}  // namespace ringway
