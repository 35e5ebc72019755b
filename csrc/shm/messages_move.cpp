// How messages move: into the rings, out of them, and to their receives. messages.cpp starts, waits for and ends them.
#include <algorithm>
#include <cstring>

#include "shm/messages.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kGrain = 64;       // frames begin at multiples of this
// Bytes that are copied before the other side sees them. Small pieces of a short message: the other side copies out at the
// same time. A long one keeps both sides busy anyway, and each piece costs a fence.
constexpr int64_t kPiece = 64 << 10;
constexpr int64_t kShort = 256 << 10;
constexpr int64_t kShortPiece = 16 << 10;
constexpr int64_t piece_of(int64_t bytes) { return bytes <= kShort ? kShortPiece : kPiece; }


constexpr uint64_t padded(int64_t bytes) { return (static_cast<uint64_t>(bytes) + kGrain - 1) / kGrain * kGrain; }

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
    if (stopping_ || !outbox_[static_cast<size_t>(message.peer)].empty() || is_to_be_offered(message)) return false;
    try {
        members_.check();
        reserve(message.peer);
        RingControl& ring = segment_.ring(rank_, message.peer);
        uint64_t head = ring.head.load(std::memory_order_relaxed);
        const int64_t bytes = message.payload_bytes();
        const bool inside = bytes <= Line::kInside;
        const uint64_t needed = head_bytes(message) + (inside ? 0 : padded(bytes));
        if (room(message, head, needed) < needed) return false;
        const uint64_t data_at = head + head_bytes(message);
        write_head(message, head);
        head = data_at;
        int64_t moved = inside ? bytes : 0;
        do {
            const int64_t piece = std::min(bytes - moved, piece_of(bytes));
            write_ring(message.peer, head, message.payload() + moved, piece);
            moved += piece;
            head += padded(piece);
            ring.head.store(head, kPublish);
            waiter_.tell(message.peer);
        } while (moved < bytes);
    } catch (const Unfinished&) {
        return false;  // the general path finds the same, and reports it
    } catch (const OutOfMemory&) {
        return false;
    }
    return true;
}

bool PointToPoint::receive_now(const Message& message) {
    if (members_.forked()) return false;
    RingControl& ring = segment_.ring(message.peer, rank_);
    uint64_t tail = ring.tail.load(std::memory_order_relaxed);
    soon([&] { return ring.head.load(kObserve) != tail; });
    std::lock_guard<std::mutex> guard(lock_);
    const Inbox* known = inbox_[static_cast<size_t>(message.peer)].get();
    const bool arriving = known != nullptr && (known->into != nullptr || known->aside != nullptr || !known->waiting.empty());
    if (stopping_ || arriving || !receives_.empty()) return false;
    try {
        members_.check();
        tail = ring.tail.load(std::memory_order_relaxed);
        const uint64_t there = under_way(message.peer, ring.head.load(kObserve) - tail, message.facts);
        if (there == 0) return false;
        Line line;
        const uint64_t data_at = tail + read_head(message.peer, tail, line);
        if (line.tag != message.tag || line.bytes != message.bytes || line.dtype != message.facts.dtype) return false;
        if (line.what == Travels::Reference || (line.what == Travels::Address && message.bytes > kReadPiece)) return false;
        note_crossing(message.peer, message.bytes);
        if (line.what == Travels::Address) return read_offer(message, data_at);
        const bool inside = message.bytes <= Line::kInside;
        const uint64_t end = data_at + (inside ? 0 : padded(message.bytes));
        if (!inside && (end - tail > ring_bytes_ || !read_as_it_comes(message, data_at))) return false;
        if (inside && message.bytes > 0)
            std::memcpy(message.data, line.inside, static_cast<size_t>(message.bytes));
        ring.tail.store(end, kPublish);
        waiter_.tell(message.peer);
    } catch (const Unfinished&) {
        return false;  // the general path finds the same, and reports it
    }
    return true;
}

