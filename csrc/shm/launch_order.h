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
        pending_.emplace(++last_, Pending{group});
        return last_;
    }

    // Waits for the earlier calls of other groups. One that takes too long, because a rank is late, is not waited for again.
    void wait_for_earlier(uint64_t place) {
        std::unique_lock<std::mutex> guard(lock_);
        const auto own = pending_.find(place);
        if (own == pending_.end()) return;
        const auto awaited = [&](const auto& entry) { return entry.second.group != own->second.group && !entry.second.late; };
        const auto clear = [&] { return std::none_of(pending_.begin(), own, awaited); };
        if (left_.wait_for(guard, kPatience, clear)) return;
        for (auto entry = pending_.begin(); entry != own; ++entry) entry->second.late |= awaited(*entry);
    }

    // The call is launched, or has failed.
    void leave(uint64_t place) {
        const std::lock_guard<std::mutex> guard(lock_);
        pending_.erase(place);
        left_.notify_all();
    }

  private:
    static constexpr std::chrono::seconds kPatience{1};
    struct Pending {
        const void* group;
        bool late = false;
    };

    std::mutex lock_;
    std::condition_variable left_;
    std::map<uint64_t, Pending> pending_;
    uint64_t last_ = 0;
};

// A call from when it is issued until it is launched.
class LaunchTurn {
  public:
    LaunchTurn(LaunchOrder& order, const void* group) : order_(order), place_(order.enter(group)) {}
    ~LaunchTurn() { order_.leave(place_); }
    LaunchTurn(const LaunchTurn&) = delete;
    LaunchTurn& operator=(const LaunchTurn&) = delete;
    void wait_for_earlier() { order_.wait_for_earlier(place_); }

  private:
    LaunchOrder& order_;
    const uint64_t place_;
};

}  // namespace ringway::shm
