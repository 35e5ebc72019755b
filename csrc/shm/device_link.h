// The CUDA streams of the ranks of one group. device_memory.h has the memory that they share.
//
// Order. Streams wait for each other on words of the group's segment, without the host and without a kernel that spins.
// A call begins with `arrive`: every rank's stream writes the call's number to the rank's first word, then waits until the
// first words of the others have reached it. It ends with `depart`, which does the same on the second words. If one rank
// does all the work, only that rank waits in `arrive`, and only the others wait in `depart`, for that rank alone.
//
// A call that is captured in a CUDA graph runs any number of times, so it has no number. It uses other words, two for each
// ordered pair of ranks. Every rank's stream writes 1 to the word of each pair that it is the first of, waits for each pair
// that it is the second of until that word is 1, and writes 0 again. A rank cannot write a word that was not yet reset: in
// between, it waits for a word that the other writes after the reset.
//
// Messages. A sender copies the tensor to a block of its own memory, waits for that copy, and sends a reference to the
// block. The receiver copies from it, and its stream then writes the message's number to the block's word. So the sender's
// stream never waits for the receiver's, and two ranks may both send first. The sender uses a block again once its word has
// the number. Without a free block, a message goes through the host.
//
// Faults. A thread follows the calls in flight. It reports a peer that is gone and a call that is overdue, like any other
// fault of the group. Once there is a fault, it writes what this rank's streams wait for to all these words, until the
// calls in flight have passed: their results are worthless, and no stream hangs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/driver.h"
#include "record/group_record.h"
#include "shm/device_memory.h"
#include "shm/engine.h"
#include "shm/launch_order.h"
#include "shm/message_blocks.h"

namespace ringway::shm {

// Distinguishes a direct call from one through the host when ranks compare: their bits of the amount are never that high.
inline constexpr uint64_t kDirect = uint64_t{1} << 34;

class DeviceLink {
  public:
    using Copy = std::pair<Span, uint64_t>;  // from a span, to an address

    // `device` is this process's number for the device. `record` may be null. It and `order` must outlive the link. Throws
    // std::runtime_error if the driver refuses.
    DeviceLink(std::shared_ptr<Engine> engine, const std::string& library, int device, GroupRecord* record,
               LaunchOrder& order);
    ~DeviceLink();
    DeviceLink(const DeviceLink&) = delete;
    DeviceLink& operator=(const DeviceLink&) = delete;

    // Whether processes share the GPU at the same time (MPS), and which GPU it is.
    bool has_mps() const;
    std::string uuid() const;
    int device_index() const { return index_; }
    LaunchOrder& order() const { return order_; }
    DeviceMemory& memory() { return memory_; }

    // Everything later on the stream comes after the calls in flight, unless it captures a graph.
    void follow(uintptr_t stream);
    // `worker` is the rank that does all the work of the call, or kEveryRank.
    static constexpr int kEveryRank = -1;
    void arrive(uintptr_t stream, int worker);
    bool is_capturing(uintptr_t stream) const;
    // The call ends with `copies`. If it has a record, that ends when the device has passed the call.
    void depart(uintptr_t stream, int worker, const CallFacts& facts, double timeout_s, const std::vector<Copy>& copies,
              std::optional<uint64_t> record = {});
    // Reduces or copies arrays of `count` numbers; see src/ringway/backends/shm/cuda_kernels.py.
    struct Kernel {
        void* function;
        unsigned threads;
        unsigned shared_bytes;
        int64_t block;  // numbers for each program
    };
    void launch(uintptr_t stream, const Kernel& kernel, const std::vector<uint64_t>& ins, const std::vector<uint64_t>& outs,
                int64_t count);
    void copy(uintptr_t stream, const std::vector<Copy>& copies);

    // Copies a message to a free block, once the stream has come to it, and fills the reference; false if there is none.
    bool stage(uintptr_t stream, const Span& message, int receiver, Message::Reference& reference);
    // The message with this reference was not sent.
    void unstage(const Message::Reference& reference);
    // Enqueues the copy of a message. Throws std::runtime_error if the reference is none.
    void fetch(uintptr_t stream, int sender, const Message::Reference& reference, const Span& message, const CallFacts& facts,
               double timeout_s, std::optional<uint64_t> record = {});

