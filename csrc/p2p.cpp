#include "p2p.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

namespace ringway::shm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);
constexpr uint64_t kGrain = 64;         // frames begin at multiples of this
constexpr int64_t kPiece = 64 << 10;    // bytes that are copied before the other side may see them
constexpr int64_t kStuck = 20'000'000;  // a send that has not moved for so long is stuck, though nobody waits for it

constexpr uint64_t padded(uint64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }

}  // namespace

PointToPoint::PointToPoint(Membership& members)
    : members_(members),
      segment_(members.segment()),
      rank_(members.rank()),
      size_(members.size()),
      ring_bytes_(segment_.geometry().ring_bytes),
      waiter_(segment_.header().waiting_p2p, rank_, size_, members.ranks_fit_cpus(), *this),
      outbox_(static_cast<size_t>(size_)),
      ring_reserved_(static_cast<size_t>(size_)),
      inbox_(static_cast<size_t>(size_)),
      seen_(2 * static_cast<size_t>(size_)) {}

PointToPoint::~PointToPoint() {
    stop();
    join();
    if (thread_.joinable()) thread_.detach();
}

void PointToPoint::join() {
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void PointToPoint::start(const std::shared_ptr<Message>& message, bool in_background) {
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(lock_);
        message->issued_ns = now_ns();
        try {
            members_.check();
            if (message->sends && !ring_reserved_[static_cast<size_t>(message->peer)]) {
                segment_.reserve_ring(message->peer);
                ring_reserved_[static_cast<size_t>(message->peer)] = true;
            }
            if (message->sends)
                outbox_[static_cast<size_t>(message->peer)].push_back(message);
            else
                receives_.push_back(message);
            advance(finished);
        } catch (const Unfinished& unfinished) {
            end(message, unfinished.outcome, finished);
        } catch (const OutOfMemory& error) {
            members_.report_memory(message->facts, error.bytes);
            end(message, Outcome::Faulted, finished);
        }
        const bool needs_thread = in_background && !idle() && !stopping_;
        if (needs_thread && !thread_.joinable()) start_thread(*message, finished);
        if (needs_thread) wanted_.notify_one();
    }
    tell(finished);
    look_again();
}

// Ends what is finished, without the lock.
void PointToPoint::tell(const Messages& finished) {
    for (const auto& done : finished) done->finish(done->verdict);
    if (finished.empty()) return;
    look_again();
    changed_.notify_all();
}

void PointToPoint::start_thread(const Message& message, Messages& finished) {
    try {
        thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
        members_.report_memory(message.facts, 0);
        end_all(Outcome::Faulted, finished);
    }
}

// Makes the thread that sleeps for all messages of this rank look at them: there is a new one, one is done, or
// another thread wants its place.
void PointToPoint::look_again() {
    nudged_.store(true, std::memory_order_seq_cst);
    waiter_.nudge();
}

bool PointToPoint::wait(const Message& message, double timeout_s, Host& host) {
    const int64_t start = now_ns();
    std::unique_lock<std::mutex> guard(lock_, std::try_to_lock);
    if (!guard.owns_lock()) {
        host.block();
        guard.lock();
    }
    ++waiters_;
    awaited_sends_ += message.sends ? 1 : 0;
    bool in_time = true;
    while (!message.done() && in_time) {
        const double left = timeout_s - static_cast<double>(now_ns() - start) / 1e9;
        in_time = left > 0 && step(guard, &message, left, host);
    }
    --waiters_;
    awaited_sends_ -= message.sends ? 1 : 0;
    const bool rest = !idle();
    guard.unlock();
    if (rest) {  // somebody has to go on with it
        changed_.notify_all();
        wanted_.notify_one();
    }
    return message.done();
}

