// The end of an interpreter while other threads still run.
#pragma once

#include <vector>

namespace ringway {

// Puts a handler before std::terminate's own, for the two functions below. Until one of them is called it changes nothing.
void handle_terminate();

// CPython before 3.14 ends a thread that asks for the GIL of a finalizing interpreter. In the middle of C++ that takes the
// whole process down. After this call the calling thread sleeps instead, as it does from 3.14 on.
void stand_still_at_the_end();

// For an exit while threads of other libraries are inside calls that may never be answered. The calling thread is the one
// that exits. `threads`, by the kernel's numbers, sleep from now on wherever they are. Every other thread sleeps where it
// would have taken the process down. The process ends with its exit status as soon as the interpreter is finalized:
// destructors of C++ statics, which those threads may use, do not run.
void leave_threads_behind(const std::vector<int>& threads);

}  // namespace ringway
