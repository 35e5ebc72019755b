// The memory of another process, read through the kernel: one copy of large data instead of two through the segment.
#pragma once

#include <cstdint>

namespace ringway::shm {

// The fewest bytes of a block that a group of `ranks` reads so. INT64_MAX: it never does. By default, groups of up to 16 ranks
// do where a read takes less than two and a half copies, as measured once in a process.
int64_t read_once_from(int ranks);
// For tests: from that many bytes on, in groups of any size that are made from now on. Negative: the default.
void set_read_once_from(int64_t bytes);

// Whether the kernel lets this process read the memory of that one.
bool may_read(int pid);

// Whether other processes can read this memory of this one. They cannot read a device's, such as CUDA's pinned memory may be.
bool is_readable(const void* memory, int64_t bytes);

// Copies from the other process. Returns 0, or errno: ESRCH if it is gone.
int read_memory(int pid, void* to, uint64_t from, int64_t bytes);

// For tests: what this process has read so, in all.
int64_t bytes_read_once();

}  // namespace ringway::shm
