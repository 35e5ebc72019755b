// Where the recorder's ring lies: in memory of the process, or in a file that outlives it.
//
//   header | slots | texts
//
// The texts are a list that only grows: what an id stands for (a group, a label, a line of the program). Nothing
// is flushed: the pages belong to the system, which keeps them when the process dies, whatever killed it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "record/record.h"

namespace ringway {

struct alignas(64) Slot {
    std::atomic<uint64_t> token{0};
    Entry entry;
    std::atomic<int64_t> completed_ns{0};
    std::atomic<uint8_t> state{0};
};

// Whether the slot holds the record `token`, whole; it is then in `out`.
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

// One entry of the texts: `length` bytes follow, padded to eight. A site's line is in `line`.
struct TextEntry {
    TextKind kind;
    uint32_t id;
    int32_t line;
    uint32_t length;
};

class RecordFile {
  public:
    // With an empty path the ring is private memory and keeps no texts.
    RecordFile(size_t capacity, const std::string& path);
    ~RecordFile();
    RecordFile(const RecordFile&) = delete;
    RecordFile& operator=(const RecordFile&) = delete;

    // What another process left. Throws where the file is not one of ours.
    explicit RecordFile(const std::string& path);

    RecordHeader& header() const { return *header_; }
    Slot& slot(uint64_t token) const { return slots_[token % capacity_]; }
    size_t capacity() const { return capacity_; }
    bool keeps_texts() const { return text_bytes_ != 0; }

    // Not for two threads at a time. Past the room for texts nothing is kept.
    void keep(TextKind kind, uint32_t id, int32_t line, const std::string& text);
    const char* texts() const { return texts_; }

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
