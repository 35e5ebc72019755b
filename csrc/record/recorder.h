// The recorder: a fixed ring of the latest collective calls of this process, always on.
//
// Writers are the threads that issue and complete calls; a reader may look at any time. A record is written in
// two strokes (begin, end), and its `token` is stored last at begin and checked around every read, so that a
// reader drops a record that was overwritten under it instead of showing half of it.
//
// The ring and its texts may lie in a file, which then tells what a process did that is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "codes.h"
#include "record/ledger.h"
#include "record/record.h"
#include "record/record_file.h"

namespace ringway {

class Recorder {
  public:
    explicit Recorder(size_t capacity, const std::string& path = "");

    // A record's token counts from 1; it names the record as long as the ring has not come round.
    uint64_t begin(const Entry& call);
    void end(uint64_t token, State state);
    // The record's entry, if the ring still holds it.
    bool find(uint64_t token, Entry& out) const;
    // The latest `count` records, oldest first.
    std::vector<Entry> recent(size_t count) const;
    // Those of the ring that have not ended, oldest first.
    std::vector<Entry> under_way() const;

    uint64_t total() const { return file_.header().next.load(std::memory_order_acquire) - 1; }
    size_t capacity() const { return file_.capacity(); }

    // Small numbers for texts (group names, labels). Bounded: a text past the limit becomes "…".
    uint32_t intern(const std::string& text);
    std::string text(uint32_t id) const;
    // The number of a new group. An earlier one of the same name, destroyed by now, is "name~1" from here on, the
    // next "name~2", so that their calls are not taken for the new one's.
    uint32_t group(const std::string& name);

    Ledger& ledger() { return ledger_; }

    // While a trace is kept, every call that ends is added to it, up to `limit`.
    void start_trace(size_t limit);
    struct Trace {
        std::vector<Entry> calls;
        uint64_t dropped = 0;
    };
    Trace stop_trace();

    // Whether somebody wants to know how long calls take.
    bool keeps_times() { return tracing_.load(std::memory_order_relaxed) || ledger_.enabled(); }

  private:
    Slot& slot(uint64_t token) const { return file_.slot(token); }
    void keep_site(uint32_t id);

    RecordFile file_;
    Ledger ledger_;
    mutable std::mutex texts_lock_;
    std::vector<std::string> texts_;
    std::unordered_map<std::string, uint32_t> text_ids_;
    struct Life {
        uint32_t id;
        int number;
    };
    std::unordered_map<std::string, Life> groups_;
    std::atomic<uint32_t> sites_kept_{1};
    std::atomic<bool> tracing_{false};
    std::mutex trace_lock_;
    size_t trace_limit_ = 0;
    Trace trace_;
};

// While a thread is quiet, what it issues is recorded but not logged: the logger's own traffic.
void set_quiet(bool quiet);
bool is_quiet();

}  // namespace ringway
