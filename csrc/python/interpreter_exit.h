// The end of an interpreter that still has threads.
#pragma once

namespace ringway {

// CPython before 3.14 ends a thread that asks for the GIL of an interpreter that is gone, wherever it is: in the midst
// of C++ that takes the whole process down. After this call such a thread stands still instead, as it does from 3.14 on.
void stand_still_at_the_end();

}  // namespace ringway
