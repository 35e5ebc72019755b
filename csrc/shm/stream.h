// The flow of a large call's steps; see collectives.h. Included by the files with the algorithms.
#pragma once

#include <algorithm>
#include <cstring>

#include "shm/collectives.h"

namespace ringway::shm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void move_bytes(void* to, const void* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

inline bool overlap(const std::byte* a, int64_t a_bytes, const std::byte* b, int64_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// The bytes of a block in one step, if each step takes `part` of it.
inline int64_t piece_at(int64_t block, int64_t part, int64_t turn) {
    return std::clamp(block - turn * part, int64_t{0}, part);
}

template <class Produce, class Combine>
void Collectives::stream(int64_t steps, int producer, int combiner, const Produce& produce, const Combine& combine) {
    stream(steps, producer, combiner, kNobody, produce, combine, [](int64_t, uint64_t) {});
}

template <class Produce, class Combine, class Collect>
void Collectives::stream(int64_t steps, int producer, int combiner, int collector, const Produce& produce,
                         const Combine& combine, const Collect& collect) {
    // The ranks that write to their cells: all that produce or publish results, or the only one that produces.
    const int writers = producer == kEverybody || collector != kNobody ? size_ : 1;
    if (writers == size_ || producer == rank_) segment_.reserve_cells(writers);
    RankControl& control = own();
    const uint64_t end = base_ + static_cast<uint64_t>(steps);
    const auto plays = [this](int role) { return role == kEverybody || role == rank_; };
    const bool produces = plays(producer), combines = plays(combiner), collects = plays(collector);
    // False for a step that was done before a signal handler interrupted the call.
    const auto still_to_do = [](const Counter& counter, uint64_t step) {
        return counter.load(std::memory_order_relaxed) <= step;
    };
    // A rank that does not play a role posts all of its steps at once. The first use of a cell in this call still waits
    // for everybody: an earlier call, in which other ranks had that role, may have used it.
    const auto wait_for_free = [&](int64_t turn, int role, Counter RankControl::*counter) {
        const uint64_t step = base_ + static_cast<uint64_t>(turn);
        if (step >= kCells && role != kNobody) reach_all(turn < kCells ? kEverybody : role, counter, step - kCells + 1);
    };
    if (!combines) post(control.combined, end);
    if (!collects) post(control.collected, end);

    for (int64_t turn = 0; turn < steps + 2; ++turn) {
        const uint64_t step = base_ + static_cast<uint64_t>(turn);
        if (produces && turn < steps && still_to_do(control.produced, step)) {
            wait_for_free(turn, combiner, &RankControl::combined);
            produce(turn, step);
            post(control.produced, step + 1);
        }
        if (combines && turn >= 1 && turn - 1 < steps && still_to_do(control.combined, step - 1)) {
            wait_for_free(turn - 1, collector, &RankControl::collected);
            combine(turn - 1, step - 1);
            post(control.combined, step);
        }
        if (collects && turn >= 2 && still_to_do(control.collected, step - 2)) {
            collect(turn - 2, step - 2);
            post(control.collected, step - 1);
        }
    }
    if (!produces) post(control.produced, end);
    base_ = end;
}

template <class Offers>
bool Collectives::reads_once(int64_t bytes, const Offers& offers) {
    // A rank that does not read so need not wait for the others here: they find that out.
    if (!members_.reads(rank_).contain(bytes)) return false;
    compare_with_all();  // then all have joined, and their entries are there
    if (!members_.all_read(bytes)) return false;
    for (int rank = 0; rank < size_; ++rank)
        if (!offers(rank)) return false;
    patience_->host.block();
    return true;
}

// One step in which all ranks read the other ranks' memory. A rank leaves once all have: the memory is its caller's.
template <class Take>
void Collectives::take_once(const Take& take) {
    RankControl& control = own();
    const uint64_t end = base_ + 1;
    if (control.combined.load(std::memory_order_relaxed) < end) take();
    post(control.produced, end);
    post(control.collected, end);
    post(control.combined, end);
    reach_all(kEverybody, &RankControl::combined, end);
    base_ = end;
}

}  // namespace ringway::shm