// Moves what can be moved, or sleeps until something can, or until `awaited` is done: the thread that ended it may
// be telling so only now. False when interrupted.
bool PointToPoint::step(std::unique_lock<std::mutex>& guard, const Message* awaited, double limit_s, Host& host) {
    if (driving_) return give_way(guard, host);
    Messages finished;
    Waking waking = Waking::Ready;
    snapshot();
    if (!advance(finished) && finished.empty()) {
        driving_ = true;
        thread_drives_ = thread_.get_id() == std::this_thread::get_id();
        nudged_.store(false, std::memory_order_seq_cst);
        const double until_deadline = static_cast<double>(next_deadline() - now_ns()) / 1e9;
        Patience patience(std::max(0.0, std::min(limit_s, until_deadline)), host);
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
    if (awaited == nullptr) changed_.notify_all();  // it was the background thread, which gives way
    finished.clear();  // the last to hold a message may need the GIL, whose holder may need the lock
    guard.lock();
    return waking != Waking::Interrupted;
}

// Another thread moves the messages of all. The background thread leaves that to one that waits.
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

void PointToPoint::work() {
    Host host;
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        wanted_.wait(guard, [this] { return stopping_ || (!idle() && !driving_ && waiters_ == 0); });
        if (stopping_) return;
        step(guard, nullptr, full_ ? kStuck / 1e9 : 1e9, host);
    }
}

bool PointToPoint::advance(Messages& finished) {
    bool moved = false;
    full_ = false;
    try {
        for (int peer = 0; peer < size_; ++peer) moved = push(peer, finished) || moved;
        if (moved || !full_) pushed_ns_ = full_ ? now_ns() : 0;
        for (int peer = 0; peer < size_; ++peer) moved = pull(peer, finished) || moved;
    } catch (const Unfinished& unfinished) {
        end_all(unfinished.outcome, finished);
    } catch (const OutOfMemory& error) {
        members_.report_memory(CallFacts{}, error.bytes);
        end_all(Outcome::Faulted, finished);
    }
    return moved;
}

// Copies of the oldest messages for `peer` into the ring what has room, at most a ring at a time.
bool PointToPoint::push(int peer, Messages& finished) {
    auto& box = outbox_[static_cast<size_t>(peer)];
    RingControl& ring = segment_.ring(rank_, peer);
    const uint64_t start = ring.head.load(std::memory_order_relaxed);
    uint64_t head = start;
    while (!box.empty() && head - start < ring_bytes_) {
        Message& message = *box.front();
        const uint64_t room = ring_bytes_ - under_way(peer, head - ring.tail.load(kObserve), message.facts);
        if (!message.framed) {
            if (room < padded(sizeof(Frame))) break;
            const Frame frame{message.facts, message.bytes, message.tag};
            write_ring(peer, head, &frame, sizeof frame);
            head += padded(sizeof frame);
            message.framed = true;
        } else {
            // Positions keep to the grain, so room does too; only the end of a message is padded.
            const auto piece = std::min({message.bytes - message.moved, static_cast<int64_t>(room), kPiece});
            if (piece == 0) break;
            write_ring(peer, head, message.data + message.moved, piece);
            message.moved += piece;
            head += padded(static_cast<uint64_t>(piece));
        }
        ring.head.store(head, kPublish);
        waiter_.tell(peer);
        if (message.moved == message.bytes) {
            end(box.front(), Outcome::Done, finished);
            box.pop_front();
        }
    }
    full_ = full_ || !box.empty();
    return head != start;
}

// The bytes between a ring's two ends, which never are more than the ring.
uint64_t PointToPoint::under_way(int peer, uint64_t bytes, const CallFacts& facts) {
    if (bytes > ring_bytes_) corrupt(peer, facts);
    return bytes;
}

void PointToPoint::corrupt(int peer, const CallFacts& facts) {
    members_.report_corrupt(facts, peer);
    throw Unfinished{Outcome::Faulted};
}