// Copies a message's data while the other side still writes it. False if that takes long: then it is read again, because it
// is still in the ring.
bool PointToPoint::read_as_it_comes(const Message& message, uint64_t at) {
    RingControl& ring = segment_.ring(message.peer, rank_);
    int64_t there = 0;
    for (int64_t moved = 0; moved < message.bytes; moved += there) {
        const auto more = [&] {
            there = std::min(static_cast<int64_t>(ring.head.load(kObserve) - at), message.bytes) - moved;
            return there > 0;
        };
        if (!soon(more)) return false;
        read_ring(message.peer, at + static_cast<uint64_t>(moved), message.data + moved, there);
    }
    under_way(message.peer, ring.head.load(kObserve) - ring.tail.load(std::memory_order_relaxed), message.facts);
    return true;
}

// The free bytes of the ring to the message's peer: at least `needed`, or all that there are.
uint64_t PointToPoint::room(const Message& message, uint64_t head, uint64_t needed) {
    Outlet& outlet = outlets_[static_cast<size_t>(message.peer)];
    under_way(message.peer, head - outlet.tail, message.facts);
    if (ring_bytes_ - (head - outlet.tail) < needed) {
        const uint64_t tail = segment_.ring(rank_, message.peer).tail.load(kObserve);
        under_way(message.peer, head - tail, message.facts);
        outlet.tail = tail;
    }
    return ring_bytes_ - (head - outlet.tail);
}

uint64_t PointToPoint::head_bytes(const Message& message) const {
    const Outlet& outlet = outlets_[static_cast<size_t>(message.peer)];
    return sizeof(Line) + (outlet.has_place && outlet.site == message.facts.site ? 0 : kTextBytes);
}

// Writes a frame and, if the whole message fits it, the data.
void PointToPoint::write_head(const Message& message, uint64_t at) {
    Outlet& outlet = outlets_[static_cast<size_t>(message.peer)];
    const CallFacts& facts = message.facts;
    const Travels what = message.offered        ? Travels::Address
                         : message.by_reference ? Travels::Reference
                                                : Travels::Data;
    Line line{message.bytes, facts.number, facts.count, message.tag, facts.dtype, head_bytes(message) > sizeof(Line), what, {}};
    if (message.offered)
        std::memcpy(line.inside, &message.data, sizeof message.data);
    else if (message.bytes > 0 && message.payload_bytes() <= Line::kInside)
        std::memcpy(line.inside, message.data, static_cast<size_t>(message.bytes));
    write_ring(message.peer, at, &line, sizeof line);
    if (!line.has_place) return;
    write_ring(message.peer, at + sizeof line, facts.place, kTextBytes);
    outlet.has_place = true;
    outlet.site = facts.site;
}

// Reads the frame of the next message into the inbox, and returns its length. It may be read more than once.
uint64_t PointToPoint::read_head(int from, uint64_t at, Line& line) {
    auto& box = inbox_[static_cast<size_t>(from)];
    if (box == nullptr) box = std::make_unique<Inbox>();
    read_ring(from, at, &line, sizeof line);
    Frame& frame = box->frame;
    frame.bytes = line.bytes;
    frame.tag = line.tag;
    frame.what = line.what;
    std::memcpy(&frame.address, line.inside, sizeof frame.address);
    frame.facts.number = line.number;
    frame.facts.count = line.count;
    frame.facts.root = rank_;
    frame.facts.op = Op::Send;
    frame.facts.dtype = line.dtype;
    if (line.has_place) read_ring(from, at + sizeof line, frame.facts.place, kTextBytes);
    return sizeof line + (line.has_place ? kTextBytes : 0);
}

