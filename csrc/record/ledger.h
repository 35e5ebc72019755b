// The logger's books: for each kind of call (op, label, size of message, size of group), the number of calls and a
// histogram of their durations. Updated at the end of each call, so nothing is copied, queued or waited for. Bounded
// whatever the program does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "record/record.h"

namespace ringway {

// What is logged. `ops` is a bit for each op's code.
struct LedgerChoice {
    bool enabled = false;
    bool all = true;
    bool by_caller = false;
    uint64_t ops = 0;
    std::unordered_set<uint32_t> labels;
};

// Durations in buckets an eighth of an octave wide, so percentiles are accurate to 6 %.
class Histogram {
  public:
    static constexpr int kBuckets = 336;

    void add(int64_t ns);
    int64_t percentile(double share) const;

    uint64_t count = 0;
    int64_t total_ns = 0;
    int64_t max_ns = 0;

  private:
    uint64_t buckets_[kBuckets] = {};
};

struct Kind {
    uint8_t op = 0;  // kUserOp if the label is the name of a user's own op
    uint32_t label = 0;
    uint32_t site = 0;
    int32_t size = 1;
    int64_t bytes = 0;
    bool operator==(const Kind& other) const {
        return op == other.op && label == other.label && site == other.site && size == other.size &&
               bytes == other.bytes;
    }
};
inline constexpr uint8_t kUserOp = 255;

class Ledger {
  public:
    void choose(LedgerChoice choice);
    bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

    // A call that has succeeded.
    void add(const Entry& call);
    // A call that was not recorded, or whose duration is known only later (CUDA). With `always`, whatever is chosen.
    void add(const Kind& kind, int64_t ns, bool always = false);

    struct Row {
        Kind kind;
        uint64_t count;
        int64_t total_ns, max_ns, p50_ns, p99_ns;
    };
    std::vector<Row> rows() const;
    // The latest collectives, oldest first: ranks compare when each of them arrived.
    std::vector<Entry> arrivals() const;
    void reset();

  private:
    struct KindHash {
        size_t operator()(const Kind& kind) const;
    };
    bool chosen(uint8_t op, uint32_t label) const;
    void add_locked(Kind kind, int64_t ns);

    std::atomic<bool> enabled_{false};
    mutable std::mutex lock_;
    LedgerChoice choice_;
    std::unordered_map<Kind, std::unique_ptr<Histogram>, KindHash> books_;
    std::vector<Entry> arrivals_;
    uint64_t arrived_ = 0;
};

}  // namespace ringway