// Copies what has arrived from `peer` to where it belongs, as far as that is known.
bool PointToPoint::pull(int peer, Messages& finished) {
    Inbox& box = inbox_[static_cast<size_t>(peer)];
    RingControl& ring = segment_.ring(peer, rank_);
    const uint64_t start = ring.tail.load(std::memory_order_relaxed);
    uint64_t tail = start;
    bool matched = false;
    while (tail - start < ring_bytes_) {
        const auto there = static_cast<int64_t>(under_way(peer, ring.head.load(kObserve) - tail, box.frame.facts));
        if (box.into == nullptr && box.aside == nullptr) {
            matched = match_aside(peer, finished) || matched;
            if (there == 0) break;
            read_ring(peer, tail, &box.frame, sizeof(Frame));
            if (box.frame.bytes < 0) corrupt(peer, box.frame.facts);
            if (!open_frame(peer, finished)) break;
            tail += padded(sizeof(Frame));
            box.left = box.frame.bytes;
        } else {
            const int64_t piece = std::min({there, box.left, kPiece});
            if (piece == 0) break;
            std::byte* to = box.into != nullptr ? box.into->data : box.aside->data.get();
            read_ring(peer, tail, to + (box.frame.bytes - box.left), piece);
            tail += padded(static_cast<uint64_t>(piece));
            box.left -= piece;
            if (box.aside != nullptr) box.aside->arrived += piece;
        }
        if (box.left == 0) {
            if (box.into != nullptr) end(std::move(box.into), Outcome::Done, finished);
            box.into = nullptr;
            box.aside = nullptr;
        }
        ring.tail.store(tail, kPublish);
        waiter_.tell(peer);
    }
    return matched || tail != start;
}

// Decides where the message goes whose frame was just read. False: nowhere yet, it stays in the ring.
bool PointToPoint::open_frame(int peer, Messages& finished) {
    Inbox& box = inbox_[static_cast<size_t>(peer)];
    if (auto receive = match(peer, box.frame.tag)) {
        check_fits(receive, peer, box.frame, finished);
        receive->source = peer;
        box.into = std::move(receive);
        return true;
    }
    if (!sets_aside(peer)) return false;
    const auto bytes = static_cast<size_t>(box.frame.bytes);
    std::unique_ptr<std::byte[]> room(new (std::nothrow) std::byte[bytes]);
    if (room == nullptr) throw OutOfMemory("no memory to set a message aside", box.frame.bytes);
    box.waiting.push_back({box.frame, std::move(room), 0});
    box.aside = &box.waiting.back();
    return true;
}

// A message that was set aside, and is now asked for. One that still arrives is taken when it is whole.
bool PointToPoint::match_aside(int peer, Messages& finished) {
    Inbox& box = inbox_[static_cast<size_t>(peer)];
    bool moved = false;
    for (auto aside = box.waiting.begin(); aside != box.waiting.end();) {
        if (!aside->whole()) break;
        auto receive = match(peer, aside->frame.tag);
        if (receive == nullptr) {
            ++aside;
            continue;
        }
        check_fits(receive, peer, aside->frame, finished);
        receive->source = peer;
        if (receive->bytes > 0) std::memcpy(receive->data, aside->data.get(), static_cast<size_t>(receive->bytes));
        end(receive, Outcome::Done, finished);
        aside = box.waiting.erase(aside);
        moved = true;
    }
    return moved;
}

// The oldest receive that wants such a message; it leaves the list.
std::shared_ptr<Message> PointToPoint::match(int source, int tag) {
    for (auto at = receives_.begin(); at != receives_.end(); ++at) {
        Message& receive = **at;
        if (receive.tag != tag || (receive.peer != kAnyone && receive.peer != source)) continue;
        auto found = *at;
        receives_.erase(at);
        return found;
    }
    return nullptr;
}

bool PointToPoint::sets_aside(int peer) const {
    // A receive may be about to come, so what arrives is not set aside as long as nobody waits for what cannot leave.
    if (full_ && (awaited_sends_ > 0 || now_ns() - pushed_ns_ > kStuck)) return true;
    return std::any_of(receives_.begin(), receives_.end(), [peer](const auto& receive) {
        return receive->peer == kAnyone || receive->peer == peer;
    });
}

