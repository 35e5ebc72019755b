// One rank's membership of a group: who the others are, whether they live, and what has gone wrong.
//
// The first fault of a group is written into the segment, once. From then on every rank finds it there, in its current
// call or in its next one. A group with a fault makes no more calls.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "shm/peer_memory.h"
#include "shm/segment.h"
#include "shm/wait.h"

namespace ringway::shm {

// The process of a rank. All groups that a process shares with another use one pidfd for it, so that descriptors do not
// grow with the number of groups.
class Peer {
  public:
    // Owns the descriptor from here on.
    Peer(int pid, int pidfd) : pid(pid), pidfd(pidfd) {}
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    const int pid;
    const int pidfd;  // -1 if the kernel has none
};

using Peers = std::vector<std::shared_ptr<const Peer>>;

enum class Outcome { Done, Faulted, Interrupted, Closed, Forked };

// Thrown when a call cannot go on.
struct Unfinished {
    Outcome outcome;
};

class Membership {
  public:
    // `cpus` is the number of CPUs that the processes of the group may use together.
    Membership(std::shared_ptr<Mapping> mapping, int rank, Peers peers, int cpus);
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    Segment& segment() { return segment_; }
    bool ranks_fit_cpus() const { return size_ <= cpus_; }

    // Throws Unfinished if no calls can be made any more. Costs two loads.
    void check();
    bool forked() const;
    bool faulted() const { return segment_.header().fault.state.load(std::memory_order_seq_cst) != 0; }
    // The fault, once it is readable; null while there is none.
    const Fault* fault() const;

    // Writes the group's fault, unless there is one already: later faults are dropped. `fill` completes the record.
    void report(FaultKind kind, int rank, const CallFacts& own, const std::function<void(Fault&)>& fill = {});
    // `bytes` is 0 if it was a thread that could not be started.
    void report_memory(const CallFacts& own, int64_t bytes, const char* reason = "") {
        report(FaultKind::Memory, rank_, own, [&](Fault& fault) {
            fault.bytes = bytes;
            std::strncpy(fault.reason, reason, sizeof fault.reason - 1);
        });
    }
    void report_timeout(const CallFacts& own, double waited, const std::vector<int>& missing);
    void report_interrupted() { report(FaultKind::Interrupted, rank_, CallFacts{}); }
    void abort() { report(FaultKind::Aborted, rank_, CallFacts{}); }

    // The blocks that a rank reads in the memory of others (peer_memory.h); and whether all read one of this size, once all
    // have joined.
    ReadSizes reads(int rank) const;
    bool all_read(int64_t bytes) const;
    // Copies from the memory of `peer`, which is in a call with this rank. Throws Unfinished if the peer is gone.
    void read(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own);
    // Likewise. False if the kernel does not let this rank, or does not copy this kind of memory, as that of a device: then a
    // part may have been copied.
    bool read_if_possible(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own);

    // Ends this rank's waits, and tells the others that it makes no more calls.
    void leave();
    bool left() const { return leaving_.load(std::memory_order_seq_cst); }
    bool has_left(int peer) const { return segment_.header().left[peer].load(std::memory_order_seq_cst) != 0; }
    // Whether the peer's process has ended.
    bool has_ended(int peer);

    // Whether a wait for `peer` (or kAnyone) can no longer succeed: there is a fault, this rank has closed, or the peer is
    // gone and what it had to do is not `ready`. That last case is then reported. `own` is the call that waits.
    bool stop(int peer, bool look_for_dead, const CallFacts& own, const Look& ready);

  private:
    int try_to_read(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own);
    [[noreturn]] void unreadable(int peer, int error, const CallFacts& own);
    bool gone(int peer, bool look_for_dead, const CallFacts& own, const Look& ready);
    void wake_everybody();

    int rank_;
    int size_;
    int cpus_;
    uint32_t born_in_;  // the generation of forks
    Segment segment_;
    Peers peers_;
    std::vector<int> pids_;  // as this process sees them
    std::atomic<bool> leaving_{false};
};

}  // namespace ringway::shm
