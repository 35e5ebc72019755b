#include "cgroup.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace ringway {
namespace {

constexpr int64_t kNoLimit = int64_t{1} << 60;

bool starts_with(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// Whether a list such as "rw,cpu,cpuacct" has the word.
bool has(const std::string& list, const std::string& word) {
    std::istringstream words(list);
    for (std::string one; std::getline(words, one, ',');)
        if (one == word) return true;
    return false;
}

// The first number in a file. `kNoLimit` if it says "max" or -1, or if there is none.
int64_t number_in(const std::string& path) {
    int64_t value = 0;
    return std::ifstream(path) >> value && value >= 0 ? std::min(value, kNoLimit) : kNoLimit;
}

int64_t used_in(const std::string& path) {
    const int64_t value = number_in(path);
    return value == kNoLimit ? 0 : value;
}

// The sum of the named values in a file of lines "name value" or "name: value kB".
int64_t sum_of(const std::string& path, const std::vector<std::string>& names) {
    std::ifstream file(path);
    int64_t sum = 0;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name, unit;
        int64_t value = 0;
        if (!(words >> name >> value)) continue;
        words >> unit;
        if (std::find(names.begin(), names.end(), name) != names.end()) sum += unit == "kB" ? value * 1024 : value;
    }
    return sum;
}

// The folders of this process's cgroup and of its ancestors, as far as they are visible here. Version 2 has one tree for
// all controllers, version 1 one for each.
std::vector<std::string> folders(const std::string& root, const std::string& controller, bool second) {
    std::string own;
    std::ifstream cgroups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(cgroups, line);) {
        const size_t first = line.find(':'), last = line.find(':', first + 1);
        if (first == std::string::npos || last == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, last - first - 1);
        if (second ? controllers.empty() : has(controllers, controller)) own = line.substr(last + 1);
    }
    std::ifstream mounts(root + "/proc/self/mountinfo");
    for (std::string line; !own.empty() && std::getline(mounts, line);) {
        const size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        std::string skipped, top, place, kind, source, options;
        std::istringstream(line) >> skipped >> skipped >> skipped >> top >> place;
        std::istringstream(line.substr(dash + 3)) >> kind >> source >> options;
        if (second ? kind != "cgroup2" : kind != "cgroup" || !has(options, controller)) continue;
        // In a container the mount may show a part of the tree only, and the path may be the host's.
        if (top != "/") own = starts_with(own, top) ? own.substr(top.size()) : "";
        std::vector<std::string> found;
        for (; own.find_first_not_of('/') != std::string::npos; own.erase(own.rfind('/'))) found.push_back(root + place + own);
        found.push_back(root + place);
        return found;
    }
    return {};
}

void consider(MemoryLeft& least, int64_t left, const std::string& limited_by) {
    if (left < least.bytes) least = {std::max<int64_t>(left, 0), limited_by};
}

}  // namespace

MemoryLeft memory_left(const std::string& root) {
    const std::string machine = root + "/proc/meminfo";
    const int64_t swap = sum_of(machine, {"SwapFree:"});
    MemoryLeft least{kNoLimit, ""};
    const int64_t available = sum_of(machine, {"MemAvailable:"});
    if (available > 0) consider(least, available + swap, "on this machine (MemAvailable)");
    for (const std::string& folder : folders(root, "memory", true)) {
        const int64_t limit = number_in(folder + "/memory.max");
        if (limit == kNoLimit) continue;
        const int64_t caches = sum_of(folder + "/memory.stat", {"inactive_file", "active_file", "slab_reclaimable"});
        const int64_t swappable = number_in(folder + "/memory.swap.max") - used_in(folder + "/memory.swap.current");
        const int64_t left = limit - used_in(folder + "/memory.current") + caches + std::clamp<int64_t>(swappable, 0, swap);
        consider(least, left, "in the cgroup " + folder + " (memory.max is " + std::to_string(limit) + ")");
    }
    for (const std::string& folder : folders(root, "memory", false)) {
        const int64_t limit = number_in(folder + "/memory.limit_in_bytes");
        if (limit == kNoLimit) continue;
        const int64_t caches = sum_of(folder + "/memory.stat", {"total_inactive_file", "total_active_file"});
        const int64_t free = limit - used_in(folder + "/memory.usage_in_bytes");
        // Memory and swap have one limit together, where they are counted.
        const int64_t both =
            number_in(folder + "/memory.memsw.limit_in_bytes") - used_in(folder + "/memory.memsw.usage_in_bytes");
        consider(least, free + caches + std::clamp<int64_t>(both - free, 0, swap),
                 "in the cgroup " + folder + " (memory.limit_in_bytes is " + std::to_string(limit) + ")");
    }
    return least;
}

std::optional<CpuQuota> cpu_quota(const std::string& root) {
    std::optional<CpuQuota> least;
    const auto consider_quota = [&](const std::string& folder, double quota, double period) {
        struct stat facts {};
        if (quota <= 0 || period <= 0 || (least && quota / period >= least->cpus)) return;
        if (stat(folder.c_str(), &facts) == 0) least = CpuQuota{facts.st_ino, quota / period};
    };
    for (const std::string& folder : folders(root, "cpu", true)) {
        double quota = 0, period = 0;
        if (std::ifstream(folder + "/cpu.max") >> quota >> period) consider_quota(folder, quota, period);
    }
    for (const std::string& folder : folders(root, "cpu", false)) {
        double quota = 0, period = 0;
        if (std::ifstream(folder + "/cpu.cfs_quota_us") >> quota && std::ifstream(folder + "/cpu.cfs_period_us") >> period)
            consider_quota(folder, quota, period);
    }
    return least;
}

}  // namespace ringway
