// Calls handed to a shared-memory group: from Python's objects to the engine's requests.
#pragma once

#include <nanobind/nanobind.h>

#include "python/shm_group.h"

namespace ringway::shm {

// The line of the program that a call site names, as text that stays. Needs the GIL.
const char* text_of_site(uint32_t site);

struct MessageFacts {
    Op op;
    DType dtype;
    int peer, tag;
    std::byte* data;
    int64_t bytes;
    double timeout_s;
    uint64_t number;
    uint32_t site;
};
void fill(Message& message, const MessageFacts& facts);

// Starts a `ringway.call.Call`. A synchronous collective is done when it returns, and returns None.
nb::object collective(PyGroup& group, nb::handle call, double timeout_s);
PyTask message(PyGroup& group, nb::handle call, double timeout_s);

}  // namespace ringway::shm
