#include "python/interpreter_exit.h"

#include <unistd.h>

#include <exception>
#include <mutex>

namespace ringway {
namespace {

thread_local bool stands_still = false;
std::terminate_handler handler_before = nullptr;

// A thread that is being ended comes here without an exception, from the first frame that lets nothing through.
void terminated() {
    while (stands_still && !std::current_exception()) pause();
    handler_before();
}

}  // namespace

void stand_still_at_the_end() {
    static std::once_flag once;
    std::call_once(once, [] { handler_before = std::set_terminate(terminated); });
    stands_still = true;
}

}  // namespace ringway