// Copies the oldest messages for `peer` into the ring as far as there is room, at most a ring's worth at a time.
bool PointToPoint::push(int peer, Messages& finished) {
    auto& box = outbox_[static_cast<size_t>(peer)];
    RingControl& ring = segment_.ring(rank_, peer);
    const uint64_t start = ring.head.load(std::memory_order_relaxed);
    uint64_t head = start;
    bool ended = false;
    while (!box.empty() && head - start < ring_bytes_) {
        Message& message = *box.front();
        if (!message.framed) {
            const uint64_t needed = head_bytes(message);
            if (room(message, head, needed) < needed) break;
            message.offered = message.offered && ring.tail.load(kObserve) == head;
            write_head(message, head);
            head += needed;
            message.framed = true;
            if (message.offered) open_offer(message, head);
            if (message.payload_bytes() <= Line::kInside) message.moved = message.payload_bytes();
        } else if (message.offered) {
            if (!end_offer(message)) break;
            ended = true;
        } else {
            // Positions are multiples of the grain, so room is too; only the end of a message is padded.
            const int64_t left = std::min(message.payload_bytes() - message.moved, piece_of(message.payload_bytes()));
            const auto free = static_cast<int64_t>(room(message, head, padded(left)));
            const int64_t piece = std::min(left, free);
            if (piece == 0) break;
            write_ring(peer, head, message.payload() + message.moved, piece);
            message.moved += piece;
            head += padded(piece);
        }
        ring.head.store(head, kPublish);
        waiter_.tell(peer);
        if (message.moved == message.payload_bytes()) {
            end(box.front(), Outcome::Done, finished);
            box.pop_front();
        }
    }
    full_ = full_ || (!box.empty() && box.front()->offer_ends_ns == INT64_MAX);  // an offer ends by itself
    return head != start || ended;
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
            Line line;
            const uint64_t length = read_head(peer, tail, line);
            if (line.bytes < 0 || static_cast<uint64_t>(there) < length) corrupt(peer, box.frame.facts);
            if (line.what == Travels::Address && line.bytes <= Line::kInside) corrupt(peer, box.frame.facts);
            if (!open_frame(peer, finished)) break;
            note_crossing(peer, line.bytes);
            box.left = box.frame.payload_bytes();
            if (take_offer(peer)) {
                box.frame_bytes = length;
                continue;
            }
            box.frame.what = line.what == Travels::Address ? Travels::Data : line.what;
            tail += length;
            if (box.left > 0 && box.left <= Line::kInside) {
                std::memcpy(box.target(), line.inside, static_cast<size_t>(box.left));
                box.took(box.left);
            }
        } else if (box.frame.what == Travels::Address) {
            if (!read_piece_of_offer(peer)) return true;
            tail += box.frame_bytes;
        } else {
            const int64_t piece = std::min({there, box.left, kPiece});
            if (piece == 0) break;
            read_ring(peer, tail, box.target(), piece);
            tail += padded(piece);
            box.took(piece);
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
        receive->source = peer;
        check_fits(receive, box.frame, finished);
        make_room(receive, box.frame, finished);
        box.into = std::move(receive);
        return true;
    }
    if (!sets_aside(peer)) return false;
    const auto bytes = static_cast<size_t>(box.frame.payload_bytes());
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
        receive->source = peer;
        check_fits(receive, aside->frame, finished);
        make_room(receive, aside->frame, finished);
        if (receive->bytes > 0)
            std::memcpy(receive->payload(), aside->data.get(), static_cast<size_t>(receive->payload_bytes()));
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

void PointToPoint::check_fits(const std::shared_ptr<Message>& receive, const Frame& frame, Messages& finished) {
    if (fits(*receive, frame)) return;
    members_.report(FaultKind::Mismatch, receive->source, receive->facts, [&](Fault& fault) {
        fault.theirs = frame.facts;
        fault.pair = {receive->source, rank_, frame.bytes, receive->bytes};
    });
    end(receive, Outcome::Faulted, finished);
    throw Unfinished{Outcome::Faulted};
}

// A reference has room in every receive that takes one. Other receives never get one from a sound rank.
void PointToPoint::make_room(const std::shared_ptr<Message>& receive, const Frame& frame, Messages& finished) {
    const bool by_reference = frame.what == Travels::Reference;
    if (by_reference && !receive->room) {
        end(receive, Outcome::Faulted, finished);
        corrupt(receive->source, receive->facts);
    }
    receive->by_reference = by_reference;
    if (by_reference || !receive->room || frame.bytes <= *receive->room) return;
    receive->owned.reset(new (std::nothrow) std::byte[static_cast<size_t>(frame.bytes)]);
    if (receive->owned == nullptr) {
        end(receive, Outcome::Faulted, finished);
        throw OutOfMemory("no memory to receive a message", frame.bytes);
    }
    receive->data = receive->owned.get();
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
