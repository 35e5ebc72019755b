// all_to_all, whose blocks may differ in size from pair to pair.
//
// A rank knows how much it sends and expects, not what the others exchange. So its entry carries a row: the bytes that
// it sends to each rank and those that it expects from each. Both ranks of a pair compare what they exchange, and all
// derive the number of steps from the largest streamed block of each rank. A rank whose blocks fit the rest of the entry
// sends them there and streams nothing.
#include <algorithm>

#include "shm/stream.h"

namespace ringway::shm {
namespace {

// The row is followed by the data of a rank that does not stream, or else by the addresses of its blocks.
struct Row {
    int64_t largest_streamed;
    int64_t bytes[];  // to each rank, then from each

    int64_t to(int rank) const { return bytes[rank]; }
    int64_t from(int rank, int size) const { return bytes[size + rank]; }
    int64_t& address(int rank, int size) { return bytes[2 * size + rank]; }
    int64_t address(int rank, int size) const { return bytes[2 * size + rank]; }
    static int64_t size_for(int ranks) { return (1 + 2 * static_cast<int64_t>(ranks)) * 8; }
};

}  // namespace

// Writes this rank's row, and its data if it fits. Returns whether it fits.
bool Collectives::announce_row(const Request& r) {
    auto* row = reinterpret_cast<Row*>(own_payload());
    if (announced()) return row->largest_streamed == 0;
    int64_t all = 0;
    int64_t largest = 0;
    for (int rank = 0; rank < size_; ++rank) {
        const int64_t to = r.bytes_to(rank);
        row->bytes[rank] = to;
        row->bytes[size_ + rank] = r.bytes_from(rank);
        if (rank == rank_) continue;
        all += to;
        largest = std::max(largest, to);
    }
    const bool eager = fits_entry(Row::size_for(size_) + all);
    row->largest_streamed = eager ? 0 : largest;
    if (eager) {
        std::byte* data = own_payload() + Row::size_for(size_);
        for (int rank = 0; rank < size_; ++rank) {
            if (rank == rank_) continue;
            move_bytes(data, r.in.at(rank), r.bytes_to(rank));
            data += r.bytes_to(rank);
        }
    } else {
        // The other ranks' blocks may be larger, and then all are read.
        const ReadSizes read = members_.reads(rank_);
        const bool may_be_read = largest >= read.least / 4 && largest <= read.most;
        for (int rank = 0; rank < size_; ++rank) {
            const bool offers = may_be_read && rank != rank_;
            row->address(rank, size_) = offers ? static_cast<int64_t>(offered(r.in.at(rank), r.bytes_to(rank))) : 0;
        }
    }
    announce();
    return eager;
}

// The block for this rank in the entry of `from`: it comes after those for lower ranks.
const std::byte* Collectives::eager_block(int from, int64_t bytes) {
    const auto* row = reinterpret_cast<const Row*>(payload(from));
    int64_t at = Row::size_for(size_);
    bool inside = true;
    for (int rank = 0; rank < rank_; ++rank) {
        if (rank == from) continue;
        const int64_t before = row->to(rank);
        inside = inside && before >= 0 && fits_entry(before);
        at += inside ? before : 0;
    }
    if (inside && fits_entry(at + bytes)) return payload(from) + at;
    members_.report(FaultKind::Corrupt, from, *facts_);
    throw Unfinished{Outcome::Faulted};
}

// Whether writing an output block could overwrite an input block that is still to be read. The rank's own block may stay
// where it is.
bool Collectives::shares_memory(const Request& r) const {
    for (int i = 0; i < size_; ++i)
        for (int o = 0; o < size_; ++o) {
            const std::byte* in = r.in.at(i);
            const std::byte* out = r.out.at(o);
            const int64_t in_bytes = r.bytes_to(i), out_bytes = r.bytes_from(o);
            const bool same = i == rank_ && o == rank_ && in == out;
            if (!same && overlap(in, in_bytes, out, out_bytes)) return true;
        }
    return false;
}

void Collectives::all_to_all(const Request& r) {
    if (!shares_memory(r)) return exchange(r);
    std::vector<std::byte>& copy = apart_;
    if (copy.empty())
        for (int rank = 0; rank < size_; ++rank)
            copy.insert(copy.end(), r.in.at(rank), r.in.at(rank) + r.bytes_to(rank));
    std::vector<std::byte*> blocks(static_cast<size_t>(size_));
    std::byte* at = copy.data();
    for (int rank = 0; rank < size_; ++rank) {
        blocks[static_cast<size_t>(rank)] = at;
        at += r.bytes_to(rank);
    }
    Request separate = r;
    separate.in = Blocks{nullptr, 0, blocks.data()};
    exchange(separate);
}

void Collectives::check_pair(int peer, int from, int to, int64_t sent, int64_t expected) {
    if (sent != expected) mismatch(peer, {from, to, sent, expected});
}

void Collectives::exchange(const Request& r) {
    const auto row = [this](int rank) { return reinterpret_cast<const Row*>(payload(rank)); };
    const bool eager = announce_row(r);
    int64_t largest = row(rank_)->largest_streamed;
    for (int i = 1; i < size_; ++i) {
        const int peer = (rank_ + i) % size_;
        compare_with(peer);
        check_pair(peer, peer, rank_, row(peer)->to(rank_), r.bytes_from(peer));
        check_pair(peer, rank_, peer, r.bytes_to(peer), row(peer)->from(rank_, size_));
        largest = std::max(largest, row(peer)->largest_streamed);
        const int64_t bytes = r.bytes_from(peer);
        if (row(peer)->largest_streamed == 0) move_bytes(r.out.at(peer), eager_block(peer, bytes), bytes);
    }
    move_bytes(r.out.at(rank_), r.in.at(rank_), r.bytes_to(rank_));
    if (largest == 0) return;
    const auto offers = [&](int from) {
        for (int to = 0; to < size_; ++to)
            if (from != to && row(from)->largest_streamed != 0 && row(from)->to(to) > 0 && row(from)->address(to, size_) == 0)
                return false;
        return true;
    };
    if (reads_once(largest, offers))
        return take_once([&] {
            for (int i = 1; i < size_; ++i) {
                const int peer = (rank_ + i) % size_;
                const auto from = static_cast<uint64_t>(row(peer)->address(rank_, size_));
                if (row(peer)->largest_streamed != 0) read_block(peer, r.out.at(peer), from, r.bytes_from(peer));
            }
        });

    const int64_t part = part_bytes();
    stream(
        ceil_div(largest, part), kEverybody, kEverybody,
        [&](int64_t turn, uint64_t step) {
            if (!eager) lay_out_blocks(r, part, turn, step);
        },
        [&](int64_t turn, uint64_t step) {
            for (int i = 1; i < size_; ++i) {
                const int peer = (rank_ + i) % size_;
                if (row(peer)->largest_streamed == 0) continue;
                reach(peer, &RankControl::produced, step + 1);
                move_bytes(r.out.at(peer) + turn * part, segment_.in_cell(peer, step) + rank_ * part,
                           piece_at(r.bytes_from(peer), part, turn));
            }
        });
}

}  // namespace ringway::shm
