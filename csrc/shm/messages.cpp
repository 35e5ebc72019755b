#include "shm/messages.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

namespace ringway::shm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);

// Ends a sleep at every occasion to look for signals, which the sleeper then does itself: a signal handler may wait for
// another message, and no thread could move it while this one holds the place of the thread that does.
class Brief final : public Host {
  public:
    explicit Brief(Host& host) : host_(host) {}
    void block() override { host_.block(); }
    bool interrupted() override { return true; }

  private:
    Host& host_;
};

}  // namespace

PointToPoint::PointToPoint(Shared& owner, Membership& members)
    : members_(members),
      segment_(members.segment()),
      rank_(members.rank()),
      size_(members.size()),
      ring_bytes_(segment_.geometry().ring_bytes),
      waiter_(segment_.header().waiting_p2p, segment_.header().cpu_p2p, rank_, size_, members.ranks_fit_cpus(), *this),
      outbox_(static_cast<size_t>(size_)),
      outlets_(static_cast<size_t>(size_)),
      inbox_(static_cast<size_t>(size_)),
      seen_(2 * static_cast<size_t>(size_)),
      worker_(owner) {}

// A forked child must not take the lock: a thread of the parent may have held it.
void PointToPoint::start(const std::shared_ptr<Message>& message, bool in_background) {
    if (members_.forked()) return message->finish(Outcome::Forked);
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(lock_);
        message->issued_ns = now_ns();
        try {
            members_.check();
            if (message->sends) reserve(message->peer);
            message->offered = is_to_be_offered(*message);
            if (message->sends)
                outbox_[static_cast<size_t>(message->peer)].push_back(message);
            else
                receives_.push_back(message);
            advance(finished);
        } catch (const Unfinished& unfinished) {
            end(message, unfinished.outcome, finished);
        } catch (const OutOfMemory& error) {
            members_.report_memory(message->facts, error.bytes, error.what());
            end(message, Outcome::Faulted, finished);
        }
        tended_ns_ = now_ns();
        const bool needs_thread = in_background && !idle() && !stopping_;
        if (needs_thread && !worker_.started()) start_thread(*message, finished);
        if (needs_thread) rouse();
    }
    tell(finished);
    look_again();
}

void PointToPoint::reserve(int to) {
    Outlet& outlet = outlets_[static_cast<size_t>(to)];
    if (outlet.reserved) return;
    segment_.reserve_ring(to);
    outlet.reserved = true;
}

// Ends the finished messages, without the lock.
void PointToPoint::tell(const Messages& finished) {
    for (const auto& done : finished) done->finish(done->verdict);
    if (finished.empty()) return;
    look_again();
    changed_.notify_all();
}

void PointToPoint::start_thread(const Message& message, Messages& finished) {
    try {
        worker_.start([this] { work(); });
    } catch (const std::system_error&) {
        members_.report_memory(message.facts, 0);
        end_all(Outcome::Faulted, finished);
    }
}

// Wakes the thread that sleeps for all messages of this rank: there is a new message, one is done, or another thread
// wants its place.
void PointToPoint::look_again() {
    nudged_.store(true, std::memory_order_seq_cst);
    waiter_.nudge();
}

bool PointToPoint::wait(const Message& message, double timeout_s, Host& host) {
    if (members_.forked()) return message.done();
    if (!Interruptible::let_go_on(host)) return message.done();
    const int64_t start = now_ns();
    std::unique_lock<std::mutex> guard(lock_, std::try_to_lock);
    if (!guard.owns_lock()) {
        host.block();
        guard.lock();
    }
    Waiting waiting(*this, message);
    waiters_ += 1;
    awaited_sends_ += message.sends ? 1 : 0;
    bool in_time = true;
    const bool moves = !message.done();
    while (!message.done() && in_time) {
        const double left = timeout_s - static_cast<double>(now_ns() - start) / 1e9;
        in_time = left > 0 && step(guard, &message, left, host);
        waiters_ += waiting.come_back();
    }
    waiters_ -= 1;
    awaited_sends_ -= message.sends ? 1 : 0;
    if (moves) tended_ns_ = now_ns();
    const bool rest = !idle();
    if (rest) rouse();
    guard.unlock();
    if (rest) changed_.notify_all();  // another waiting thread has to go on with the rest
    return message.done();
}

