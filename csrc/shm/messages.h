// Point-to-point messages of one group: a byte ring for each ordered pair of ranks.
//
// A message is a frame (its length, its tag, what was sent) and its bytes. Those of a very small message travel in the
// frame's cache line; others follow it in pieces, so that a large message is copied out at one end while it is still copied
// in at the other. A receive takes the oldest message with
// its tag from its source (or from anyone). Messages before it with another tag are set aside. So are those that arrive
// while this rank waits for a send whose ring is full, so that two ranks that both send first make progress.
//
// Large messages that cross, as in an exchange or around a ring, are offered (message_offers.cpp): a frame says where the
// message is, and the receiver reads it there (peer_memory.h), one copy instead of two. If the receiver does not come soon,
// the sender withdraws the offer, and the message follows its frame like any other. So offers change how long a message
// takes, but not what it waits for. A message that goes one way is not offered: through the ring both ranks copy at the same
// time.
//
// A message of device memory may be sent by reference: instead of its bytes, a few bytes travel that say where they are. The
// sender decides, so its receive takes both.
//
// A thread that waits moves all messages of the rank. A program usually waits for a message soon after it started it, so a
// background thread moves messages only if no thread of the program has come back to them for a while.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "shm/task.h"
#include "shm/worker.h"

namespace ringway::shm {

class Message : public Task {
  public:
    static constexpr int64_t kReferenceBytes = 128;
    using Reference = std::array<std::byte, kReferenceBytes>;

    bool sends = false;
    int peer = -1;  // kAnyone: receives from any rank
    int tag = 0;
    std::byte* data = nullptr;
    int64_t bytes = 0;
    bool may_be_offered = false;  // of a send: it is asynchronous, and the data is the caller's
    // A receive that takes references. Its `data` has room for this many bytes, and more than that come to `owned`.
    std::optional<int64_t> room;
    bool by_reference = false;  // of a receive: once it is done
    Reference reference{};
    std::unique_ptr<std::byte[]> owned;
    double timeout_s = 1800;
    CallFacts facts{};
    int source = -1;  // of a receive, once its message has begun to arrive

  private:
    friend class PointToPoint;
    // What travels.
    std::byte* payload() { return by_reference ? reference.data() : data; }
    const std::byte* payload() const { return by_reference ? reference.data() : data; }
    int64_t payload_bytes() const { return by_reference ? kReferenceBytes : bytes; }
    int64_t deadline_ns() const {
        return timeout_s < 9e9 ? issued_ns + static_cast<int64_t>(timeout_s * 1e9) : INT64_MAX;
    }

    int64_t issued_ns = 0;
    int64_t moved = 0;
    bool framed = false;
    bool offered = false;               // of a send
    int64_t offer_ends_ns = INT64_MAX;  // when it is withdrawn
    uint64_t taken_at = 0;              // the ring's tail, once the receiver has read it
    Outcome verdict = Outcome::Done;
};

class PointToPoint final : public Guard {
  public:
    PointToPoint(Shared& owner, Membership& members);

    // Sends the message if all of it can leave now: none waits before it, and the ring has room. Otherwise sends nothing
    // and returns false. Never blocks.
    bool send_now(const Message& message);
    // Receives the message if all of it is there, or arrives within a microsecond or so. Otherwise does nothing and returns
    // false.
    bool receive_now(const Message& message);
    // Queues the message and moves what can be moved now. Never blocks. If `in_background`, a thread goes on with it; else
    // the caller is about to wait for it.
    void start(const std::shared_ptr<Message>& message, bool in_background);
    // True once the message is done; false if `timeout_s` has passed or the host was interrupted.
    bool wait(const Message& message, double timeout_s, Host& host);
    // Cancels a message of which nothing has been sent or received yet. False if it is too late: the message goes on.
    bool withdraw(const Message& message);
    // Withdraws what is offered, or waits until it has been read. For a rank that is about to leave.
    void end_offers();
    // Ends all messages. The rank must have left the membership.
    void stop();
    // After `stop`: waits for the thread to end, see Worker::join.
    void join() { worker_.join(); }
    // Drops the messages that are done, like Progress::sweep.
    void sweep();

