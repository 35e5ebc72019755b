// The collectives of one group over its segment.
//
// Every call begins with an entry: the rank posts its sequence number, the signature of its call and, if the data is
// small, the data. A rank that waits for another one checks its signature first, so a rank that called something else is
// found there. Small calls end there. Large ones stream through the cells in steps:
//
//   produce(k)   lay out the input parts of step k that other ranks take        -> `produced`
//   combine(k)   take the rank's own parts from all ranks, copying or reducing  -> `combined`
//   collect(k)   take the results that the other ranks reduced (all_reduce)     -> `collected`
//
// Produce is one step ahead of combine, and combine one ahead of collect, so a rank that keeps pace with the others finds
// what it needs already there. The counters only grow, over all calls: step k of a call is step base + k of the group, and
// uses cell (base + k) % kCells.
//
// A call that waits may run a signal handler, which may make the next call of the group. That one must not begin before
// this one ends, so it continues this one first. The rank's own entry and counters say how far the call has come: what
// they cover is skipped.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/membership.h"
#include "reduce/reduce.h"

namespace ringway::shm {

// One block of memory per rank: at equal distances, or in a list.
struct Blocks {
    std::byte* base = nullptr;
    int64_t stride = 0;
    std::byte* const* list = nullptr;

    std::byte* at(int rank) const { return list != nullptr ? list[rank] : base + stride * rank; }
};

inline bool reduces(Op op) {
    return op == Op::AllReduce || op == Op::Reduce || op == Op::ReduceScatter || op == Op::ReduceScatterSingle;
}

inline bool gathers(Op op) { return op == Op::AllGather || op == Op::AllGatherSingle || op == Op::Gather; }
inline bool scatters(Op op) { return op == Op::ReduceScatter || op == Op::ReduceScatterSingle || op == Op::Scatter; }

struct Request {
    Op op = Op::Barrier;
    DType dtype = DType::U8;
    Reduce reduce = Reduce::Sum;
    int root = -1;
    double factor = 1;      // PREMUL_SUM
    int64_t count = 0;      // elements of one block: what one rank contributes or gets
    int64_t element = 1;    // bytes of an element
    Blocks in;
    Blocks out;
    const int64_t* send_bytes = nullptr;  // all_to_all with blocks of different sizes: to and from each rank
    const int64_t* recv_bytes = nullptr;
    double timeout_s = 1800;
    uint64_t number = 0;
    uint32_t site = 0;
    const char* place = "";
    // For a call whose data moves elsewhere: the ranks compare the call, and each shows the others these bytes.
    const std::byte* shown = nullptr;
    int64_t shown_bytes = 0;
    std::byte* seen = nullptr;  // what each rank showed, one after the other
    uint64_t manner = 0;        // how the data moves, which must be the same on every rank

    // all_to_all's blocks.
    int64_t bytes_to(int rank) const { return send_bytes != nullptr ? send_bytes[rank] : count * element; }
    int64_t bytes_from(int rank) const { return recv_bytes != nullptr ? recv_bytes[rank] : count * element; }
};

// `place` is for the caller to copy, because it rarely changes.
inline void fill_facts(const Request& r, CallFacts& facts) {
    facts.number = r.number;
    facts.count = r.count;
    facts.factor = r.factor;
    facts.root = r.root;
    facts.op = r.op;
    facts.dtype = r.dtype;
    facts.reduce = r.reduce;
}

class Collectives final : public Guard {
  public:
    explicit Collectives(Membership& members);

    // Runs one collective to its end. One at a time.
    Outcome run(const Request& request, Host& host);
    // For a call that is made while `run` waits on this thread, by a signal handler: continues that `run` to its end.
    Outcome finish_interrupted(Host& host) {
        frame_->since_ns = patience_->since_ns;
        return go_on(*frame_, host);
    }

    // What a rank posted about the latest call.
    const CallFacts& facts_of(int peer) const { return segment_.control(peer).facts[sequence_ % kEntrySlots]; }

    bool stop(int peer, bool look_for_dead, const Look& ready) override {
        return members_.stop(peer, look_for_dead, *facts_, ready);
    }

  private:
    static constexpr int kEverybody = -1;
    static constexpr int kNobody = -2;

    // How the elements of an all_reduce or reduce are divided among steps, and those of a step among ranks.
    struct Deal {
        int64_t elements, element, ranks, most, per_step, steps;
        struct Part {
            int64_t at, bytes;
        };
        Part part(int64_t step, int rank) const;
    };

