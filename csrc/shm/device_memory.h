// The CUDA memory that the ranks of a group show each other.
//
// A rank offers the memory of a call to the others: for each span of it an IPC handle of the allocation that holds it, and an
// offset. An allocation is the driver's, a segment of torch's allocator, so it holds many tensors. Each has a slot here as
// long as it exists. The offer says which slots are live. A rank that accepts an offer opens each allocation once, keeps it
// open, and closes what is no longer live. The driver's buffer id tells an allocation from a later one at the same address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "device/driver.h"

namespace ringway::shm {

inline constexpr int kDeviceRanks = 8;

// A piece of device memory.
struct Span {
    uint64_t address = 0;
    int64_t bytes = 0;
};

// Calls that a thread may make while it captures a graph although they are no part of it.
class Relaxed {
  public:
    explicit Relaxed(const device::Driver& driver);
    ~Relaxed();
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

  private:
    const device::Driver& driver_;
    int mode_;
};

class DeviceMemory {
  public:
    static constexpr int kSlots = 64;  // a word of bits in an offer
    // Where another rank finds a span: its slot is -1 for an empty one.
    struct Region {
        int64_t slot;
        uint64_t offset;
        int64_t bytes;
        device::IpcHandle handle;
    };
    // A span of another rank: the rank, and the place of the span in its offer.
    using Wanted = std::pair<int, int>;

    // `drain` waits until the device uses no memory of others; whether that succeeded.
    DeviceMemory(const device::MemoryDriver& driver, device::Context context, int rank, int size, std::function<bool()> drain);
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    // The bytes that offer these spans, at most one for each rank. Empty, and `refused` the first such span, if memory
    // cannot be shared. With `keep`, the slots are kept until the end: a graph uses the memory again.
    std::vector<std::byte> offer(const std::vector<Span>& spans, bool keep, int& refused);
    // The wanted spans, mapped here. `offers` has the offer of every rank.
    std::vector<Span> accept(const std::byte* offers, size_t bytes, const std::vector<Wanted>& wanted, bool keep);
    static size_t offer_bytes();
    // The bytes of a span of an offer.
    static int64_t offered(const std::byte* offer, size_t bytes, int place);

    // One span, without an offer. The slot of what cannot be shared is -1.
    Region show(const Span& span, bool keep);
    // Maps a span that another rank shows.
    Span open(int peer, const Region& region, bool keep);

    // Memory that can always be shared. `try_allocate` returns 0 if there is none.
    uint64_t allocate(size_t bytes);
    uint64_t try_allocate(size_t bytes);
    void free(uint64_t address);
    int open_mappings();
    // Closes all mappings and frees what was allocated. Nothing may use it any more.
    void close();

  private:
    struct Offer {
        uint64_t live;
        Region regions[kDeviceRanks];
    };
    struct Slot {
        uint64_t id = 0;  // the driver's number of the allocation; 0 for a free slot
        uint64_t base = 0;
        uint64_t used = 0;
        bool keep = false;
        device::IpcHandle handle;
    };
    struct Opened {
        uint64_t base = 0;  // 0 if nothing is open
        bool keep = false;
        device::IpcHandle handle;
    };

    int slot_of(const Span& span, uint64_t& offset);
    Region region_of(const Span& span, bool keep);
    Span mapped(int peer, const Region& region, bool keep);
    bool still_there(const Slot& slot) const;
    void forget_freed();
    void close_mapping(Opened& opened);

    const device::MemoryDriver& driver_;
    const device::Context context_;
    const int rank_;
    const int size_;
    const std::function<bool()> drain_;
    std::mutex lock_;  // what follows
    std::vector<Slot> slots_{kSlots};
    uint64_t uses_ = 0;
    size_t checked_ = 0;
    std::vector<std::vector<Opened>> opened_;
    std::vector<uint64_t> allocated_;
};

}  // namespace ringway::shm