    bool stop(int peer, bool look_for_dead, const Look& ready) override;

  private:
    // The background thread leaves messages alone for this many nanoseconds after a thread of the program last moved them.
    static constexpr int64_t kAway = 500'000;
    // With nothing to do it still looks this many times, so that the next message need not wake it.
    static constexpr int kIdleLooks = 20;
    static constexpr int64_t kReadPiece = 1 << 20;  // the most bytes of an offered message that are read at a time
    // A rank that leaves waits this many nanoseconds for another one that is reading its memory.
    static constexpr int64_t kLeaving = 1'000'000'000;
    // A send that has not moved for this many nanoseconds is stuck, even if nobody waits for it.
    static constexpr int64_t kStuck = 20'000'000;

    using Messages = std::vector<std::shared_ptr<Message>>;

    enum class Travels : uint8_t { Data, Reference, Address };
    // The beginning of a message in its ring.
    struct alignas(kLine) Line {
        static constexpr int64_t kInside = 32;

        int64_t bytes;
        uint64_t number;
        int64_t count;
        int32_t tag;
        DType dtype;
        uint8_t has_place;  // the line of the program that sent it follows; else it is the same as that of the message before
        Travels what;
        std::byte inside[kInside];  // the data, if it is no more than this; or its address
    };
    static_assert(sizeof(Line) == kLine);
    struct Frame {
        CallFacts facts;
        int64_t bytes;
        int32_t tag;
        Travels what;
        uint64_t address;  // of an offered message
        int64_t payload_bytes() const { return what == Travels::Reference ? Message::kReferenceBytes : bytes; }
    };
    // Whether to offer the next large message. It is, if some of the last ones that came found one on its way to any rank. Each
    // offer that ends in vain doubles the number of crossings before the next.
    struct Offers {
        static constexpr int kAfterCrossing = 4;
        static constexpr int kMostPenalty = 1024;

        int left = 0;
        int penalty = 1;
        void crossed() { left = left < 0 ? left + 1 : kAfterCrossing; }
        void passed() { left -= left > 0; }
        void taken() { penalty = 1; }
        void in_vain() {
            penalty = std::min(2 * penalty, kMostPenalty);
            left = -penalty;
        }
    };
    // What this rank knows about a ring that it sends to.
    struct Outlet {
        bool reserved = false;
        bool has_place = false;  // some message had a place: that of `site`
        uint32_t site = 0;
        uint64_t tail = 0;  // as it was last seen: looking at it costs a cache miss
    };
    // A message that has no receive yet.
    struct Aside {
        Frame frame;
        std::unique_ptr<std::byte[]> data;
        int64_t arrived = 0;
        bool whole() const { return arrived == frame.payload_bytes(); }
    };
    // What arrives from one rank: the message that its ring is in the middle of, if any.
    struct Inbox {
        std::shared_ptr<Message> into;  // a receive, or
        Aside* aside = nullptr;         // the last of `waiting`
        Frame frame{};
        uint64_t frame_bytes = 0;  // in the ring
        int64_t left = 0;
        std::list<Aside> waiting;

        // Where its next bytes go.
        std::byte* target() const {
            return (into != nullptr ? into->payload() : aside->data.get()) + (frame.payload_bytes() - left);
        }
        void took(int64_t bytes) {
            left -= bytes;
            if (aside != nullptr) aside->arrived += bytes;
        }
    };

    // A thread in `wait`.
    class Waiting final : public Interruptible {
      public:
        Waiting(PointToPoint& messages, const Message& message) : messages_(messages), message_(message) {}
        bool go_on(Host& host) override;
        // By how many waiting threads there are more again.
        int come_back() { return std::exchange(away_, false) ? 1 : 0; }