    // A call in `run`.
    struct Frame {
        const Request& request;
        int64_t since_ns = 0;  // when it first had to wait
        bool begun = false;
        bool ended = false;
        Outcome outcome = Outcome::Done;
    };
    // Ends a wait if a signal handler's call has ended the call that waits.
    class FrameHost final : public Host {
      public:
        FrameHost(Host& host, const Frame& frame) : host_(host), frame_(frame) {}
        void block() override { host_.block(); }
        bool interrupted() override {
            const bool raised = host_.interrupted();
            if (frame_.ended) throw Unfinished{raised ? Outcome::Interrupted : frame_.outcome};
            return raised;
        }

      private:
        Host& host_;
        const Frame& frame_;
    };

    Outcome go_on(Frame& frame, Host& host);
    void begin(const Request& request);
    void dispatch(const Request& r);
    void show(const Request& r);
    void alone(const Request& r);
    void broadcast(const Request& r);
    void reduce(const Request& r);
    void reduce_flat(const Request& r);
    void reduce_in_steps(const Request& r, int collector);
    bool reduces_in_place(const Request& r);
    void all_reduce_in_place(const Request& r);
    void gather(const Request& r, int taker);
    void scatter(const Request& r);
    void reduce_scatter(const Request& r);
    void all_to_all(const Request& r);
    void exchange(const Request& r);
    bool announce_row(const Request& r);
    bool shares_memory(const Request& r) const;
    const std::byte* eager_block(int from, int64_t bytes);
    void check_pair(int peer, int from, int to, int64_t sent, int64_t expected);
    void gather_in_steps(const Request& r, int taker);
    // Where other ranks may read a block, for the entry; 0 if they cannot.
    uint64_t offered(const std::byte* block, int64_t bytes) const;
    // Whether every rank reads blocks of this size in the memory of the others, and every rank offers what they need:
    // `offers(rank)`. The same on every rank.
    template <class Offers>
    bool reads_once(int64_t bytes, const Offers& offers);
    template <class Take>
    void take_once(const Take& take);
    void read_block(int peer, std::byte* to, uint64_t from, int64_t bytes);
    int64_t part_bytes() const;
    void lay_out_blocks(const Request& r, int64_t part, int64_t turn, uint64_t step);

    void describe(const Request& r);
    void check_previous();
    bool announced() const {
        return segment_.entry(rank_, sequence_).sequence.load(std::memory_order_relaxed) == sequence_;
    }
    void announce();
    void announce_with(const void* data, int64_t bytes);
    void announce_with_blocks(const Request& r, int64_t block);
    void compare_with(int peer);
    void compare_with_all();
    [[noreturn]] void mismatch(int peer, const Pair& pair);

    // The steps of a large call. Each role is played by everybody, nobody, or one rank.
    template <class Produce, class Combine, class Collect>
    void stream(int64_t steps, int producer, int combiner, int collector, const Produce& produce,
                const Combine& combine, const Collect& collect);
    template <class Produce, class Combine>
    void stream(int64_t steps, int producer, int combiner, const Produce& produce, const Combine& combine);
    void reach(int peer, Counter RankControl::*counter, uint64_t target);
    void reach_all(int role, Counter RankControl::*counter, uint64_t target);
    void post(Counter& counter, uint64_t value);
    template <class Ready>
    void wait(int peer, const Ready& ready) {
        const Waking waking = waiter_.until(peer, *patience_, ready);
        if (waking != Waking::Ready) give_up(waking, peer);
    }
    [[noreturn]] void give_up(Waking why, int peer);
    std::vector<int> late(int peer) const;

    Deal deal(const Request& r) const;
    bool fits_entry(int64_t bytes) const;
    bool reduces_flat(int64_t bytes) const;
    void reduce_sources(const Request& r, void* result, void* copy, int64_t bytes);
    const double* factors(const Request& r);
    const std::byte* payload(int rank) const { return members_.segment().entry(rank, sequence_).payload; }
    std::byte* own_payload() { return members_.segment().entry(rank_, sequence_).payload; }
    RankControl& own() { return members_.segment().control(rank_); }

    Membership& members_;
    Segment& segment_;
    const int rank_;
    const int size_;
    Waiter waiter_;
    uint64_t sequence_ = 0;
    uint64_t base_ = 0;      // steps of all calls before this one
    uint64_t signature_ = 0;
    Frame* frame_ = nullptr;
    std::vector<std::byte> apart_;  // a copy of data of the current call that overlaps other data
    std::vector<std::byte> scratch_;  // for what is read from other ranks' memory and not kept
    Patience* patience_ = nullptr;
    CallFacts* facts_;
    Reducer reducer_ = nullptr;
    std::vector<uint64_t> compared_;  // the latest call in which each peer's signature was checked
    std::vector<const void*> sources_;
    std::vector<double> factors_;
};

}  // namespace ringway::shm
