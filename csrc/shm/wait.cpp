#include "shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ringway::shm {
namespace {

// A spin lasts longer than it takes to wake a sleeping rank; otherwise two ranks that wake each other would never get back
// to spinning. Spins fail if other processes need the CPUs too; after a few failures most waits skip the spin.
constexpr int64_t kSpin = 100'000;
constexpr int kMissesBorne = 4;
constexpr int kOneIn = 16;
constexpr int64_t kSleepSlice = 20'000'000;  // between two checks for dead peers and signals
constexpr int kClocksPerCpu = 8;  // asking for the CPU is a system call with old C libraries
constexpr int64_t kBetweenMoves = 5'000'000;  // the kernel may have a reason to put both ranks on one CPU

// tests/native makes this slow, so that other threads act in the window between announcement and sleep.
void dawdle() {
#ifdef RINGWAY_DAWDLE
    usleep(300);
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

uint32_t current_cpu() { return static_cast<uint32_t>(sched_getcpu()) + 1; }

// Moves this thread to another CPU that it may use, and leaves it free to move on.
void change_cpu() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t others = allowed;
    CPU_CLR(static_cast<size_t>(sched_getcpu()), &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

thread_local Interruptible* Interruptible::latest_ = nullptr;

Waiter::Waiter(std::atomic<uint32_t>* words, std::atomic<uint32_t>* cpus, int rank, int size, bool spin, Guard& guard)
    : words_(words),
      cpus_(cpus),
      rank_(rank),
      size_(size),
      own_(static_cast<uint32_t>(rank) + 1),
      guard_(guard),
      may_spin_(spin) {}

void wake(std::atomic<uint32_t>& word) {
    if (word.exchange(0, std::memory_order_seq_cst) != 0) futex(&word, FUTEX_WAKE, 1, nullptr);
}

Waking Waiter::slowly(int peer, Patience& patience, const Look& ready) {
    const bool hopeful = misses_ < kMissesBorne || ++waits_ % kOneIn == 0;
    if (may_spin_ && hopeful && spin(peer, patience, ready)) return Waking::Ready;
    patience.host.block();
    const Waking waking = sleep(peer, patience, ready);
    // A rank that gives up at the same moment must still be able to read which rank this one waited for.
    if (waking != Waking::TimedOut) words_[rank_].store(0, std::memory_order_relaxed);
    return waking;
}

void Waiter::tell_cpu() const { cpus_[rank_].store(current_cpu(), std::memory_order_relaxed); }

// Whether the peer, if it is where it last waited, can run while this rank spins.
bool Waiter::leave_cpu_of(int peer) {
    tell_cpu();
    if (peer == kAnyone && size_ == 2) peer = 1 - rank_;
    const auto shared = [&] { return peer >= 0 && cpus_[peer].load(std::memory_order_relaxed) == current_cpu(); };
    if (!shared()) return true;
    if (rank_ < peer || now_ns() - moved_ns_ < kBetweenMoves) return false;
    moved_ns_ = now_ns();
    change_cpu();
    tell_cpu();
    return !shared();
}

bool Waiter::spin(int peer, Patience& patience, const Look& ready) {
    const int64_t start = now_ns();
    patience.deadline_ns(start);
    for (int clocks = 0;; ++clocks) {
        if (clocks % kClocksPerCpu == 0 && !leave_cpu_of(peer)) return false;
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (ready()) {
                misses_ = 0;
                return true;
            }
            relax();
        }
        const int64_t spent = now_ns() - start;
        if (spent > kHoldGil) patience.host.block();
        if (spent > kSpin) {
            ++misses_;
            return false;
        }
    }
}

Waking Waiter::sleep(int peer, Patience& patience, const Look& ready) {
    const uint32_t announced = peer == kAnyone ? kForAnyone : static_cast<uint32_t>(peer) + 1;
    bool look_for_dead = false, look_for_signals = false;
    for (;;) {
        words_[rank_].store(announced, std::memory_order_seq_cst);
        if (ready()) return Waking::Ready;
        dawdle();
        if (guard_.stop(peer, look_for_dead, ready)) return ready() ? Waking::Ready : Waking::Stopped;
        if (look_for_signals && patience.host.interrupted()) return Waking::Interrupted;
        const int64_t now = now_ns();
        const int64_t left = patience.deadline_ns(now) - now;
        if (left <= 0) return Waking::TimedOut;
        const int64_t slice = std::min(left, kSleepSlice);
        const timespec timeout{slice / 1'000'000'000, slice % 1'000'000'000};
        const long rc = futex(&words_[rank_], FUTEX_WAIT, announced, &timeout);
        const int error = errno;
        tell_cpu();
        look_for_dead = rc != 0 && error == ETIMEDOUT;
        look_for_signals = rc != 0 && error != EAGAIN;
    }
}

}  // namespace ringway::shm
