// Calls to a shared-memory group: Python's objects become the engine's requests.
#pragma once

#include <nanobind/nanobind.h>

#include "python/shm_group.h"

namespace ringway::shm {

// A call site as text that stays valid.
const char* place_of(uint32_t site);

// Fills the message of a send or receive. Its memory is `call.in`, and `call.root` is the other rank.
void describe(Message& message, const Request& call, int64_t bytes, int tag);

// Start a `ringway.call.Call`. A synchronous collective is done on return, and returns None.
nb::object collective(PyGroup& group, nb::handle call, double timeout_s);
// For a call whose data moves elsewhere: the ranks compare it, and each shows the others some bytes. `count` is the number
// of elements that they compare. Returns what every rank showed, or the task of an asynchronous call.
nb::object show(PyGroup& group, nb::handle call, double timeout_s, int64_t count, nb::bytes shown, uint64_t manner);
// Ends the group: a rank sends another one more or less than that expects. Raises the error.
void differ(PyGroup& group, const CallFacts& call, int source, int target, int64_t sent, int64_t expected);
// What every rank sees of a call, for a fault that comes later.
CallFacts facts_of(nb::handle call, int64_t count);
CallFacts facts_of(const Request& call);
// A message with a `reference` (bytes) is sent by reference. A receive with `room`, a tensor of bytes in host memory, takes
// references, and what has room there.
PyTask message(PyGroup& group, nb::handle call, double timeout_s, nb::handle reference, nb::handle room);

}  // namespace ringway::shm
