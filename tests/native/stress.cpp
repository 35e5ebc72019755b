// The engine under stress, with ranks as threads over one mapping, so that ThreadSanitizer sees all of them.
//
//   stress RANKS PROGRAMS SEED
//
// Each program is a random series of collectives and messages, the same on every rank, on data that every rank
// can work out for itself. Exits with 1 at the first wrong result.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "shm/engine.h"
#include "shm/peer_memory.h"

using namespace ringway;
using namespace ringway::shm;

namespace {

constexpr double kPatience = 120;
const int64_t kCounts[] = {0, 1, 2, 7, 8, 64, 1000, 5000, 20000, 70001, 300000};

int32_t value(int rank, int block, int64_t index, int call) {
    return static_cast<int32_t>((rank * 31 + block * 17 + index * 7 + call * 13) % 1009);
}

[[noreturn]] void fail(const char* what, int rank, int call, int64_t index) {
    std::fprintf(stderr, "wrong: %s, rank %d, call %d, element %ld\n", what, rank, call, static_cast<long>(index));
    std::_Exit(1);
}

struct Planned {
    Op op;
    int64_t count;
    int root;
    bool queued;
};

class Rank {
  public:
    Rank(Engine& engine, int rank, int size, Host& host) : engine_(engine), rank_(rank), size_(size), host_(host) {}

    void collective(const Planned& plan, int call) {
        auto task = std::make_shared<Collective>();
        Request& r = task->request;
        r.op = plan.op;
        r.dtype = DType::I32;
        r.element = 4;
        r.count = plan.count;
        r.root = plan.root;
        r.timeout_s = kPatience;
        auto in = input(plan, call);
        std::vector<int32_t> out(static_cast<size_t>(plan.count * size_), -1);
        const int64_t stride = plan.count * 4;
        const bool in_place = plan.op == Op::Broadcast || plan.op == Op::AllReduce || plan.op == Op::Reduce;
        r.in = Blocks{reinterpret_cast<std::byte*>(in.data()), stride, nullptr};
        r.out = in_place ? r.in : Blocks{reinterpret_cast<std::byte*>(out.data()), stride, nullptr};
        run(task, plan.queued);
        check(plan, call, in_place ? in : out);
    }

    // Everybody sends to everybody at once, larger than a ring; tags are received in the opposite order.
    void messages(int64_t count, int call) {
        std::vector<std::shared_ptr<Message>> all;
        std::vector<std::vector<int32_t>> data;
        for (int tag = 0; tag < 2; ++tag)
            for (int peer = 0; peer < size_; ++peer) {
                auto& block = data.emplace_back(static_cast<size_t>(count));
                for (int64_t i = 0; i < count; ++i) block[static_cast<size_t>(i)] = value(rank_, peer + tag, i, call);
                auto m = message(true, peer, tag, block);
                // Those of one tag leave at once where they may.
                if (tag == 0 && engine_.messages.send_now(*m)) continue;
                engine_.messages.start(m, true);
                all.push_back(m);
            }
        std::vector<std::vector<int32_t>> got(static_cast<size_t>(2 * size_));
        for (int tag = 1; tag >= 0; --tag)
            for (int peer = 0; peer < size_; ++peer) {
                auto& block = got[static_cast<size_t>(tag * size_ + peer)];
                block.assign(static_cast<size_t>(count), -1);
                all.push_back(message(false, peer, tag, block));
                engine_.messages.start(all.back(), true);
            }
        for (const auto& m : all)
            if (!engine_.messages.wait(*m, kPatience, host_) || m->outcome() != Outcome::Done)
                fail("message", rank_, call, static_cast<int64_t>(m->outcome()));
        engine_.messages.sweep();
        for (int tag = 0; tag < 2; ++tag)
            for (int peer = 0; peer < size_; ++peer)
                for (int64_t i = 0; i < count; ++i)
                    if (got[static_cast<size_t>(tag * size_ + peer)][static_cast<size_t>(i)] !=
                        value(peer, rank_ + tag, i, call))
                        fail("received", rank_, call, i);
    }

