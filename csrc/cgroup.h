// What the control groups of this process still allow, in version 1 and 2 of Linux's interface. A limit of any ancestor
// counts. Every function takes a folder to use as the root of the file system, for tests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringway {

struct MemoryLeft {
    int64_t bytes;
    std::string limited_by;  // in words, for a message
};

// How much memory this process can take before the kernel kills a process to get some. Caches count as free.
MemoryLeft memory_left(const std::string& root = "");

struct CpuQuota {
    uint64_t cgroup;  // equal for processes that share the quota
    double cpus;
};

std::optional<CpuQuota> cpu_quota(const std::string& root = "");

}  // namespace ringway
