// One algorithm per collective: small calls travel in the entries, large ones stream through the cells.
#include <algorithm>
#include <stdexcept>

#include "agreement.h"
#include "shm/peer_memory.h"
#include "shm/stream.h"

namespace ringway::shm {
namespace {

// The thresholds, measured with benchmarks/collectives.py.
constexpr int64_t kFlatReduce = 256 << 10;  // most bytes read in all when every rank reduces everything,
constexpr int64_t kAlwaysFlat = 512;        // unless they are this few: the counters of steps cost more cache lines
constexpr int64_t kLeastPart = 32 << 10;    // least bytes of a rank's part of a step, except of the last
constexpr int64_t kStepsAimed = 4;          // steps of a medium call, so that they overlap
constexpr int kMostReaders = 8;             // ranks of an all_gather in which each reads the memory of the others,
constexpr int64_t kMostRead = 4 << 20;      // and bytes of its result; two ranks always do
constexpr int kMostReducers = 2;            // ranks of an all_reduce in which each reads the memory of the others
// How many times larger its parts are than a block that is read elsewhere. On aarch64 the cells are faster, as far as measured:
// there the kernel copies at a third of a core's rate.
#if defined(__aarch64__)
constexpr int64_t kReducedBlocks = 1 << 14;
#else
constexpr int64_t kReducedBlocks = 2;
#endif
constexpr int64_t kScratch = 64 << 10;      // the bytes that are read before they are reduced

// Where the other ranks may read the input and the result of an all_reduce.
struct InAndOut {
    uint64_t in, out;
};

// Whether `one` overlaps a block without being exactly that block. A block in exactly the same memory is safe: each step
// reads its input before it writes its output. If `own` is a rank, only its block is: another one's is written while ranks
// still read `one` in place.
constexpr int kAny = -1;
bool overlaps_askew(const std::byte* one, const Blocks& blocks, int ranks, int64_t bytes, int own = kAny) {
    for (int rank = 0; rank < ranks; ++rank) {
        const bool same = blocks.at(rank) == one && (own == kAny || rank == own);
        if (!same && overlap(one, bytes, blocks.at(rank), bytes)) return true;
    }
    return false;
}

}  // namespace

void Collectives::dispatch(const Request& r) {
    if (size_ == 1) return alone(r);
    if (r.shown != nullptr) return show(r);
    switch (r.op) {
        case Op::Barrier:
            announce();
            return compare_with_all();
        case Op::Broadcast:
            return broadcast(r);
        case Op::AllReduce:
        case Op::Reduce:
            return reduce(r);
        case Op::AllGather:
        case Op::AllGatherSingle:
            return gather(r, kEverybody);
        case Op::Gather:
            return gather(r, r.root);
        case Op::Scatter:
            return scatter(r);
        case Op::ReduceScatter:
        case Op::ReduceScatterSingle:
            return reduce_scatter(r);
        case Op::AllToAll:
        case Op::AllToAllSingle:
            return all_to_all(r);
        default:
            throw std::invalid_argument("not a collective of the engine");
    }
}

void Collectives::alone(const Request& r) {
    const bool paired = r.op == Op::AllToAll || r.op == Op::AllToAllSingle;
    const int64_t bytes = paired ? r.bytes_to(0) : r.count * r.element;
    if (reduces(r.op) && r.reduce == Reduce::PremulSum) {
        sources_[0] = r.in.at(0);
        reduce_sources(r, r.out.at(0), nullptr, bytes);
    } else if (r.op != Op::Barrier && r.op != Op::Broadcast && bytes > 0 && r.out.at(0) != r.in.at(0)) {
        // The sum, mean, extreme or bitwise combination of one rank's values is that rank's values.
        std::memmove(r.out.at(0), r.in.at(0), static_cast<size_t>(bytes));
    }
}

void Collectives::show(const Request& r) {
    signature_ = signature(r.op, r.count, r.dtype, r.reduce, r.root) ^ r.manner;
    announce_with(r.shown, r.shown_bytes);
    compare_with_all();
    for (int rank = 0; rank < size_; ++rank)
        move_bytes(r.seen + r.shown_bytes * rank, payload(rank), r.shown_bytes);
}

void Collectives::announce_with(const void* data, int64_t bytes) {
    if (announced()) return;
    move_bytes(own_payload(), data, bytes);
    announce();
}

void Collectives::announce_with_blocks(const Request& r, int64_t block) {
    if (announced()) return;
    for (int rank = 0; rank < size_; ++rank) move_bytes(own_payload() + block * rank, r.in.at(rank), block);
    announce();
}

bool Collectives::fits_entry(int64_t bytes) const { return bytes <= static_cast<int64_t>(segment_.payload_capacity()); }

void Collectives::broadcast(const Request& r) {
    const int64_t bytes = r.count * r.element;
    const bool root = rank_ == r.root;
    if (fits_entry(bytes)) {
        announce_with(r.in.at(0), root ? bytes : 0);
        if (root) return;
        compare_with(r.root);
        return move_bytes(r.out.at(0), payload(r.root), bytes);
    }
    announce();
    const auto cell = static_cast<int64_t>(segment_.geometry().cell_bytes);
    const auto size_at = [&](int64_t turn) { return piece_at(bytes, cell, turn); };
    stream(
        ceil_div(bytes, cell), r.root, kEverybody,
        [&](int64_t turn, uint64_t step) {
            move_bytes(segment_.in_cell(rank_, step), r.in.at(0) + turn * cell, size_at(turn));
        },
        [&](int64_t turn, uint64_t step) {
            if (root) return;
            reach(r.root, &RankControl::produced, step + 1);
            move_bytes(r.out.at(0) + turn * cell, segment_.in_cell(r.root, step), size_at(turn));
        });
}

const double* Collectives::factors(const Request& r) {
    if (r.reduce != Reduce::PremulSum) return nullptr;
    for (int rank = 0; rank < size_; ++rank)
        factors_[static_cast<size_t>(rank)] =
            rank == rank_ ? r.factor : segment_.control(rank).facts[sequence_ % kEntrySlots].factor;
    return factors_.data();
}

// `sources_` points to each rank's elements.
void Collectives::reduce_sources(const Request& r, void* result, void* also, int64_t bytes) {
    if (bytes == 0) return;
    Reduction reduction{sources_.data(), size_,  bytes / r.element * reals_per_element(r.dtype), factors(r),
                        result,          also};
    reducer_(reduction);
}

bool Collectives::reduces_flat(int64_t bytes) const {
    return fits_entry(bytes) && bytes <= std::max(kFlatReduce / (size_ * size_), kAlwaysFlat);
}

// Every rank publishes all its elements, and reduces everything for itself.
void Collectives::reduce_flat(const Request& r) {
    const int64_t bytes = r.count * r.element;
    const bool takes = r.op == Op::AllReduce || rank_ == r.root;
    announce_with(r.in.at(0), bytes);
    if (!takes) return;
    compare_with_all();
    for (int rank = 0; rank < size_; ++rank) sources_[static_cast<size_t>(rank)] = payload(rank);
    reduce_sources(r, r.out.at(0), nullptr, bytes);
}

Collectives::Deal Collectives::deal(const Request& r) const {
    const Geometry& geometry = segment_.geometry();
    const auto most = static_cast<int64_t>(std::min(geometry.out_bytes, geometry.cell_bytes / size_) / kLine * kLine);
    const int64_t aimed = r.count * r.element / (size_ * kStepsAimed) / kLine * kLine;
    const int64_t part = std::clamp(aimed, std::min(kLeastPart, most), most);
    const int64_t per_step = part / r.element * size_;
    return {r.count, r.element, size_, part, per_step, ceil_div(r.count, per_step)};
}

Collectives::Deal::Part Collectives::Deal::part(int64_t step, int rank) const {
    const int64_t first = step * per_step;
    const int64_t here = std::min(per_step, elements - first);
    const int64_t grain = static_cast<int64_t>(kLine) / element;
    const int64_t share = ceil_div(ceil_div(here, ranks), grain) * grain;
    const int64_t from = std::min(rank * share, here);
    const int64_t to = std::min(from + share, here);
    return {(first + from) * element, (to - from) * element};
}

void Collectives::read_block(int peer, std::byte* to, uint64_t from, int64_t bytes) {
    if (bytes > 0) members_.read(peer, to, from, bytes, *facts_);
}

uint64_t Collectives::offered(const std::byte* block, int64_t bytes) const {
    if (members_.reads(rank_).none() || !is_readable(block, bytes)) return 0;
    return reinterpret_cast<uint64_t>(block);
}

// The bytes of a cell that are for one rank.
int64_t Collectives::part_bytes() const {
    return static_cast<int64_t>(segment_.geometry().cell_bytes / size_ / kLine * kLine);
}

// Lays out the pieces of a step for the other ranks: `part` bytes of the block for each.
void Collectives::lay_out_blocks(const Request& r, int64_t part, int64_t turn, uint64_t step) {
    for (int rank = 0; rank < size_; ++rank)
        if (rank != rank_)
            move_bytes(segment_.in_cell(rank_, step) + rank * part, r.in.at(rank) + turn * part,
                       piece_at(r.bytes_to(rank), part, turn));
}

// In each step every rank reduces its part and publishes the result for the ranks that collect it.
void Collectives::reduce_in_steps(const Request& r, int collector) {
    const Deal d = deal(r);
    const bool takes = collector == kEverybody || collector == rank_;
    const std::byte* in = r.in.at(0);
    std::byte* out = r.out.at(0);
    stream(
        d.steps, kEverybody, kEverybody, collector,
        [&](int64_t turn, uint64_t step) {
            for (int rank = 0; rank < size_; ++rank) {
                if (rank == rank_) continue;
                const auto part = d.part(turn, rank);
                move_bytes(segment_.in_cell(rank_, step) + rank * d.most, in + part.at, part.bytes);
            }
        },
        [&](int64_t turn, uint64_t step) {
            const auto part = d.part(turn, rank_);
            reach_all(kEverybody, &RankControl::produced, step + 1);
            for (int rank = 0; rank < size_; ++rank)
                sources_[static_cast<size_t>(rank)] =
                    rank == rank_ ? in + part.at : segment_.in_cell(rank, step) + rank_ * d.most;
            std::byte* shared = collector == rank_ ? nullptr : segment_.out_cell(rank_, step);
            if (takes)
                reduce_sources(r, out + part.at, shared, part.bytes);
            else
                reduce_sources(r, shared, nullptr, part.bytes);
        },
        [&](int64_t turn, uint64_t step) {
            for (int i = 1; i < size_; ++i) {
                const int rank = (rank_ + i) % size_;
                const auto part = d.part(turn, rank);
                reach(rank, &RankControl::combined, step + 1);
                move_bytes(out + part.at, segment_.out_cell(rank, step), part.bytes);
            }
        });
}

// Every rank reads its part of each other rank's input and reduces it, then reads the other parts of the result. A rank leaves
// once all have: the memory is its caller's.
void Collectives::all_reduce_in_place(const Request& r) {
    const Deal all{r.count, r.element, size_, 0, r.count, 1};
    const auto own_part = all.part(0, rank_);
    const auto memory = [this](int rank) { return reinterpret_cast<const InAndOut*>(payload(rank)); };
    RankControl& control = own();
    const uint64_t end = base_ + 1;
    post(control.produced, end);
    if (control.combined.load(std::memory_order_relaxed) < end) {
        scratch_.resize(static_cast<size_t>(size_ * kScratch));
        for (int64_t done = 0; done < own_part.bytes; done += kScratch) {
            const int64_t at = own_part.at + done, bytes = std::min(kScratch, own_part.bytes - done);
            for (int rank = 0; rank < size_; ++rank) {
                std::byte* read = scratch_.data() + rank * kScratch;
                if (rank != rank_) read_block(rank, read, memory(rank)->in + static_cast<uint64_t>(at), bytes);
                sources_[static_cast<size_t>(rank)] = rank == rank_ ? r.in.at(0) + at : read;
            }
            reduce_sources(r, r.out.at(0) + at, nullptr, bytes);
        }
        post(control.combined, end);
    }
    for (int i = 1; i < size_ && control.collected.load(std::memory_order_relaxed) < end; ++i) {
        const int rank = (rank_ + i) % size_;
        const auto part = all.part(0, rank);
        reach_all(kEverybody, &RankControl::combined, end);
        read_block(rank, r.out.at(0) + part.at, memory(rank)->out + static_cast<uint64_t>(part.at), part.bytes);
    }
    post(control.collected, end);
    reach_all(kEverybody, &RankControl::collected, end);
    base_ = end;
}

// Whether all ranks read each other's memory in this all_reduce.
bool Collectives::reduces_in_place(const Request& r) {
    const int64_t bytes = r.count * r.element;
    const int64_t block = bytes / size_ / kReducedBlocks;
    if (r.op != Op::AllReduce || size_ > kMostReducers || !members_.reads(rank_).contain(block)) return false;
    const bool apart = r.in.at(0) == r.out.at(0) || !overlap(r.in.at(0), bytes, r.out.at(0), bytes);
    InAndOut memory{};
    if (apart && !announced()) {
        memory.in = offered(r.in.at(0), bytes);
        memory.out = r.in.at(0) == r.out.at(0) ? memory.in : offered(r.out.at(0), bytes);
    }
    announce_with(&memory, sizeof memory);
    return reads_once(block, [this](int rank) {
        const auto* offer = reinterpret_cast<const InAndOut*>(payload(rank));
        return offer->in != 0 && offer->out != 0;
    });
}

void Collectives::reduce(const Request& r) {
    if (reduces_flat(r.count * r.element)) return reduce_flat(r);
    if (reduces_in_place(r)) return all_reduce_in_place(r);
    announce();
    reduce_in_steps(r, r.op == Op::AllReduce ? kEverybody : r.root);
}

// Every rank lays out its block; every rank, or the root, takes all of them.
void Collectives::gather_in_steps(const Request& r, int taker) {
    const int64_t bytes = r.count * r.element;
    const auto cell = static_cast<int64_t>(segment_.geometry().cell_bytes);
    const auto size_at = [&](int64_t turn) { return piece_at(bytes, cell, turn); };
    const bool takes = taker == kEverybody || taker == rank_;
    stream(
        ceil_div(bytes, cell), kEverybody, taker,
        [&](int64_t turn, uint64_t step) {
            const std::byte* from = r.in.at(0) + turn * cell;
            if (taker != rank_) move_bytes(segment_.in_cell(rank_, step), from, size_at(turn));
            if (takes) move_bytes(r.out.at(rank_) + turn * cell, from, size_at(turn));
        },
        [&](int64_t turn, uint64_t step) {
            for (int i = 1; i < size_; ++i) {
                const int rank = (rank_ + i) % size_;
                reach(rank, &RankControl::produced, step + 1);
                move_bytes(r.out.at(rank) + turn * cell, segment_.in_cell(rank, step), size_at(turn));
            }
        });
}

// To the root, or to every rank.
void Collectives::gather(const Request& r, int taker) {
    const int64_t bytes = r.count * r.element;
    const bool takes = taker == kEverybody || taker == rank_;
    if (takes && overlaps_askew(r.in.at(0), r.out, size_, bytes, fits_entry(bytes) ? kAny : rank_)) {
        std::vector<std::byte>& copy = apart_;
        if (copy.empty()) copy.assign(r.in.at(0), r.in.at(0) + bytes);
        Request apart = r;
        apart.in = Blocks{copy.data(), 0, nullptr};
        return gather(apart, taker);
    }
    if (!fits_entry(bytes)) {
        // In a gather to one rank, the others' cores would be idle.
        const bool pays = taker == kEverybody && (size_ == 2 || (size_ <= kMostReaders && bytes <= kMostRead / size_));
        const uint64_t address = pays && !announced() ? offered(r.in.at(0), bytes) : 0;
        announce_with(&address, sizeof address);
        const auto address_of = [this](int rank) { return *reinterpret_cast<const uint64_t*>(payload(rank)); };
        if (!pays || !reads_once(bytes, [&](int rank) { return address_of(rank) != 0; })) return gather_in_steps(r, taker);
        return take_once([&] {
            move_bytes(r.out.at(rank_), r.in.at(0), bytes);
            for (int i = 1; i < size_; ++i) {
                const int rank = (rank_ + i) % size_;
                read_block(rank, r.out.at(rank), address_of(rank), bytes);
            }
        });
    }
    announce_with(r.in.at(0), bytes);
    if (!takes) return;
    move_bytes(r.out.at(rank_), payload(rank_), bytes);
    for (int i = 1; i < size_; ++i) {
        const int rank = (rank_ + i) % size_;
        compare_with(rank);
        move_bytes(r.out.at(rank), payload(rank), bytes);
    }
}

void Collectives::scatter(const Request& r) {
    const int64_t bytes = r.count * r.element;
    const bool root = rank_ == r.root;
    if (fits_entry(bytes * size_)) {
        if (root) {
            announce_with_blocks(r, bytes);
        } else {
            announce();
            compare_with(r.root);
        }
        return move_bytes(r.out.at(0), payload(r.root) + bytes * rank_, bytes);
    }
    announce();
    const int64_t part = part_bytes();
    stream(
        ceil_div(bytes, part), r.root, kEverybody,
        [&](int64_t turn, uint64_t step) { lay_out_blocks(r, part, turn, step); },
        [&](int64_t turn, uint64_t step) {
            if (root) return;
            reach(r.root, &RankControl::produced, step + 1);
            move_bytes(r.out.at(0) + turn * part, segment_.in_cell(r.root, step) + rank_ * part,
                       piece_at(bytes, part, turn));
        });
    // Last, because the root's output may be one of the blocks that it sends.
    if (root) std::memmove(r.out.at(0), r.in.at(rank_), static_cast<size_t>(bytes));
}

void Collectives::reduce_scatter(const Request& r) {
    const int64_t bytes = r.count * r.element;
    if (overlaps_askew(r.out.at(0), r.in, size_, bytes)) {
        std::vector<std::byte>& result = apart_;
        result.resize(static_cast<size_t>(bytes));
        Request apart = r;
        apart.out = Blocks{result.data(), 0, nullptr};
        reduce_scatter(apart);
        return move_bytes(r.out.at(0), result.data(), bytes);
    }
    if (reduces_flat(bytes) && fits_entry(bytes * size_)) {
        announce_with_blocks(r, bytes);
        compare_with_all();
        for (int rank = 0; rank < size_; ++rank)
            sources_[static_cast<size_t>(rank)] = payload(rank) + bytes * rank_;
        return reduce_sources(r, r.out.at(0), nullptr, bytes);
    }
    announce();
    const int64_t part = part_bytes();
    stream(
        ceil_div(bytes, part), kEverybody, kEverybody,
        [&](int64_t turn, uint64_t step) { lay_out_blocks(r, part, turn, step); },
        [&](int64_t turn, uint64_t step) {
            reach_all(kEverybody, &RankControl::produced, step + 1);
            for (int rank = 0; rank < size_; ++rank)
                sources_[static_cast<size_t>(rank)] = rank == rank_ ? r.in.at(rank_) + turn * part
                                                                    : segment_.in_cell(rank, step) + rank_ * part;
            reduce_sources(r, r.out.at(0) + turn * part, nullptr, piece_at(bytes, part, turn));
        });
}

}  // namespace ringway::shm