    // Everybody passes small messages on to the next rank, at once where possible, from changing lines of the program.
    void exchanges(int call) {
        const int next = (rank_ + 1) % size_, previous = (rank_ + size_ - 1) % size_;
        for (int turn = 0; turn < 60; ++turn) {
            std::vector<int32_t> given(static_cast<size_t>(turn % 20)), got(given.size(), -1);
            for (size_t i = 0; i < given.size(); ++i) given[i] = value(rank_, turn, static_cast<int64_t>(i), call);
            auto sent = message(true, next, 100 + call, given), received = message(false, previous, 100 + call, got);
            sent->facts.site = static_cast<uint32_t>(turn / 7);
            if (!engine_.messages.send_now(*sent)) finish(sent);
            if (!engine_.messages.receive_now(*received)) finish(received);
            for (size_t i = 0; i < got.size(); ++i)
                if (got[i] != value(previous, turn, static_cast<int64_t>(i), call)) fail("exchanged", rank_, turn, got[i]);
        }
        engine_.messages.sweep();
    }

  private:
    void finish(const std::shared_ptr<Message>& m) {
        engine_.messages.start(m, false);
        if (!engine_.messages.wait(*m, kPatience, host_) || m->outcome() != Outcome::Done)
            fail("message", rank_, 0, static_cast<int64_t>(m->outcome()));
    }

    std::shared_ptr<Message> message(bool sends, int peer, int tag, std::vector<int32_t>& block) {
        auto m = std::make_shared<Message>();
        m->sends = sends;
        m->peer = peer;
        m->tag = tag;
        m->data = reinterpret_cast<std::byte*>(block.data());
        m->bytes = static_cast<int64_t>(block.size()) * 4;
        m->may_be_offered = sends;
        m->timeout_s = kPatience;
        return m;
    }

    std::vector<int32_t> input(const Planned& plan, int call) const {
        const bool many = plan.op == Op::AllToAllSingle || plan.op == Op::ReduceScatterSingle || plan.op == Op::Scatter;
        std::vector<int32_t> in(static_cast<size_t>(plan.count * (many ? size_ : 1)));
        for (int block = 0; block < (many ? size_ : 1); ++block)
            for (int64_t i = 0; i < plan.count; ++i)
                in[static_cast<size_t>(block * plan.count + i)] = value(rank_, block, i, call);
        return in;
    }

    void run(const std::shared_ptr<Collective>& task, bool queued) {
        Outcome outcome = Outcome::Done;
        if (queued || !engine_.progress.run_now(task->request, host_, outcome)) {
            engine_.progress.submit(task);
            if (!engine_.progress.wait(*task, kPatience, host_)) fail("waiting", rank_, 0, 0);
            outcome = task->outcome();
            engine_.progress.sweep();
        }
        if (outcome != Outcome::Done) fail("outcome", rank_, static_cast<int>(task->request.op), static_cast<int>(outcome));
    }

    int32_t sum(int block, int64_t i, int call) const {
        int32_t total = 0;
        for (int rank = 0; rank < size_; ++rank) total += value(rank, block, i, call);
        return total;
    }

    void check(const Planned& plan, int call, const std::vector<int32_t>& out) const {
        const auto expect = [&](int64_t at, int32_t right) {
            if (out[static_cast<size_t>(at)] != right) fail("result", rank_, static_cast<int>(plan.op), at);
        };
        const bool root = rank_ == plan.root;
        for (int64_t i = 0; i < plan.count; ++i) {
            if (plan.op == Op::Broadcast) expect(i, value(plan.root, 0, i, call));
            if (plan.op == Op::AllReduce || (plan.op == Op::Reduce && root)) expect(i, sum(0, i, call));
            if (plan.op == Op::ReduceScatterSingle) expect(i, sum(rank_, i, call));
            if (plan.op == Op::Scatter) expect(i, value(plan.root, rank_, i, call));
            for (int rank = 0; rank < size_; ++rank) {
                if (plan.op == Op::AllGatherSingle || (plan.op == Op::Gather && root))
                    expect(rank * plan.count + i, value(rank, 0, i, call));
                if (plan.op == Op::AllToAllSingle) expect(rank * plan.count + i, value(rank, rank_, i, call));
            }
        }
    }