// Leaves the messages to the background thread, while this one runs a signal handler.
bool PointToPoint::Waiting::go_on(Host&) {
    if (away_) return true;
    away_ = true;
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(messages_.lock_);
        messages_.waiters_ -= 1;
        messages_.tended_ns_ = 0;
        messages_.asleep_ = false;
        if (!messages_.stopping_ && !messages_.worker_.started()) messages_.start_thread(message_, finished);
    }
    messages_.tell(finished);
    messages_.wanted_.notify_one();
    return true;
}

bool PointToPoint::withdraw(const Message& message) {
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(lock_);
        const auto take_from = [&](auto& pending) {
            const auto is_it = [&](const auto& other) { return other.get() == &message; };
            const auto found = std::find_if(pending.begin(), pending.end(), is_it);
            if (found == pending.end()) return;
            end(*found, Outcome::Interrupted, finished);
            pending.erase(found);
        };
        if (!message.sends)
            take_from(receives_);
        else if (!message.framed)
            take_from(outbox_[static_cast<size_t>(message.peer)]);
    }
    tell(finished);
    return !finished.empty();
}

// Moves what can be moved, or sleeps until something can be moved or `awaited` is done: another thread may be finishing
// it right now. False if interrupted.
bool PointToPoint::step(std::unique_lock<std::mutex>& guard, const Message* awaited, double limit_s, Host& host) {
    if (driving_) return give_way(guard, host);
    Messages finished;
    Waking waking = Waking::Ready;
    snapshot();
    if (!advance(finished) && finished.empty()) {
        driving_ = true;
        thread_drives_ = worker_.is_this_thread();
        nudged_.store(false, std::memory_order_seq_cst);
        const double until_deadline = static_cast<double>(next_deadline() - now_ns()) / 1e9;
        Brief brief(host);
        Patience patience(std::max(0.0, std::min(limit_s, until_deadline)), brief);
        guard.unlock();
        waking = waiter_.until(kAnyone, patience,
                               [&] { return changed() || (awaited != nullptr && awaited->done()); });
        guard.lock();
        driving_ = false;
        if (waking == Waking::Stopped) end_all(members_.faulted() ? Outcome::Faulted : Outcome::Closed, finished);
        if (waking == Waking::TimedOut) expire(finished);
    }
    guard.unlock();
    tell(finished);
    if (awaited == nullptr) changed_.notify_all();  // this is the background thread, which gives way
    finished.clear();  // releasing a message may need the GIL, whose holder may need the lock
    const bool go_on = waking != Waking::Interrupted || !host.interrupted();
    guard.lock();
    return go_on;
}

// Another thread moves all messages. If that is the background thread, it gives way to one that waits.
bool PointToPoint::give_way(std::unique_lock<std::mutex>& guard, Host& host) {
    if (thread_drives_) look_again();
    guard.unlock();
    host.block();
    guard.lock();
    if (driving_) changed_.wait_for(guard, kSlice);
    guard.unlock();
    const bool go_on = !host.interrupted();
    guard.lock();
    return go_on;
}

// Moves the messages that no thread of the program moves.
void PointToPoint::work() {
    Host host;
    int idle_looks = 0;
    std::unique_lock<std::mutex> guard(lock_);
    while (!stopping_) {
        const bool untended = !idle() && !driving_ && waiters_ == 0;
        idle_looks = untended ? 0 : idle_looks + 1;
        if (untended && now_ns() - tended_ns_ >= kAway) {
            step(guard, nullptr, full_ ? kStuck / 1e9 : 1e9, host);
        } else if (idle_looks < kIdleLooks) {
            wanted_.wait_for(guard, std::chrono::nanoseconds(kAway));
        } else if (!spent_.empty()) {  // the program may make no message for long, and wants its tensors back
            Messages spent;
            spent.swap(spent_);
            guard.unlock();
            spent.clear();  // may need the GIL
            guard.lock();
        } else {
            asleep_ = true;
            wanted_.wait(guard, [this] { return stopping_ || !asleep_; });
            idle_looks = 0;
        }
    }
}

