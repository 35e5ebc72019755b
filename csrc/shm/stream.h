// The flow of a large call's steps; see collectives.h. Included by the files that hold algorithms.
#pragma once

#include <cstring>

#include "shm/collectives.h"

namespace ringway::shm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void move_bytes(void* to, const void* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

template <class Produce, class Combine, class Collect>
void Collectives::stream(int64_t steps, Roles roles, const Produce& produce, const Combine& combine,
                         const Collect& collect) {
    segment_.reserve_cells();
    RankControl& control = own();
    const uint64_t end = base_ + static_cast<uint64_t>(steps);
    const auto plays = [this](int role) { return role == kEverybody || role == rank_; };
    const bool produces = plays(roles.producer), combines = plays(roles.combiner), collects = plays(roles.collector);
    // Who takes no part in a role says so at once. The first use of a cell in this call waits for everybody all the
    // same: another call may have used it before, in which others had that role.
    const auto wait_for_free = [&](int64_t turn, int role, Counter RankControl::*counter) {
        const uint64_t step = base_ + static_cast<uint64_t>(turn);
        if (step >= kCells && role != kNobody) reach_all(turn < kCells ? kEverybody : role, counter, step - kCells + 1);
    };
    if (!combines) post(control.combined, end);
    if (!collects) post(control.collected, end);

    for (int64_t turn = 0; turn < steps + 2; ++turn) {
        const uint64_t step = base_ + static_cast<uint64_t>(turn);
        if (produces && turn < steps) {
            wait_for_free(turn, roles.combiner, &RankControl::combined);
            produce(turn, step);
            post(control.produced, step + 1);
        }
        if (combines && turn >= 1 && turn - 1 < steps) {
            wait_for_free(turn - 1, roles.collector, &RankControl::collected);
            combine(turn - 1, step - 1);
            post(control.combined, step);
        }
        if (collects && turn >= 2) {
            collect(turn - 2, step - 2);
            post(control.collected, step - 1);
        }
    }
    if (!produces) post(control.produced, end);
    base_ = end;
}

}  // namespace ringway::shm