    Engine& engine_;
    const int rank_;
    const int size_;
    Host& host_;
};

// Random calls, in the same order on every rank. A signal handler may make the next one while it interrupts the latest.
class Program final : public Host {
  public:
    Program(Engine& engine, int rank, int size, unsigned seed, bool interrupts)
        : self_(engine, rank, size, *this), size_(static_cast<unsigned>(size)), random_(seed), interrupts_(interrupts) {}

    void run() {
        while (calls_ < kCalls) next();
    }

    bool interrupted() override {
        // Not inside itself: it could make a call before the one that the handler is about to make.
        if (!interrupts_ || in_handler_ || calls_ == kCalls) return false;
        in_handler_ = true;
        next();
        in_handler_ = false;
        return false;
    }

  private:
    static constexpr int kCalls = 20;

    void next() {
        static const Op ops[] = {Op::Broadcast, Op::AllReduce, Op::Reduce,          Op::AllGatherSingle,
                                 Op::Gather,    Op::Scatter,   Op::ReduceScatterSingle, Op::AllToAllSingle,
                                 Op::Barrier};
        const int call = calls_++;
        const Op op = ops[random_() % (sizeof ops / sizeof *ops)];
        const int64_t count = kCounts[random_() % (sizeof kCounts / sizeof *kCounts)];
        const int root = static_cast<int>(random_() % size_);
        const bool queued = random_() % 2 == 0;
        const bool rooted = op == Op::Broadcast || op == Op::Reduce || op == Op::Gather || op == Op::Scatter;
        if (random_() % 8 == 0) {
            self_.messages(std::min<int64_t>(count, 100000), call);
            // In turns, which takes long if ranks are more than CPUs. And without signals: a handler's call between two
            // turns waits for the other rank, which waits for the next turn if it is in its own handler.
            if (size_ == 2 && !interrupts_) self_.exchanges(call);
        } else {
            self_.collective({op, op == Op::Barrier ? 0 : count, rooted ? root : -1, queued}, call);
        }
    }

    Rank self_;
    const unsigned size_;
    std::mt19937 random_;
    const bool interrupts_;
    int calls_ = 0;
    bool in_handler_ = false;
};

using Engines = std::vector<std::shared_ptr<Engine>>;

// The ranks of a new group, as engines over one mapping.
Engines new_group(int size) {
    const auto mapping = std::make_shared<Mapping>(Segment::create(size), size);
    const auto cpus = static_cast<int>(std::thread::hardware_concurrency());
    Engines engines;
    for (int rank = 0; rank < size; ++rank) {
        const Peers peers(static_cast<size_t>(size), std::make_shared<Peer>(getpid(), -1));
        engines.push_back(std::make_shared<Engine>(mapping, rank, peers, cpus));
    }
    return engines;
}

template <class Work>
void on_all_ranks(const Engines& engines, const Work& work) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < engines.size(); ++rank)
        threads.emplace_back([&, rank] { work(*engines[rank], static_cast<int>(rank)); });
    for (auto& thread : threads) thread.join();
}

// Sends signals to threads, which interrupt their sleeps.
class Signals {
  public:
    Signals() {
        struct sigaction action {};
        action.sa_handler = [](int) {};
        sigaction(SIGUSR1, &action, nullptr);
        thread_ = std::thread([this] { send(); });
    }
    ~Signals() {
        ended_ = true;
        thread_.join();
    }
    // The calling thread gets signals while it works.
    template <class Work>
    void interrupt(const Work& work) {
        change([](auto& targets) { targets.push_back(pthread_self()); });
        work();
        change([](auto& targets) { targets.erase(std::find(targets.begin(), targets.end(), pthread_self())); });
    }