// There are messages that the background thread may have to move. Unless it sleeps, it looks by itself.
void PointToPoint::rouse() {
    if (std::exchange(asleep_, false)) wanted_.notify_one();
}

void PointToPoint::end(std::shared_ptr<Message> message, Outcome outcome, Messages& finished) {
    message->verdict = outcome;
    spent_.push_back(message);
    finished.push_back(std::move(message));
}

void PointToPoint::end_all(Outcome outcome, Messages& finished) {
    for (auto& box : outbox_) {
        for (auto& message : box) end(message, outcome, finished);
        box.clear();
    }
    for (auto& box : inbox_)
        if (box != nullptr && box->into != nullptr) end(std::move(box->into), outcome, finished);
    for (auto& message : receives_) end(message, outcome, finished);
    receives_.clear();
}

// Whether `is` holds for a message that is not done. Stops at the first.
template <class Is>
bool PointToPoint::any_pending(const Is& is) const {
    for (const auto& box : outbox_)
        for (const auto& message : box)
            if (is(*message)) return true;
    for (const auto& box : inbox_)
        if (box != nullptr && box->into != nullptr && is(*box->into)) return true;
    for (const auto& message : receives_)
        if (is(*message)) return true;
    return false;
}

bool PointToPoint::idle() const {
    return !any_pending([](const Message&) { return true; });
}

int64_t PointToPoint::next_deadline() const {
    int64_t next = INT64_MAX;
    any_pending([&next](const Message& message) {
        next = std::min({next, message.deadline_ns(), message.offer_ends_ns});
        return false;
    });
    return next;
}

// A message that times out ends the group, as a collective does.
void PointToPoint::expire(Messages& finished) {
    const int64_t now = now_ns();
    const Message* late = nullptr;
    any_pending([&](const Message& message) {
        if (message.deadline_ns() <= now) late = &message;
        return false;
    });
    if (late == nullptr) return;
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer)
        if (late->peer == peer || (late->peer == kAnyone && peer != rank_)) missing.push_back(peer);
    members_.report_timeout(late->facts, static_cast<double>(now - late->issued_ns) / 1e9, missing);
    end_all(Outcome::Faulted, finished);
}

bool PointToPoint::stop(int, bool look_for_dead, const Look& ready) {
    std::lock_guard<std::mutex> guard(lock_);
    const bool stopped = any_pending([&](const Message& message) {
        return members_.stop(message.peer, look_for_dead, message.facts, ready);
    });
    return stopped || (idle() && members_.left());
}

void PointToPoint::snapshot() {
    for (int peer = 0; peer < size_; ++peer) {
        seen_[static_cast<size_t>(2 * peer)] = segment_.ring(rank_, peer).tail.load(kObserve);
        seen_[static_cast<size_t>(2 * peer + 1)] = segment_.ring(peer, rank_).head.load(kObserve);
    }
}

bool PointToPoint::changed() const {
    if (nudged_.load(std::memory_order_seq_cst)) return true;
    for (int peer = 0; peer < size_; ++peer)
        if (seen_[static_cast<size_t>(2 * peer)] != segment_.ring(rank_, peer).tail.load(kObserve) ||
            seen_[static_cast<size_t>(2 * peer + 1)] != segment_.ring(peer, rank_).head.load(kObserve))
            return true;
    return false;
}

void PointToPoint::stop() {
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(lock_);
        stopping_ = true;
        end_all(members_.faulted() ? Outcome::Faulted : Outcome::Closed, finished);
    }
    tell(finished);
    look_again();
    changed_.notify_all();
    wanted_.notify_all();
}

void PointToPoint::sweep() {
    if (members_.forked()) return;
    Messages spent;
    std::lock_guard<std::mutex> guard(lock_);
    spent.swap(spent_);
}

}  // namespace ringway::shm
