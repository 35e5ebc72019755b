// Entries and waiting; the ops themselves are in algorithms.cpp.
#include "shm/collectives.h"

#include <cstring>
#include <new>

#include "agreement.h"

namespace ringway::shm {

Collectives::Collectives(Membership& members)
    : members_(members),
      segment_(members.segment()),
      rank_(members.rank()),
      size_(members.size()),
      waiter_(segment_.header().waiting, segment_.header().cpu, rank_, size_, members.ranks_fit_cpus(), *this),
      facts_(&segment_.control(rank_).facts[0]),
      compared_(static_cast<size_t>(size_)),
      sources_(static_cast<size_t>(size_)),
      factors_(static_cast<size_t>(size_)) {}

Outcome Collectives::run(const Request& request, Host& host) {
    Frame frame{request};
    frame_ = &frame;
    return go_on(frame, host);
}

// Runs the call to its end, or continues one that was interrupted. Once the call has ended, this object may be running
// another one, perhaps on another thread.
Outcome Collectives::go_on(Frame& frame, Host& host) {
    FrameHost frame_host(host, frame);
    Patience patience(frame.request.timeout_s, frame_host);
    patience.since_ns = frame.since_ns;
    patience_ = &patience;
    Outcome outcome = Outcome::Done;
    try {
        members_.check();
        if (!frame.begun) begin(frame.request);
        frame.begun = true;
        dispatch(frame.request);
    } catch (const Unfinished& unfinished) {
        outcome = unfinished.outcome;
    } catch (const OutOfMemory& error) {
        members_.report_memory(*facts_, error.bytes, error.what());
        outcome = Outcome::Faulted;
    } catch (const std::bad_alloc&) {
        members_.report_memory(*facts_, frame.request.count * frame.request.element);
        outcome = Outcome::Faulted;
    }
    if (!frame.ended) frame.outcome = outcome;
    frame.ended = true;
    return outcome;
}

void Collectives::begin(const Request& request) {
    check_previous();
    ++sequence_;
    if (!apart_.empty()) std::vector<std::byte>().swap(apart_);
    describe(request);
}

// Before a rank posts a call, it checks that every rank has come to the previous one and called the same. So a call in
// which a rank waits for nobody (the root of a broadcast) is compared one call later at the latest. And an entry slot that
// is used again has been read by all: a rank that came to the call after it is done with it.
void Collectives::check_previous() {
    for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_ && compared_[static_cast<size_t>(peer)] != sequence_) compare_with(peer);
}

void Collectives::describe(const Request& r) {
    facts_ = &own().facts[sequence_ % kEntrySlots];
    fill_facts(r, *facts_);
    if (facts_->site != r.site) {
        facts_->site = r.site;
        std::strncpy(facts_->place, r.place, kTextBytes - 1);
    }
    signature_ = signature(r.op, r.count, r.dtype, r.reduce, r.root);
    if (reduces(r.op)) reducer_ = find_reducer(r.dtype, r.reduce);
}

// Posts that this rank has come. Small data is already in the entry.
void Collectives::announce() {
    if (announced()) return;
    Entry& entry = segment_.entry(rank_, sequence_);
    entry.signature = signature_;
    post(entry.sequence, sequence_);
}

// Waits until the peer has come to this call, and compares what it called.
void Collectives::compare_with(int peer) {
    const Entry& entry = segment_.entry(peer, sequence_);
    wait(peer, [&] { return entry.sequence.load(kObserveEntry) >= sequence_; });
    if (entry.signature != signature_) mismatch(peer, {});
    compared_[static_cast<size_t>(peer)] = sequence_;
}

void Collectives::compare_with_all() {
    for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_) compare_with(peer);
}

void Collectives::mismatch(int peer, const Pair& pair) {
    members_.report(FaultKind::Mismatch, peer, *facts_, [&](Fault& fault) {
        fault.theirs = segment_.control(peer).facts[sequence_ % kEntrySlots];
        fault.pair = pair;
    });
    throw Unfinished{Outcome::Faulted};
}

void Collectives::give_up(Waking why, int peer) {
    if (why == Waking::Interrupted) {
        members_.report(FaultKind::Interrupted, rank_, *facts_);
        throw Unfinished{Outcome::Interrupted};
    }
    if (why == Waking::TimedOut) {
        members_.report_timeout(*facts_, patience_->waited_s(), late(peer));
        throw Unfinished{Outcome::Faulted};
    }
    throw Unfinished{members_.faulted() ? Outcome::Faulted : Outcome::Closed};
}

// The ranks to blame when the wait for `peer` times out: those that have not come to the call. If all have come, the rank
// that `peer` itself waits for, followed from rank to rank.
std::vector<int> Collectives::late(int peer) const {
    std::vector<int> missing;
    for (int other = 0; other < size_; ++other)
        if (other != rank_ && segment_.entry(other, sequence_).sequence.load(kObserve) < sequence_)
            missing.push_back(other);
    if (!missing.empty()) return missing;
    for (int hop = 0; hop < size_; ++hop) {
        const uint32_t awaited = segment_.header().waiting[peer].load(std::memory_order_seq_cst);
        if (awaited == 0 || awaited > static_cast<uint32_t>(size_) || static_cast<int>(awaited) - 1 == rank_) break;
        peer = static_cast<int>(awaited) - 1;
    }
    return {peer};
}

void Collectives::post(Counter& counter, uint64_t value) {
    counter.store(value, kPublish);
    waiter_.tell();
}

// Steps beyond `base_` belong to this call, so first make sure that the peer made the same call.
void Collectives::reach(int peer, Counter RankControl::*counter, uint64_t target) {
    if (peer == rank_) return;
    const Counter& value = segment_.control(peer).*counter;
    if (target > base_ && compared_[static_cast<size_t>(peer)] != sequence_) compare_with(peer);
    wait(peer, [&] { return value.load(kObserve) >= target; });
}

void Collectives::reach_all(int role, Counter RankControl::*counter, uint64_t target) {
    if (role == kNobody) return;
    if (role != kEverybody) return reach(role, counter, target);
    for (int turn = 1; turn < size_; ++turn) reach((rank_ + turn) % size_, counter, target);
}

}  // namespace ringway::shm
