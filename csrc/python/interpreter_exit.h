// The end of an interpreter while other threads still run.
//
// CPython before 3.14 ends a thread that asks for the GIL of a finalizing interpreter. In the middle of C++ that takes the
// whole process down. gil.h avoids it in ringway's own code. In the code of other libraries, which call back to Python or
// return to it, it ends in std::terminate, where the thread then sleeps.
#pragma once

#include <vector>

namespace ringway {

// Puts a handler before std::terminate's own. It changes nothing before the interpreter exits.
void handle_terminate();

// The interpreter is about to exit, on the calling thread. From now on every other thread sleeps where it would have taken
// the process down.
void begin_exit();
bool interpreter_exits();
bool this_thread_exits();
[[noreturn]] void sleep_forever();

// Also for an exit while threads of other libraries are inside calls that may never be answered. `threads`, by the kernel's
// numbers, sleep from now on wherever they are. The process ends with its exit status as soon as the interpreter is
// finalized: destructors of C++ statics, which those threads may use, do not run.
void leave_threads_behind(const std::vector<int>& threads);

}  // namespace ringway
