// The recorder: a fixed ring of the latest collective calls of this process, always on.
//
// Writers are the threads that issue and complete calls; a reader may look at any time. A record is written in
// two strokes (begin, end), and its `token` is stored last at begin and checked around every read, so that a
// reader drops a record that was overwritten under it instead of showing half of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "codes.h"

namespace ringway {

enum class State : uint8_t { Issued = 0, Completed = 1, Failed = 2 };

// Nanoseconds of the system's monotonic clock: one clock for all processes of a host.
int64_t monotonic_ns();

struct Entry {
    uint64_t token = 0;
    uint64_t sequence = 0;
    int64_t bytes = 0;
    int64_t issued_ns = 0;
    int64_t completed_ns = 0;
    uint32_t group = 0;
    uint32_t label = 0;
    uint32_t site = 0;
    int32_t peer = -1;
    Op op = Op::Barrier;
    DType dtype = DType::Unknown;
    Reduce reduce = Reduce::Sum;
    State state = State::Issued;
};

class Recorder {
  public:
    explicit Recorder(size_t capacity);

    // A record's token counts from 1; it names the record as long as the ring has not come round.
    uint64_t begin(const Entry& call);
    void end(uint64_t token, State state);
    // The record's entry, if the ring still holds it.
    bool find(uint64_t token, Entry& out) const;
    // The latest `count` records, oldest first.
    std::vector<Entry> recent(size_t count) const;

    uint64_t total() const { return next_.load(std::memory_order_acquire) - 1; }
    size_t capacity() const { return ring_.size(); }

    // Small numbers for texts (group names, labels). Bounded: a text past the limit becomes "…".
    uint32_t intern(const std::string& text);
    std::string text(uint32_t id) const;

  private:
    struct alignas(64) Slot {
        std::atomic<uint64_t> token{0};
        Entry entry;
        std::atomic<int64_t> completed_ns{0};
        std::atomic<uint8_t> state{0};
    };
    bool read(const Slot& slot, uint64_t token, Entry& out) const;

    std::vector<Slot> ring_;
    std::atomic<uint64_t> next_{1};
    mutable std::mutex texts_lock_;
    std::vector<std::string> texts_;
    std::unordered_map<std::string, uint32_t> text_ids_;
};

// One group's line into the recorder: it numbers the group's calls.
class Lane {
  public:
    Lane(std::shared_ptr<Recorder> recorder, const std::string& group);

    // Numbers the call and records it. Collectives and point-to-point calls are counted apart, because only
    // the former come in the same order on every rank.
    uint64_t begin(Op op, int64_t bytes, DType dtype, Reduce reduce, int32_t peer, uint32_t label, uint32_t site);
    void end(uint64_t token, State state);

    uint64_t collectives() const { return collectives_.load(std::memory_order_relaxed); }
    uint64_t messages() const { return messages_.load(std::memory_order_relaxed); }
    uint64_t completed() const { return completed_.load(std::memory_order_relaxed); }
    Recorder& recorder() { return *recorder_; }

  private:
    std::shared_ptr<Recorder> recorder_;
    uint32_t group_;
    std::atomic<uint64_t> collectives_{0};
    std::atomic<uint64_t> messages_{0};
    std::atomic<uint64_t> completed_{0};
};

}  // namespace ringway
