// The memory that the ranks of one group share: a memfd that each of them maps.
//
//   header          identity, the fault record, one waiting word per rank and channel
//   ring controls   one per ordered pair
//   fronts          one per rank: its counters, the facts of its latest calls, its entries
//   stream words    one page, on which the ranks' CUDA streams wait for each other (shm/device_link.h)
//   cells           one set per rank: large calls stream through them
//   ring data       one per ordered pair: point-to-point bytes in flight
//
// A rank writes to its own front and cells and to the rings it sends on. All others only read them, except that a ring's
// receiver moves the ring's tail. Pages are reserved before they are touched (fallocate): the first four parts when the
// segment is created, cells and ring data by their writer at first use. So running out of memory is an error that can be
// reported, never a SIGBUS.
//
// Every word that ranks synchronize on is written and read with sequential consistency: a waiter announces itself and
// looks again, a poster posts and looks for waiters, and at least one of them must see what the other wrote.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "codes.h"

namespace ringway::shm {

inline constexpr int kMaxRanks = 512;
inline constexpr size_t kLine = 64;
inline constexpr int kEntrySlots = 2;  // a rank is at most one call ahead of another
inline constexpr int kCells = 4;       // depth of the pipeline of a large call
inline constexpr size_t kTextBytes = 128;
inline constexpr size_t kStreamWordBytes = 4096;

inline constexpr std::memory_order kPublish = std::memory_order_seq_cst;
inline constexpr std::memory_order kObserve = std::memory_order_seq_cst;
// How a rank observes that another has come to a call. tests/native removes this one acquire, to show that
// ThreadSanitizer would notice.
#ifdef RINGWAY_BREAK_ACQUIRE
inline constexpr std::memory_order kObserveEntry = std::memory_order_relaxed;
#else
inline constexpr std::memory_order kObserveEntry = kObserve;
#endif

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free, "counters are shared between processes");

// A rank's call, with enough facts to print both sides of a mismatch.
struct CallFacts {
    uint64_t number;  // the call's number, as users see it
    int64_t count;
    double factor;
    int32_t root;
    Op op;
    DType dtype;
    Reduce reduce;
    uint32_t site;
    char place[kTextBytes];  // the line of the program that made the call
};

// The first cache line of a call: that the rank has come, what it called, and the beginning of its data. The data of a
// small call follows in one piece, so that eight floats travel in the cache line that says "here I am".
struct alignas(kLine) Entry {
    Counter sequence;
    uint64_t signature;
    std::byte payload[kLine - 16];
};
static_assert(sizeof(Entry) == kLine);

enum class FaultKind : int32_t {
    None = 0,
    Mismatch,     // `reporter` saw that `rank` called something else
    PeerLost,     // the process of `rank` is gone
    PeerLeft,     // `rank` closed its end while others still needed it
    Timeout,      // `reporter` gave up waiting for the ranks in `missing`
    Interrupted,  // `rank` was interrupted (Ctrl-C) in the middle of a call
    Aborted,      // `rank` aborted the group
    Memory,       // `rank` could not reserve `bytes`
    Corrupt,      // `rank` corrupted the group's shared memory, as `reporter` found
    Unreadable,   // `reporter` could not read the memory of `rank`
};

// What one rank sends and another expects, if those differ.
struct Pair {
    int32_t from, to;
    int64_t sent, expected;
};

struct Fault {
    std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
    FaultKind kind;
    int32_t reporter;
    int32_t rank;
    int32_t pid;
    int32_t signal;
    int64_t bytes;
    double waited;
    uint64_t missing[kMaxRanks / 64];
    CallFacts own;     // the reporter's call
    CallFacts theirs;  // what `rank` called, for a mismatch
    Pair pair;         // for a mismatch in the middle of an all_to_all or a message; else from == to
    char reason[256];  // why there is no memory, or it cannot be read
};

struct Header {
    uint64_t magic;
    uint64_t layout;
    int32_t size;
    Fault fault;
    alignas(kLine) std::atomic<uint32_t> waiting[kMaxRanks];      // in a collective: rank waited for, plus 1
    alignas(kLine) std::atomic<uint32_t> waiting_p2p[kMaxRanks];  // likewise in point-to-point
    alignas(kLine) std::atomic<uint32_t> cpu[kMaxRanks];      // where the rank last waited in a collective, plus 1
    alignas(kLine) std::atomic<uint32_t> cpu_p2p[kMaxRanks];  // likewise in point-to-point
    alignas(kLine) std::atomic<uint8_t> joined[kMaxRanks];
    alignas(kLine) std::atomic<uint8_t> left[kMaxRanks];
    alignas(kLine) std::atomic<int32_t> have_cells;
    // The fewest and the most bytes of a block that the rank reads in the others' memory; 0 until it has joined.
    alignas(kLine) std::atomic<int64_t> reads_from[kMaxRanks];
    alignas(kLine) std::atomic<int64_t> reads_to[kMaxRanks];
};

