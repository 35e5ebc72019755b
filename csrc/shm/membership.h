// One rank's membership of a group: who the others are, whether they live, and what has gone wrong.
//
// The first fault of a group is written into the segment once; from then on every rank finds it there, at the
// call it is in or at its next. A group with a fault does nothing any more.
#pragma once

#include <atomic>
#include <vector>

#include "shm/segment.h"
#include "shm/wait.h"

namespace ringway::shm {

struct Peer {
    int pid = 0;
    int pidfd = -1;  // owned; -1 where the kernel has none
};

enum class Outcome { Done, Faulted, Interrupted, Closed, Forked };

// Thrown where a call cannot go on.
struct Unfinished {
    Outcome outcome;
};

class Membership {
  public:
    // `cpus`: how many the processes of the group may use together.
    Membership(std::shared_ptr<Mapping> mapping, int rank, std::vector<Peer> peers, int cpus);
    ~Membership();
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    Segment& segment() { return segment_; }
    bool ranks_fit_cpus() const { return size_ <= cpus_; }

    // Whether calls can be made at all; throws Unfinished if not. Costs two loads.
    void check();
    bool forked() const;
    bool faulted() const { return segment_.header().fault.state.load(std::memory_order_seq_cst) != 0; }
    // The fault, once it is readable; null if there is none.
    const Fault* fault() const;

    // Writes the group's first fault; a later one is dropped. `fill` gets the record to complete.
    template <class Fill>
    void report(FaultKind kind, const CallFacts& own, const Fill& fill) {
        Fault* fault = claim(kind, own);
        if (fault == nullptr) return;
        fill(*fault);
        publish(*fault);
    }
    // `bytes` is 0 where it was a thread that could not be had.
    void report_memory(const CallFacts& own, int64_t bytes);
    void report_timeout(const CallFacts& own, double waited, const std::vector<int>& missing);
    void report_corrupt(const CallFacts& own, int peer);
    void report_interrupted();
    void abort();

    // Ends this rank's waits and tells the others that it will not come again.
    void leave();
    bool left() const { return leaving_.load(std::memory_order_seq_cst); }

    // Whether a wait for `peer` (or kAnyone) is in vain: a fault, a close, or the peer is gone and what it was to do
    // is not `ready`, which is then reported. `own` is the call that waits.
    bool stop(int peer, bool look_for_dead, const CallFacts& own, const Look& ready);

  private:
    bool dead(int peer);
    bool gone(int peer, bool look_for_dead, const CallFacts& own, const Look& ready);
    void wake_everybody();
    Fault* claim(FaultKind kind, const CallFacts& own);
    void publish(Fault& fault);
    void hold_lock();

    int rank_;
    int size_;
    int cpus_;
    uint32_t born_in_;  // generation of forks
    Segment segment_;
    std::vector<Peer> peers_;
    std::atomic<bool> leaving_{false};
};

}  // namespace ringway::shm
