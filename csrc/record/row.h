// One call as a row: the only place that says which fields a row has, and in which order. Rows go to Python as tuples
// and to other processes as JSON.
#pragma once

#include <string>

#include "record/callsite.h"
#include "record/record.h"

namespace ringway {

// Calls use(fields...). `where` is null if the line of the program is unknown.
template <class Use>
auto with_row(const Entry& call, const std::string& group, const std::string& label, const CallSite* where, Use use) {
    return use(call.sequence, static_cast<int>(call.op), call.bytes, static_cast<int>(call.dtype),
               static_cast<int>(call.reduce), call.peer, group, label, where, call.issued_ns, call.completed_ns,
               static_cast<int>(call.state), call.size, call.started_ns, call.stream,
               call.beside);
}

}  // namespace ringway
