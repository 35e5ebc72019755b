// How messages move: into the rings, out of them, and to their receives. messages.cpp starts, waits for and ends them.
#include <algorithm>
#include <cstring>

#include "shm/messages.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kGrain = 64;       // frames begin at multiples of this
constexpr int64_t kPiece = 64 << 10;  // bytes that are copied before the other side sees them

constexpr uint64_t padded(uint64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }

}  // namespace

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
        members_.report_memory(CallFacts{}, error.bytes, error.what());
        end_all(Outcome::Faulted, finished);
    }
    return moved;
}

bool PointToPoint::send_now(const Message& message) {
    if (members_.forked()) return false;
    std::lock_guard<std::mutex> guard(lock_);
    if (stopping_ || !outbox_[static_cast<size_t>(message.peer)].empty()) return false;
    try {
        members_.check();
        reserve(message.peer);
        RingControl& ring = segment_.ring(rank_, message.peer);
        uint64_t head = ring.head.load(std::memory_order_relaxed);
        const uint64_t room = ring_bytes_ - under_way(message.peer, head - ring.tail.load(kObserve), message.facts);
        if (room < padded(sizeof(Frame)) + padded(static_cast<uint64_t>(message.bytes))) return false;
        const Frame frame{message.facts, message.bytes, message.tag};
        write_ring(message.peer, head, &frame, sizeof frame);
        head += padded(sizeof frame);
        int64_t moved = 0;
        do {
            const int64_t piece = std::min(message.bytes - moved, kPiece);
            write_ring(message.peer, head, message.data + moved, piece);
            moved += piece;
            head += padded(static_cast<uint64_t>(piece));
            ring.head.store(head, kPublish);
            waiter_.tell(message.peer);
        } while (moved < message.bytes);
    } catch (const Unfinished&) {
        return false;  // the general path finds the same, and reports it
    } catch (const OutOfMemory&) {
        return false;
    }
    return true;
}

// Copies the oldest messages for `peer` into the ring as far as there is room, at most a ring's worth at a time.
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
            // Positions are multiples of the grain, so room is too; only the end of a message is padded.
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

// Checks the bytes between a ring's two ends: they are never more than the ring.
uint64_t PointToPoint::under_way(int peer, uint64_t bytes, const CallFacts& facts) {
    if (bytes > ring_bytes_) corrupt(peer, facts);
    return bytes;
}

void PointToPoint::corrupt(int peer, const CallFacts& facts) {
    members_.report(FaultKind::Corrupt, peer, facts);
    throw Unfinished{Outcome::Faulted};
}

// Copies what has arrived from `peer` to its destination, as far as that is known.
bool PointToPoint::pull(int peer, Messages& finished) {
    RingControl& ring = segment_.ring(peer, rank_);
    auto& known = inbox_[static_cast<size_t>(peer)];
    if (known == nullptr) {
        if (ring.head.load(kObserve) == 0) return false;  // it has never sent anything
        known = std::make_unique<Inbox>();
    }
    Inbox& box = *known;
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

// Decides where the message goes whose frame was just read. False if that is unknown yet: it stays in the ring.
bool PointToPoint::open_frame(int peer, Messages& finished) {
    Inbox& box = *inbox_[static_cast<size_t>(peer)];
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

// Hands messages that were set aside to their receives. One that is still arriving is taken once it is whole.
bool PointToPoint::match_aside(int peer, Messages& finished) {
    Inbox& box = *inbox_[static_cast<size_t>(peer)];
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

// Takes the oldest receive for this message off the list; null if there is none.
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
    // A receive may come soon, so messages are set aside only if a send cannot leave and is waited for, or is stuck.
    if (full_ && (awaited_sends_ > 0 || now_ns() - pushed_ns_ > kStuck)) return true;
    return std::any_of(receives_.begin(), receives_.end(), [peer](const auto& receive) {
        return receive->peer == kAnyone || receive->peer == peer;
    });
}

void PointToPoint::check_fits(const std::shared_ptr<Message>& receive, int source, const Frame& frame,
                              Messages& finished) {
    if (receive->bytes == frame.bytes && receive->facts.dtype == frame.facts.dtype) return;
    members_.report(FaultKind::Mismatch, source, receive->facts, [&](Fault& fault) {
        fault.theirs = frame.facts;
        fault.pair = {source, rank_, frame.bytes, receive->bytes};
    });
    end(receive, Outcome::Faulted, finished);
    throw Unfinished{Outcome::Faulted};
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