  private:
    template <class Change>
    void change(const Change& change) {
        std::lock_guard<std::mutex> guard(lock_);
        change(targets_);
    }
    void send() {
        while (!ended_) {
            change([](const auto& targets) {
                for (const pthread_t target : targets) pthread_kill(target, SIGUSR1);
            });
            usleep(200);
        }
    }

    std::mutex lock_;
    std::vector<pthread_t> targets_;
    std::atomic<bool> ended_{false};
    std::thread thread_;
};

// A collective and a message that do something when they are done, as Python's callbacks do.
template <class Base>
class Calling final : public Base {
  public:
    std::function<void()> callback;

  protected:
    void finished() override { callback(); }
};

std::shared_ptr<Calling<Message>> unanswered(int peer, int32_t& data) {
    auto message = std::make_shared<Calling<Message>>();
    message->peer = peer;
    message->data = reinterpret_cast<std::byte*>(&data);
    message->bytes = sizeof data;
    message->timeout_s = kPatience;
    return message;
}

void fail_unless(bool right, const char* what, int round) {
    if (!right) fail(what, 0, round, 0);
}

// Waits for what other threads do at their end.
template <class Ready>
void await(const char* what, int round, const Ready& ready) {
    for (int tries = 0; !ready(); ++tries) {
        fail_unless(tries < 100'000, what, round);
        usleep(1000);
    }
}

// The last reference to a group goes in the callbacks of its own threads, while other threads close it too.
void end_on_own_threads(int rounds) {
    for (int round = 0; round < rounds; ++round) {
        Engines engines = new_group(2);
        std::vector<std::weak_ptr<Engine>> engines_left(engines.begin(), engines.end());
        std::atomic<int> called{0};
        int32_t data[2] = {};
        for (size_t rank = 0; rank < 2; ++rank) {
            Engine& engine = *engines[rank];
            // Like Python's reference, which closes the group when it goes.
            auto owner = std::make_shared<std::shared_ptr<Engine>>(engines[rank]);
            const auto drop = [owner, &called]() mutable {
                (*owner)->close();
                owner.reset();
                called.fetch_add(1);
            };
            auto message = unanswered(static_cast<int>(1 - rank), data[rank]);
            auto barrier = std::make_shared<Calling<Collective>>();
            message->callback = drop;
            barrier->callback = drop;
            barrier->request.timeout_s = kPatience;
            engine.messages.start(message, true);
            engine.progress.submit(barrier);
        }
        engines.clear();
        await("callback", round, [&] { return called == 4; });
        for (const auto& engine : engines_left) await("engine", round, [&] { return engine.expired(); });
    }
}

// Several threads close a group in which messages are pending. Every message ends, once.
void close_with_messages(int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const Engines engines = new_group(2);
        std::atomic<int> called{0};
        int32_t data[2] = {};
        for (size_t rank = 0; rank < 2; ++rank) {
            auto message = unanswered(static_cast<int>(1 - rank), data[rank]);
            message->callback = [&called] { called.fetch_add(1); };
            engines[rank]->messages.start(message, true);
        }
        if (round % 2 == 0) usleep(1000);  // the threads are asleep by then
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i) threads.emplace_back([&, i] { engines[static_cast<size_t>(i % 2)]->close(); });
        for (auto& thread : threads) thread.join();
        fail_unless(called == 2, "a message that did not end", round);
    }
}

