// Point-to-point messages of one group: a byte ring for each ordered pair of ranks.
//
// A message is a frame (what was sent, its length, its tag) and its bytes. They go through the ring in pieces, so that a
// large message is copied out at one end while it is still copied in at the other. A receive takes the oldest message with
// its tag from its source (or from anyone). Messages before it with another tag are set aside. So are those that arrive
// while this rank waits for a send whose ring is full, so that two ranks that both send first make progress.
//
// A thread that waits moves all messages of the rank. While messages are in flight and nobody waits, a background thread
// does.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "shm/task.h"
#include "shm/worker.h"

namespace ringway::shm {

class Message : public Task {
  public:
    bool sends = false;
    int peer = -1;  // kAnyone: receives from any rank
    int tag = 0;
    std::byte* data = nullptr;
    int64_t bytes = 0;
    double timeout_s = 1800;
    CallFacts facts{};
    int source = -1;  // of a receive, once its message has begun to arrive

  private:
    friend class PointToPoint;
    int64_t deadline_ns() const {
        return timeout_s < 9e9 ? issued_ns + static_cast<int64_t>(timeout_s * 1e9) : INT64_MAX;
    }

    int64_t issued_ns = 0;
    int64_t moved = 0;
    bool framed = false;
    Outcome verdict = Outcome::Done;
};

class PointToPoint final : public Guard {
  public:
    PointToPoint(Shared& owner, Membership& members);

    // Sends the message if all of it can leave now: none waits before it, and the ring has room. Otherwise sends nothing
    // and returns false. Never blocks.
    bool send_now(const Message& message);
    // Queues the message and moves what can be moved now. Never blocks. If `in_background`, a thread goes on with it; else
    // the caller is about to wait for it.
    void start(const std::shared_ptr<Message>& message, bool in_background);
    // True once the message is done; false if `timeout_s` has passed or the host was interrupted.
    bool wait(const Message& message, double timeout_s, Host& host);
    // Cancels a message of which nothing has been sent or received yet. False if it is too late: the message goes on.
    bool withdraw(const Message& message);
    // Ends all messages. The rank must have left the membership.
    void stop();
    // After `stop`: waits for the thread to end, see Worker::join.
    void join() { worker_.join(); }
    // Drops the messages that are done, like Progress::sweep.
    void sweep();

    bool stop(int peer, bool look_for_dead, const Look& ready) override;

  private:
    // A send that has not moved for this many nanoseconds is stuck, even if nobody waits for it.
    static constexpr int64_t kStuck = 20'000'000;

    using Messages = std::vector<std::shared_ptr<Message>>;

    struct Frame {
        CallFacts facts;
        int64_t bytes;
        int32_t tag;
    };
    // A message that has no receive yet.
    struct Aside {
        Frame frame;
        std::unique_ptr<std::byte[]> data;
        int64_t arrived = 0;
        bool whole() const { return arrived == frame.bytes; }
    };
    // What arrives from one rank: the message that its ring is in the middle of, if any.
    struct Inbox {
        std::shared_ptr<Message> into;  // a receive, or
        Aside* aside = nullptr;         // the last of `waiting`
        Frame frame{};
        int64_t left = 0;
        std::list<Aside> waiting;
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
    void check_fits(const std::shared_ptr<Message>& receive, int source, const Frame& frame, Messages& finished);

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
    void start_thread(const Message& message, Messages& finished);

    void reserve(int to);
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
    std::vector<bool> ring_reserved_;
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
    bool stopping_ = false;
    Worker worker_;
};

}  // namespace ringway::shm
