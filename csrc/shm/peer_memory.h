// The memory of another process, read through the kernel: one copy of large data instead of two through the segment.
#pragma once

#include <cstdint>

namespace ringway::shm {

// The sizes of blocks that are read so.
struct ReadSizes {
    int64_t least = INT64_MAX;
    int64_t most = INT64_MAX;

    bool contain(int64_t bytes) const { return least <= bytes && bytes <= most; }
    bool none() const { return least == INT64_MAX; }
};

// Those of a group of `ranks`. Groups of up to 16 ranks read, unless the kernel takes unusually long for a copy, as measured once
// in a process.
ReadSizes read_sizes(int ranks);
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
