#include "cgroup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace ringway {
namespace {

constexpr int64_t kNoLimit = int64_t{1} << 60;

// The text of a file; empty if it cannot be read. (With C++ streams, processes with torch's CUDA libraries crashed here.)
std::string text_of(const std::string& path) {
    std::string text;
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return text;
    char part[4096];
    for (ssize_t count; (count = read(fd, part, sizeof(part))) > 0;) text.append(part, static_cast<size_t>(count));
    close(fd);
    return text;
}

// The parts between the separators, without empty ones.
std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find(separator, at), text.size());
        if (end > at) parts.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return parts;
}

bool starts_with(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// Whether a list such as "rw,cpu,cpuacct" has the word.
bool has(const std::string& list, const std::string& word) {
    const std::vector<std::string> words = split(list, ',');
    return std::find(words.begin(), words.end(), word) != words.end();
}

// The numbers at the start of a file.
std::vector<int64_t> numbers_in(const std::string& path) {
    const std::string text = text_of(path);
    std::vector<int64_t> numbers;
    const char* at = text.c_str();
    for (char* end = nullptr;; at = end) {
        const int64_t number = std::strtoll(at, &end, 10);
        if (end == at) return numbers;
        numbers.push_back(number);
    }
}

// The first number in a file. `kNoLimit` if it says "max" or -1, or if there is none.
int64_t number_in(const std::string& path) {
    const std::vector<int64_t> numbers = numbers_in(path);
    return numbers.empty() || numbers[0] < 0 ? kNoLimit : std::min(numbers[0], kNoLimit);
}

int64_t used_in(const std::string& path) {
    const int64_t value = number_in(path);
    return value == kNoLimit ? 0 : value;
}

// The sum of the named values in a file of lines "name value" or "name: value kB".
int64_t sum_of(const std::string& path, const std::vector<std::string>& names) {
    int64_t sum = 0;
    for (const std::string& line : split(text_of(path), '\n')) {
        const std::vector<std::string> words = split(line, ' ');
        if (words.size() < 2 || std::find(names.begin(), names.end(), words[0]) == names.end()) continue;
        const int64_t value = std::strtoll(words[1].c_str(), nullptr, 10);
        sum += words.size() > 2 && words[2] == "kB" ? value * 1024 : value;
    }
    return sum;
}

// The folders of this process's cgroup and of its ancestors, as far as they are visible here. Version 2 has one tree for
// all controllers, version 1 one for each.
std::vector<std::string> folders(const std::string& root, const std::string& controller, bool second) {
    std::string own;
    for (const std::string& line : split(text_of(root + "/proc/self/cgroup"), '\n')) {
        const size_t first = line.find(':'), last = line.find(':', first + 1);
        if (first == std::string::npos || last == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, last - first - 1);
        if (second ? controllers.empty() : has(controllers, controller)) own = line.substr(last + 1);
    }
    if (own.empty()) return {};
    for (const std::string& line : split(text_of(root + "/proc/self/mountinfo"), '\n')) {
        const size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        // Before the dash: ids, device, the top of what is mounted, and where. Behind it: kind, source, options.
        const std::vector<std::string> mount = split(line.substr(0, dash), ' '), of = split(line.substr(dash + 3), ' ');
        if (mount.size() < 5 || of.size() < 3) continue;
        const std::string &top = mount[3], &place = mount[4];
        if (second ? of[0] != "cgroup2" : of[0] != "cgroup" || !has(of[2], controller)) continue;
        // In a container the mount may show a part of the tree only, and the path may be the host's.
        if (top != "/") own = starts_with(own, top) ? own.substr(top.size()) : "";
        std::vector<std::string> found;
        while (own.find_first_not_of('/') != std::string::npos) {
            found.push_back(root + place + own);
            const size_t slash = own.rfind('/');
            own.erase(slash == std::string::npos ? 0 : slash);
        }
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
    const auto consider_quota = [&](const std::string& folder, int64_t quota, int64_t period) {
        struct stat facts {};
        if (quota <= 0 || period <= 0) return;
        const double cpus = static_cast<double>(quota) / static_cast<double>(period);
        if (least && cpus >= least->cpus) return;
        if (stat(folder.c_str(), &facts) == 0) least = CpuQuota{facts.st_ino, cpus};
    };
    for (const std::string& folder : folders(root, "cpu", true)) {
        const std::vector<int64_t> limit = numbers_in(folder + "/cpu.max");  // none if it says "max"
        if (limit.size() == 2) consider_quota(folder, limit[0], limit[1]);
    }
    for (const std::string& folder : folders(root, "cpu", false)) {
        const std::vector<int64_t> quota = numbers_in(folder + "/cpu.cfs_quota_us");
        const std::vector<int64_t> period = numbers_in(folder + "/cpu.cfs_period_us");
        if (quota.size() == 1 && period.size() == 1) consider_quota(folder, quota[0], period[0]);
    }
    return least;
}

}  // namespace ringway
