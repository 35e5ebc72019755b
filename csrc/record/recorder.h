// The recorder: a fixed ring of the latest collective calls of this process, always on.
//
// The threads that issue and complete calls write; a reader may read at any time. A record is written in two steps
// (begin, end). Its `token` is stored last at begin and checked before and after every read, so a reader drops a record
// that was overwritten during the read instead of showing half of it.
//
// The ring and its texts may be in a file, which then tells what a process did that has died.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "record/ledger.h"
#include "record/record.h"
#include "record/record_file.h"

namespace ringway {

class Recorder {
  public:
    explicit Recorder(size_t capacity, const std::string& path = "");

    // Tokens count from 1. A token names its record until the ring wraps.
    uint64_t begin(const Entry& call);
    void end(uint64_t token, State state, const DeviceTimes& times = {});
    // The record's entry, if the ring still holds it.
    bool find(uint64_t token, Entry& out) const;
    // The latest `count` records, oldest first.
    std::vector<Entry> recent(size_t count) const { return file_.recent(count); }
    // The records that have not ended, oldest first.
    std::vector<Entry> under_way() const { return file_.recent(capacity(), true); }

    uint64_t total() const { return file_.total(); }
    size_t capacity() const { return file_.capacity(); }

    // Small numbers for texts (labels). Bounded: texts beyond the limit become "…".
    uint32_t intern(const std::string& text);
    std::string text(uint32_t id) const;
    // The number of a new group. Earlier groups of the same name, destroyed by now, become "name~1", "name~2" and so on,
    // so that their calls are not mistaken for the new group's.
    uint32_t group(const std::string& name);

    Ledger& ledger() { return ledger_; }

    // While a trace runs, every call that ends is added to it, up to `limit` calls.
    void start_trace(size_t limit);
    struct Trace {
        std::vector<Entry> calls;
        uint64_t dropped = 0;
    };
    Trace stop_trace();

    // Whether anything uses the durations of calls.
    bool keeps_times() { return tracing_.load(std::memory_order_relaxed) || ledger_.enabled(); }

  private:
    uint32_t add_text(const std::string& text);
    void keep_site(uint32_t newest);

    RecordFile file_;
    Ledger ledger_;
    mutable std::mutex texts_lock_;
    std::vector<std::string> texts_;
    std::unordered_map<std::string, uint32_t> text_ids_;
    struct Life {
        uint32_t id = 0;
        int number = 0;
    };
    std::unordered_map<std::string, Life> groups_;  // the latest group of each name
    std::atomic<uint32_t> sites_kept_{1};
    std::atomic<bool> tracing_{false};
    std::mutex trace_lock_;
    size_t trace_limit_ = 0;
    Trace trace_;
};

// The calls of a quiet thread are recorded but not logged. The logger makes its own calls so.
void set_quiet(bool quiet);
bool is_quiet();

// The calls of a profiled thread are logged whatever their op, as long as the logger is on. For `prof=True`.
void set_profiled(bool profiled);
bool is_profiled();

}  // namespace ringway
