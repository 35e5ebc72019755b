// The memory of the recorder's ring: private to the process, or a file that outlives it.
//
//   header | slots | texts
//
// The texts only grow: they say what each id stands for (a group, a label, a line of the program). Nothing is flushed:
// the pages belong to the kernel, which keeps them however the process dies.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "record/callsite.h"
#include "record/record.h"

namespace ringway {

struct alignas(64) Slot {
    std::atomic<uint64_t> token{0};
    Entry entry;
    std::atomic<int64_t> completed_ns{0};
    std::atomic<int64_t> started_ns{0};
    std::atomic<uint32_t> stream{0};
    std::atomic<uint8_t> beside{0};
    std::atomic<uint8_t> state{0};
};

// Fills `out` and returns true if the slot holds the whole record `token`.
bool read_slot(const Slot& slot, uint64_t token, Entry& out);

struct RecordHeader {
    char magic[8];
    uint32_t layout;
    uint32_t slot_bytes;
    uint64_t capacity;
    uint64_t text_bytes;
    int64_t pid;
    int64_t started_unix_ns;
    int64_t started_ns;
    std::atomic<uint64_t> next;
    std::atomic<uint64_t> text_used;
};

enum class TextKind : uint32_t { Text = 0, Site = 1 };

// By id: groups and labels, and lines of the program.
struct Texts {
    std::unordered_map<uint32_t, std::string> texts;
    std::unordered_map<uint32_t, CallSite> sites;
};

class RecordFile {
  public:
    // With an empty path the ring is private memory and keeps no texts. A file that exists becomes `path`.previous: another
    // job may have mapped it, or it is what the run before left.
    RecordFile(size_t capacity, const std::string& path);
    ~RecordFile();
    RecordFile(const RecordFile&) = delete;
    RecordFile& operator=(const RecordFile&) = delete;

    // Maps what another process left. Throws if it is not a recorder's file.
    explicit RecordFile(const std::string& path);

    RecordHeader& header() const { return *header_; }
    Slot& slot(uint64_t token) const { return slots_[token % capacity_]; }
    size_t capacity() const { return capacity_; }
    bool keeps_texts() const { return text_bytes_ != 0; }

    // The latest `count` records, or those of them that have not ended; oldest first.
    std::vector<Entry> recent(size_t count, bool only_pending = false) const;
    uint64_t total() const { return header_->next.load(std::memory_order_acquire) - 1; }

    // Keeps nothing once the room for texts is used up. Not thread-safe.
    void keep(TextKind kind, uint32_t id, int32_t line, const std::string& text);
    // What `keep` has kept, in a file that another process may still be writing.
    Texts texts() const;

  private:
    void* base_ = nullptr;
    size_t bytes_ = 0;
    RecordHeader* header_ = nullptr;
    Slot* slots_ = nullptr;
    char* texts_ = nullptr;
    size_t capacity_ = 0;
    size_t text_bytes_ = 0;
};

}  // namespace ringway
