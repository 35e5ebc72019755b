// Messages that their receivers read where they are; see messages.h.
#include <unistd.h>

#include "shm/messages.h"

namespace ringway::shm {
namespace {

constexpr int64_t kOfferBlocks = 2;  // an offer costs more than reading a block in a collective, which all ranks are in
// An offer lasts about as long as two copies of the message.
constexpr int64_t offer_ns(int64_t bytes) { return 50'000 + bytes / 2; }

}  // namespace

// Whether this rank and the peer read messages of this size in each other's memory. If only one of them did, it would wait
// for the other's copy.
bool PointToPoint::is_large(int peer, int64_t bytes) const {
    const auto reads = [&](int rank) {
        const ReadSizes sizes = members_.reads(rank);
        return sizes.contain(bytes) && sizes.contain(bytes / kOfferBlocks);
    };
    return bytes > Line::kInside && reads(rank_) && reads(peer);
}

bool PointToPoint::is_to_be_offered(const Message& message) const {
    return message.may_be_offered && offers_.left > 0 && is_large(message.peer, message.bytes);
}

// A message of this size begins to arrive. It crosses with those that this rank is still sending.
void PointToPoint::note_crossing(int peer, int64_t bytes) {
    if (!is_large(peer, bytes)) return;
    bool sends = false;
    for (int to = 0; to < size_ && !sends; ++to) {
        const RingControl& ring = segment_.ring(rank_, to);
        const bool unread = ring.head.load(std::memory_order_relaxed) != ring.tail.load(kObserve);
        sends = unread || !outbox_[static_cast<size_t>(to)].empty();
    }
    sends ? offers_.crossed() : offers_.passed();
}

// The frame of the message ends at `at`, and is not published yet.
void PointToPoint::open_offer(Message& message, uint64_t at) {
    segment_.ring(rank_, message.peer).offer.store(Offer::Open, std::memory_order_relaxed);
    message.taken_at = at;
    message.offer_ends_ns = now_ns() + offer_ns(message.bytes);
}

// Whether the message can go on: the receiver has read all of it, or the offer is withdrawn.
bool PointToPoint::end_offer(Message& message) {
    RingControl& ring = segment_.ring(rank_, message.peer);
    const uint64_t tail = ring.tail.load(kObserve);
    under_way(message.peer, message.taken_at - tail, message.facts);
    if (tail == message.taken_at) {
        const bool taken = ring.offer.load(std::memory_order_relaxed) == Offer::Taken;
        message.moved = taken ? message.bytes : 0;
        taken ? offers_.taken() : offers_.in_vain();
    } else if (now_ns() < message.offer_ends_ns) {
        return false;
    } else if (Offer offer = Offer::Open;
               !ring.offer.compare_exchange_strong(offer, Offer::Withdrawn) && offer != Offer::Withdrawn) {
        message.offer_ends_ns = INT64_MAX;  // it is being read
        return false;
    } else {
        offers_.in_vain();
    }
    message.offered = false;
    message.offer_ends_ns = INT64_MAX;
    return true;
}

void PointToPoint::end_offers() {
    const int64_t until = now_ns() + kLeaving;
    while (withdraw_offers() && !members_.faulted() && now_ns() < until) usleep(50);
}

// Whether others still read what was offered.
bool PointToPoint::withdraw_offers() {
    bool read = false;
    Messages finished;
    {
        std::lock_guard<std::mutex> guard(lock_);
        for (int peer = 0; peer < size_; ++peer) {
            auto& box = outbox_[static_cast<size_t>(peer)];
            if (box.empty() || !box.front()->offered || !box.front()->framed || members_.has_ended(peer)) continue;
            box.front()->offer_ends_ns = 0;
            try {
                push(peer, finished);
            } catch (const Unfinished&) {  // the others find the fault
            }
            read = read || (!box.empty() && box.front()->offered && box.front()->framed);
        }
    }
    tell(finished);
    return read;
}

// Whether the message whose frame was just read from `peer` is to be read where it is. If not, it follows in the ring.
bool PointToPoint::take_offer(int peer) {
    const Frame& frame = inbox_[static_cast<size_t>(peer)]->frame;
    if (frame.what != Travels::Address) return false;
    Offer offer = Offer::Open;
    if (segment_.ring(peer, rank_).offer.compare_exchange_strong(offer, Offer::Taken)) return true;
    if (offer != Offer::Withdrawn) corrupt(peer, frame.facts);
    return false;
}

// Reads an offered message. False if it was withdrawn or cannot be read: it follows in the ring.
bool PointToPoint::read_offer(const Message& message, uint64_t end) {
    RingControl& ring = segment_.ring(message.peer, rank_);
    if (!take_offer(message.peer)) return false;
    const uint64_t from = inbox_[static_cast<size_t>(message.peer)]->frame.address;
    if (!members_.read_if_possible(message.peer, message.data, from, message.bytes, message.facts)) {
        ring.offer.store(Offer::Withdrawn, std::memory_order_relaxed);
        return false;
    }
    ring.tail.store(end, kPublish);
    waiter_.tell(message.peer);
    return true;
}

// Reads the next piece of an offered message into its receive, or aside. False if more of it is left to be read.
bool PointToPoint::read_piece_of_offer(int peer) {
    Inbox& box = *inbox_[static_cast<size_t>(peer)];
    const int64_t piece = std::min(box.left, kReadPiece);
    const auto from = box.frame.address + static_cast<uint64_t>(box.frame.bytes - box.left);
    const CallFacts& facts = box.into != nullptr ? box.into->facts : box.frame.facts;
    if (members_.read_if_possible(peer, box.target(), from, piece, facts)) {
        box.took(piece);
        return box.left == 0;
    }
    segment_.ring(peer, rank_).offer.store(Offer::Withdrawn, std::memory_order_relaxed);
    box.frame.what = Travels::Data;  // all of it follows in the ring
    box.took(box.left - box.frame.bytes);
    return true;
}

}  // namespace ringway::shm