struct RankControl {
    alignas(kLine) Counter produced;   // steps of large calls whose input parts this rank has laid out
    alignas(kLine) Counter combined;   // steps whose parts it has taken from the others (and reduced)
    alignas(kLine) Counter collected;  // steps whose results it has taken
    alignas(kLine) CallFacts facts[kEntrySlots];
};

// What has become of the message that stays in its sender's memory for the receiver to read it there.
enum class Offer : uint32_t { None, Open, Taken, Withdrawn };

// The bytes in flight of an ordered pair. Both positions only grow.
struct RingControl {
    alignas(kLine) Counter head;  // moved by the sender
    std::atomic<Offer> offer;     // of the ring's first message, which is offered only if the ring is empty
    alignas(kLine) Counter tail;  // moved by the receiver
};

struct Geometry {
    explicit Geometry(int size);

    size_t entry_bytes;  // one entry slot, header line included
    size_t cell_bytes;   // one in-cell
    size_t out_bytes;    // one out-cell
    size_t ring_bytes;   // data of one ring, a power of two
    size_t rings_at;     // the offset of each part
    size_t fronts_at;
    size_t front_bytes;
    size_t words_at;
    size_t cells_at;
    size_t cells_bytes;
    size_t ring_data_at;
    size_t total;
};

// Memory that is unavailable, and how much of it was needed.
struct OutOfMemory : std::bad_alloc {
    OutOfMemory(std::string text, int64_t bytes) : text(std::move(text)), bytes(bytes) {}
    const char* what() const noexcept override { return text.c_str(); }
    std::string text;
    int64_t bytes;
};

// A segment in this process's memory. Ranks that are threads of one process (in tests) share one.
class Mapping {
  public:
    // Owns the descriptor from here on.
    Mapping(int fd, int size);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    const int fd;
    const int size;
    const Geometry geometry;
    std::byte* base;
};

// The segment as one rank uses it.
class Segment {
  public:
    // A new memfd that holds a segment for `size` ranks. Throws OutOfMemory.
    static int create(int size);

    Segment(std::shared_ptr<Mapping> mapping, int rank);

    const Geometry& geometry() const { return geometry_; }
    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    RankControl& control(int rank) const { return *reinterpret_cast<RankControl*>(front(rank)); }
    Entry& entry(int rank, uint64_t sequence) const {
        return *reinterpret_cast<Entry*>(front(rank) + kEntriesAt + (sequence % kEntrySlots) * geometry_.entry_bytes);
    }
    std::byte* in_cell(int rank, uint64_t step) const {
        return cells(rank) + (step % kCells) * geometry_.cell_bytes;
    }
    std::byte* out_cell(int rank, uint64_t step) const {
        return cells(rank) + kCells * geometry_.cell_bytes + (step % kCells) * geometry_.out_bytes;
    }
    RingControl& ring(int from, int to) const {
        return reinterpret_cast<RingControl*>(base_ + geometry_.rings_at)[pair(from, to)];
    }
    std::byte* ring_data(int from, int to) const {
        return base_ + geometry_.ring_data_at + geometry_.ring_bytes * pair(from, to);
    }
    uint32_t* stream_words() const { return reinterpret_cast<uint32_t*>(base_ + geometry_.words_at); }
    int fd() const { return mapping_->fd; }
    size_t payload_capacity() const { return geometry_.entry_bytes - offsetof(Entry, payload); }

    // The writer calls these before it first writes to its cells, and to the ring to `to`. Throw OutOfMemory. `writers`
    // ranks need cells for this call: there must be memory for all that do not have them yet, or none takes any.
    void reserve_cells(int writers);
    void reserve_ring(int to);

    static constexpr size_t kEntriesAt = (sizeof(RankControl) + 4095) / 4096 * 4096;

  private:
    std::byte* front(int rank) const { return base_ + geometry_.fronts_at + geometry_.front_bytes * rank; }
    std::byte* cells(int rank) const { return base_ + geometry_.cells_at + geometry_.cells_bytes * rank; }
    size_t pair(int from, int to) const { return static_cast<size_t>(from) * size_ + to; }

    std::shared_ptr<Mapping> mapping_;
    int rank_;
    int size_;
    const Geometry& geometry_;
    std::byte* base_;
    bool cells_reserved_ = false;
};

}  // namespace ringway::shm