// A root that has sent may go, before others have seen that it came, and before some have come themselves.
void leave_after_the_last_call(int size, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const auto engines = new_group(size);
        on_all_ranks(engines, [&](Engine& engine, int rank) {
            Host host;
            int32_t told = rank == 0 ? round : -1;
            Request broadcast;
            broadcast.op = Op::Broadcast;
            broadcast.root = 0;
            broadcast.element = 4;
            broadcast.in = broadcast.out = Blocks{reinterpret_cast<std::byte*>(&told), 0, nullptr};
            broadcast.count = 1;
            broadcast.timeout_s = kPatience;
            usleep(rank == 0 ? 200 : rank == size - 1 ? 2000 : 0);
            Outcome outcome = Outcome::Done;
            if (!engine.progress.run_now(broadcast, host, outcome) || outcome != Outcome::Done || told != round)
                fail("last call", rank, round, static_cast<int64_t>(outcome));
            engine.close();
        });
    }
}

// What a peer cannot have meant is a fault, and nothing is read or written outside the ring.
void refuse_what_cannot_be() {
    for (const auto& [sends, own] : std::vector<std::pair<bool, bool>>{{false, false}, {true, false}, {true, true}}) {
        const auto engines = new_group(2);
        Membership& members = engines[0]->members;
        RingControl& ring = sends ? members.segment().ring(0, 1) : members.segment().ring(1, 0);
        (sends && !own ? ring.tail : ring.head).store(uint64_t{1} << 40, kPublish);
        std::vector<int32_t> block(1 << 20);  // more than the ring holds: a sender looks at the tail when it needs room
        auto message = std::make_shared<Message>();
        message->sends = sends;
        message->peer = 1;
        message->data = reinterpret_cast<std::byte*>(block.data());
        message->bytes = static_cast<int64_t>(block.size() * sizeof(int32_t));
        message->timeout_s = kPatience;
        engines[0]->messages.start(message, false);
        const Fault* fault = members.fault();
        if (!message->done() || message->outcome() != Outcome::Faulted || fault == nullptr ||
            fault->kind != FaultKind::Corrupt || fault->rank != 1)
            fail("corrupt ring", 0, sends ? 1 : 0, 0);
        for (const auto& engine : engines) engine->close();
    }
}

// Memory that cannot be read ends the group with the reason, though its owner lives.
void refuse_memory_that_is_not_there() {
    const auto engines = new_group(2);
    Membership& members = engines[0]->members;
    std::byte byte;
    bool refused = false;
    try {
        members.read(1, &byte, 16, 1, CallFacts{});
    } catch (const Unfinished& unfinished) {
        refused = unfinished.outcome == Outcome::Faulted;
    }
    const Fault* fault = members.fault();
    if (!refused || fault == nullptr || fault->kind != FaultKind::Unreadable || fault->rank != 1 || fault->reason[0] == 0)
        fail("unreadable memory", 0, 0, 0);
    for (const auto& engine : engines) engine->close();
}

void run_all(int size, int programs, unsigned seed) {
    const auto engines = new_group(size);
    const auto run_programs = [&](Engine& engine, int rank, bool interrupts) {
        for (int p = 0; p < programs; ++p) Program(engine, rank, size, seed + static_cast<unsigned>(p), interrupts).run();
    };
    on_all_ranks(engines, [&](Engine& engine, int rank) { run_programs(engine, rank, false); });
    {
        Signals signals;
        on_all_ranks(engines, [&](Engine& engine, int rank) {
            signals.interrupt([&] { run_programs(engine, rank, true); });
        });
    }
    for (const auto& engine : engines) engine->close();
    end_on_own_threads(20 * programs);
    close_with_messages(20 * programs);
    leave_after_the_last_call(size, 50 * programs);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int size = std::atoi(argv[1]);
    const int programs = std::atoi(argv[2]);
    const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
    for (const int64_t read_from : {INT64_MAX, int64_t{1}}) {  // through the segment, and in each other's memory
        set_read_once_from(read_from);
        run_all(size, programs, seed);
    }
    refuse_what_cannot_be();
    refuse_memory_that_is_not_there();
    std::printf("ok: %d ranks, %d programs, seed %u\n", size, programs, seed);
    return 0;
}
