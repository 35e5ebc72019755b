// Calls to a shared-memory group: Python's objects become the engine's requests.
#pragma once

#include <nanobind/nanobind.h>

#include "python/shm_group.h"

namespace ringway::shm {

// A call site as text that stays valid. Needs the GIL.
const char* text_of_site(uint32_t site);

// Fills the message of a send or receive. Its memory is `call.in`, and `call.root` is the other rank.
void describe(Message& message, const Request& call, int64_t bytes, int tag);

// Start a `ringway.call.Call`. A synchronous collective is done on return, and returns None.
nb::object collective(PyGroup& group, nb::handle call, double timeout_s);
PyTask message(PyGroup& group, nb::handle call, double timeout_s);

}  // namespace ringway::shm
