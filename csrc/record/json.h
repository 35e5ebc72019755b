// The recorder's calls as JSON, made without Python: for peers that ask, and for dumps.
#pragma once

#include <string>

#include "record/recorder.h"

namespace ringway {

// The rows (row.h) of all pending calls, of the latest `of_group` calls of the group, and of the latest `of_all` calls;
// oldest first.
std::string calls_json(const Recorder& recorder, const std::string& group, size_t of_group, size_t of_all);

std::string json_text(const std::string& text);

}  // namespace ringway
