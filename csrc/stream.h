// The flow of a large call's steps; see collectives.h. Included by the files that hold algorithms.
#pragma once

#include <cstring>

#include "collectives.h"

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
    const auto free_again = [](uint64_t step) { return step < kCells ? 0 : step - kCells + 1; };
    // Who takes no part in a role is never waited for.
    if (!combines) post(control.combined, end);
    if (!collects) post(control.collected, end);

    for (int64_t turn = 0; turn < steps + 2; ++turn) {
        const uint64_t step = base_ + static_cast<uint64_t>(turn);
        if (produces && turn < steps) {
            reach_all(roles.combiner, &RankControl::combined, free_again(step));
            produce(turn, step);
            post(control.produced, step + 1);
        }
        if (combines && turn >= 1 && turn - 1 < steps) {
            reach_all(roles.collector, &RankControl::collected, free_again(step - 1));
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
