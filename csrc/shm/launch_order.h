// The order in which a process launches the direct calls of its groups.
//
// A call is launched when its ranks have met, and calls of different groups may meet in any order. But a device may run the
// streams of a process through one queue, where a call that waits for its peers holds up what comes after it. If rank 0 has
// A before B in its queue, and rank 1 has B before A, both wait forever. So calls are launched in the order in which they
// were issued, which is the same on all ranks.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>

namespace ringway::shm {

class LaunchOrder {
  public:
    // A call is issued: its place in the order. A group's own calls are in order already.
    uint64_t enter(const void* group) {
        const std::lock_guard<std::mutex> guard(lock_);
        pending_.emplace(++last_, group);
        return last_;
    }

    // Whether calls of other groups are not launched yet.
    bool others_pending(const void* group) {
        const std::lock_guard<std::mutex> guard(lock_);
        return std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) { return entry.second != group; });
    }

    // Waits for the earlier calls of other groups, but not for longer than this. Whether they are launched.
    bool wait_for_earlier(uint64_t place, double seconds) {
        std::unique_lock<std::mutex> guard(lock_);
        const auto own = pending_.find(place);
        if (own == pending_.end()) return true;
        const auto launched = [&] {
            return std::all_of(pending_.begin(), own, [&](const auto& entry) { return entry.second == own->second; });
        };
        return left_.wait_for(guard, std::chrono::duration<double>(seconds), launched);
    }

    // The call is launched, or has failed.
    void leave(uint64_t place) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (pending_.erase(place) != 0) left_.notify_all();
    }

  private:
    std::mutex lock_;
    std::condition_variable left_;
    std::map<uint64_t, const void*> pending_;  // their groups, by place
    uint64_t last_ = 0;
};

}  // namespace ringway::shm