    // A small call through host memory: `bytes` of the input come from the device, and wait for what is before them on the
    // stream; the output goes back behind it. Both lie in memory that the device reaches quickly.
    static constexpr int64_t kBounceBytes = 256 << 10;
    // One call at a time may use that memory. Whether this one may; it gives it back in the end.
    bool take_bounce() { return !bouncing_.exchange(true); }
    void give_back_bounce() { bouncing_ = false; }
    std::byte* bounce_in() const { return bounce_; }
    std::byte* bounce_out() const { return bounce_ + kBounceBytes; }
    bool can_bounce(uintptr_t stream);
    void download(uintptr_t stream, uint64_t from, int64_t bytes);
    void upload(uintptr_t stream, uint64_t to, int64_t bytes);
    // The bounce memory of outputs may be written again: the last upload is done.
    void wait_for_upload();
    // Uploads from any memory, and waits for it.
    void upload_from(uintptr_t stream, uint64_t to, const std::byte* from, int64_t bytes);

    // Waits until no call is in flight on the device; whether that succeeded.
    bool drain(double seconds);
    // Idempotent. Unmaps the peers' memory once nothing uses it.
    void close();

  private:
    static constexpr size_t kMessageWords = 256;  // the words before these order calls
    static_assert((kMessageWords + kDeviceRanks * MessageBlocks::kBlocks) * sizeof(uint32_t) <= kStreamWordBytes);
    struct InFlight {
        device::Event event;
        CallFacts facts;
        int64_t since_ns;
        int64_t deadline_ns;
        uintptr_t stream;
        std::optional<uint64_t> record;
        bool message;  // it waits for no other rank, and nothing comes after it
    };

    // The word of a pair of ranks, for captured calls, and the one of a rank, for the others.
    uint32_t& word(int phase, int from, int to) const { return words_[(phase * kDeviceRanks + from) * kDeviceRanks + to]; }
    uint32_t& reached(int phase, int rank) const { return words_[(2 * kDeviceRanks + phase) * kDeviceRanks + rank]; }
    uint64_t on_device(const uint32_t& word) const {
        return words_on_device_ + static_cast<uint64_t>(&word - words_) * sizeof(uint32_t);
    }
    void signal(uintptr_t stream, int phase, int worker);
    void signal_captured(uintptr_t stream, int phase);
    void operate(uintptr_t stream, device::WordOperation* operations, unsigned count);
    void watch_for(uintptr_t stream, const CallFacts& facts, double timeout_s, std::optional<uint64_t> record, bool message);
    bool wait_until_taken();
    device::Event take_event();

    void require_open() const;
    void watch();
    void look_for_ended();
    void look_for_faults(std::unique_lock<std::mutex>& guard);
    void release();

    std::shared_ptr<Engine> engine_;
    Membership& members_;
    const int rank_;
    const int size_;
    GroupRecord* const record_;
    LaunchOrder& order_;
    const int index_;  // this process's number for the device
    device::MemoryDriver driver_;
    const int device_;
    const device::Context context_;
    uint32_t* words_;
    uint64_t words_on_device_ = 0;
    std::atomic<uint32_t> number_{0};  // of the latest call

    bool takes_turns();
    std::optional<bool> takes_turns_;  // processes take turns on the device: there is no MPS
    std::atomic<bool> bouncing_{false};
    std::byte* bounce_ = nullptr;
    device::Event bounced_ = nullptr;  // behind the latest upload,
    uintptr_t bounced_on_ = 0;         // on this stream

    DeviceMemory memory_;
    MessageBlocks blocks_;
    std::atomic<bool> closed_{false};
    std::shared_timed_mutex closing_;  // shared by messages that are being made

    std::mutex lock_;  // what follows
    std::condition_variable changed_, passed_;
    std::deque<InFlight> in_flight_;
    std::vector<device::Event> spare_;
    bool captured_ = false;
    bool stopping_ = false;
    bool asleep_ = false;
    std::thread thread_;
};

}  // namespace ringway::shm