void PointToPoint::check_fits(const std::shared_ptr<Message>& receive, int source, const Frame& frame,
                              Messages& finished) {
    if (receive->bytes == frame.bytes && receive->facts.dtype == frame.facts.dtype) return;
    members_.report(FaultKind::Mismatch, receive->facts, [&](Fault& fault) {
        fault.rank = source;
        fault.theirs = frame.facts;
        fault.pair = {source, rank_, frame.bytes, receive->bytes};
    });
    end(receive, Outcome::Faulted, finished);
    throw Unfinished{Outcome::Faulted};
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
        if (box.into != nullptr) end(std::move(box.into), outcome, finished);
    for (auto& message : receives_) end(message, outcome, finished);
    receives_.clear();
}

bool PointToPoint::idle() const {
    return receives_.empty() &&
           std::all_of(outbox_.begin(), outbox_.end(), [](const auto& box) { return box.empty(); }) &&
           std::all_of(inbox_.begin(), inbox_.end(), [](const auto& box) { return box.into == nullptr; });
}

void PointToPoint::for_each_pending(const std::function<void(const Message&)>& look) const {
    for (const auto& box : outbox_)
        for (const auto& message : box) look(*message);
    for (const auto& box : inbox_)
        if (box.into != nullptr) look(*box.into);
    for (const auto& message : receives_) look(*message);
}

int64_t PointToPoint::next_deadline() const {
    int64_t next = INT64_MAX;
    for_each_pending([&next](const Message& message) { next = std::min(next, message.deadline_ns()); });
    return next;
}

// A message whose time is over ends the group, as a collective does.
void PointToPoint::expire(Messages& finished) {
    const int64_t now = now_ns();
    const Message* late = nullptr;
    for_each_pending([&](const Message& message) {
        if (message.deadline_ns() <= now) late = &message;
    });
    if (late == nullptr) return;
    std::vector<int> missing;
    for (int peer = 0; peer < size_; ++peer)
        if (late->peer == peer || (late->peer == kAnyone && peer != rank_)) missing.push_back(peer);
    members_.report_timeout(late->facts, static_cast<double>(now - late->issued_ns) / 1e9, missing);
    end_all(Outcome::Faulted, finished);
}

bool PointToPoint::stop(int peer, bool look_for_dead, const Look& ready) {
    (void)peer;
    std::lock_guard<std::mutex> guard(lock_);
    bool stopped = false;
    bool any = false;
    for_each_pending([&](const Message& message) {
        any = true;
        if (!stopped) stopped = members_.stop(message.peer, look_for_dead, message.facts, ready);
    });
    return stopped || (!any && members_.left());
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
        if (!driving_) end_all(members_.faulted() ? Outcome::Faulted : Outcome::Closed, finished);
    }
    tell(finished);
    look_again();
    changed_.notify_all();
    wanted_.notify_all();
}

void PointToPoint::sweep() {
    Messages spent;
    std::lock_guard<std::mutex> guard(lock_);
    spent.swap(spent_);
}

void PointToPoint::write_ring(int to, uint64_t at, const void* from, int64_t bytes) {
    std::byte* ring = segment_.ring_data(rank_, to);
    const auto place = static_cast<int64_t>(at % ring_bytes_);
    const int64_t first = std::min(bytes, static_cast<int64_t>(ring_bytes_) - place);
    if (first > 0) std::memcpy(ring + place, from, static_cast<size_t>(first));
    if (bytes > first) std::memcpy(ring, static_cast<const std::byte*>(from) + first, static_cast<size_t>(bytes - first));
}

void PointToPoint::read_ring(int from, uint64_t at, void* to, int64_t bytes) const {
    const std::byte* ring = segment_.ring_data(from, rank_);
    const auto place = static_cast<int64_t>(at % ring_bytes_);
    const int64_t first = std::min(bytes, static_cast<int64_t>(ring_bytes_) - place);
    if (first > 0) std::memcpy(to, ring + place, static_cast<size_t>(first));
    if (bytes > first) std::memcpy(static_cast<std::byte*>(to) + first, ring, static_cast<size_t>(bytes - first));
}

}  // namespace ringway::shm
