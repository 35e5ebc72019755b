// Which line of the user's program made a call.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ringway {

struct CallSite {
    std::string file;
    std::string function;
    int line = 0;
};

// Frames of files that start with one of `inside`, and not with one of `outside`, belong to the machinery and
// are passed over. Called once, with the GIL, when ringway is imported.
void set_machinery(std::vector<std::string> inside, std::vector<std::string> outside);

// A small number for the innermost frame of the current thread that is not machinery; 0 where there is none
// (the autograd engine's threads). Needs the GIL. The table of sites is bounded: past it, 0.
uint32_t current_site();

// Any thread may ask, with or without the GIL.
CallSite site(uint32_t id);

}  // namespace ringway