      private:
        PointToPoint& messages_;
        const Message& message_;
        bool away_ = false;
    };

    bool advance(Messages& finished);
    bool push(int peer, Messages& finished);
    bool pull(int peer, Messages& finished);
    uint64_t under_way(int peer, uint64_t bytes, const CallFacts& facts);
    [[noreturn]] void corrupt(int peer, const CallFacts& facts);
    bool open_frame(int peer, Messages& finished);
    bool match_aside(int peer, Messages& finished);
    bool sets_aside(int peer) const;
    std::shared_ptr<Message> match(int source, int tag);
    static bool fits(const Message& receive, const Frame& frame) {
        return receive.bytes == frame.bytes && receive.facts.dtype == frame.facts.dtype;
    }
    void check_fits(const std::shared_ptr<Message>& receive, const Frame& frame, Messages& finished);
    void make_room(const std::shared_ptr<Message>& receive, const Frame& frame, Messages& finished);

    bool is_large(int peer, int64_t bytes) const;
    bool is_to_be_offered(const Message& message) const;
    void note_crossing(int peer, int64_t bytes);
    void open_offer(Message& message, uint64_t at);
    bool end_offer(Message& message);
    bool withdraw_offers();
    bool take_offer(int peer);
    bool read_offer(const Message& message, uint64_t end);
    bool read_piece_of_offer(int peer);

    void end(std::shared_ptr<Message> message, Outcome outcome, Messages& finished);
    void end_all(Outcome outcome, Messages& finished);
    void expire(Messages& finished);
    template <class Is>
    bool any_pending(const Is& is) const;
    bool idle() const;
    int64_t next_deadline() const;

    void snapshot();
    bool changed() const;
    void look_again();
    void tell(const Messages& finished);
    bool step(std::unique_lock<std::mutex>& guard, const Message* awaited, double limit_s, Host& host);
    bool give_way(std::unique_lock<std::mutex>& guard, Host& host);
    void work();
    void rouse();
    void start_thread(const Message& message, Messages& finished);

    void reserve(int to);
    bool read_as_it_comes(const Message& message, uint64_t at);
    uint64_t room(const Message& message, uint64_t head, uint64_t needed);
    uint64_t head_bytes(const Message& message) const;
    void write_head(const Message& message, uint64_t at);
    uint64_t read_head(int from, uint64_t at, Line& line);
    void write_ring(int to, uint64_t at, const void* from, int64_t bytes);
    void read_ring(int from, uint64_t at, void* to, int64_t bytes) const;

    Membership& members_;
    Segment& segment_;
    const int rank_;
    const int size_;
    const uint64_t ring_bytes_;
    Waiter waiter_;
    std::mutex lock_;
    std::condition_variable changed_;  // for threads that wait while another moves all messages
    std::condition_variable wanted_;   // for the background thread
    std::vector<std::list<std::shared_ptr<Message>>> outbox_;  // by destination
    std::vector<Outlet> outlets_;                              // likewise
    Offers offers_;
    std::list<std::shared_ptr<Message>> receives_;  // not yet matched, oldest first
    std::vector<std::unique_ptr<Inbox>> inbox_;     // by source; null until it sends something
    Messages spent_;
    std::vector<uint64_t> seen_;  // ring positions of the others, when there was last nothing to do
    std::atomic<bool> nudged_{false};
    bool full_ = false;      // a send waits for room,
    int64_t pushed_ns_ = 0;  // and since when
    int awaited_sends_ = 0;  // sends that a thread waits for
    bool driving_ = false;  // a thread sleeps for all of this rank's messages
    bool thread_drives_ = false;
    int waiters_ = 0;
    bool asleep_ = false;     // the background thread, until it is woken
    int64_t tended_ns_ = 0;  // when a thread of the program last moved messages; 0 if it cannot come back soon
    bool stopping_ = false;
    Worker worker_;
};

}  // namespace ringway::shm
