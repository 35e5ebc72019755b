// What the recorder holds, as JSON, made without Python: for peers that ask, and for dumps.
#pragma once

#include <string>

#include "record/recorder.h"

namespace ringway {

// Calls are rows of the same order as Recorder.recent's in Python. All that are under way are there, the latest
// `of_group` of the group, and the latest `of_all`; oldest first.
std::string calls_json(const Recorder& recorder, const std::string& group, size_t of_group, size_t of_all);

std::string json_text(const std::string& text);

}  // namespace ringway
