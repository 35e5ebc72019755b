// Which line of the user's program made a call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ringway {

inline constexpr size_t kPlaceBytes = 128;

struct CallSite {
    std::string file;
    std::string function;
    int line = 0;
    std::string place = {};  // all of it as text, shorter than kPlaceBytes
};

// Frames whose file starts with one of `inside`, and with none of `outside`, are machinery: the search for the user's
// line skips them. Called once, with the GIL, when ringway is imported.
void set_machinery(std::vector<std::string> inside, std::vector<std::string> outside);

// A small number for the innermost frame of the current thread that is not machinery; 0 if there is none (threads of the
// autograd engine), or if the bounded table of sites is full. Needs the GIL.
uint32_t current_site();

// Null for 0. The site stays valid. Callable from any thread, with or without the GIL.
const CallSite* site(uint32_t id);

}  // namespace ringway
