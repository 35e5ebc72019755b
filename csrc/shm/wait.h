// Waiting for another rank: a bounded spin if each rank has a CPU, then sleep on a futex.
//
// A rank that spins on the CPU on which its peer last ran keeps the peer from running. If other processes want the CPUs
// too, the kernel may leave both ranks there for long. So ranks tell each other where they wait, and the one with the
// higher number moves to another CPU that it may use.
//
// A sleeping rank's waiting word says which rank it waits for. A rank that posts something looks at those words and wakes
// only the ranks that wait for it. The futex sleeps on the same word, so a poster that clears it between the announcement
// and the sleep is not missed.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/segment.h"

namespace ringway::shm {

int64_t now_ns();

inline void relax() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` does nothing on most cores; this pauses for some tens of cycles
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

inline constexpr int64_t kHoldGil = 2'000;  // a wait of this many nanoseconds keeps the GIL
inline constexpr int kLooksPerClock = 16;

// Whether `ready()` becomes true within that time.
template <class Ready>
bool soon(const Ready& ready) {
    for (int64_t start = 0;;) {
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (ready()) return true;
            relax();
        }
        const int64_t now = now_ns();
        if (start == 0) start = now;
        if (now - start > kHoldGil) return false;
    }
}

// What the engine needs from the thread that it runs on. The Python binding releases the GIL in `block`.
class Host {
  public:
    virtual ~Host() = default;
    virtual void block() {}                       // the thread may wait for long from here; called often
    virtual bool interrupted() { return false; }  // whether the user pressed Ctrl-C
};

// A call that waits on this thread, where it may run a signal handler. The handler may wait for another call. The other
// ranks may need the interrupted call before they come to that one, and its frame cannot continue before the handler
// returns. So a call that is about to wait first lets the interrupted calls of its thread, in all groups, go on some
// other way.
class Interruptible {
  public:
    Interruptible() : below_(latest_) { latest_ = this; }
    Interruptible(const Interruptible&) = delete;
    Interruptible& operator=(const Interruptible&) = delete;

    // False if the host was interrupted before all of them could.
    static bool let_go_on(Host& host) {
        for (Interruptible* call = latest_; call != nullptr; call = call->below_)
            if (!call->go_on(host)) return false;
        return true;
    }

  protected:
    ~Interruptible() { latest_ = below_; }
    virtual bool go_on(Host& host) = 0;

  private:
    // Every call reads it. This model needs no function call for that, unlike the default one of shared libraries.
    __attribute__((tls_model("initial-exec"))) static thread_local Interruptible* latest_;
    Interruptible* const below_;
};

enum class Waking { Ready, TimedOut, Interrupted, Stopped };

// Whether the wait is over. A reference to a callable.
struct Look {
    bool (*look)(const void*);
    const void* what;

    bool operator()() const { return look(what); }
};

// Decides whether to give up a wait: there is a fault, this rank has closed, or the peer is gone. A peer may do all that
// it had to do and then go, so `ready` is checked again after it is found to be gone.
class Guard {
  public:
    virtual ~Guard() = default;
    virtual bool stop(int peer, bool look_for_dead, const Look& ready) = 0;
};

// How long a call may wait, and on which thread.
struct Patience {
    Patience(double timeout_s, Host& host) : timeout_s(timeout_s), host(host) {}
    double timeout_s;
    Host& host;
    int64_t since_ns = 0;  // when the call first had to wait

    int64_t deadline_ns(int64_t now) {
        if (since_ns == 0) since_ns = now;
        const double left = timeout_s * 1e9;
        return left < 9e18 ? since_ns + static_cast<int64_t>(left) : INT64_MAX;
    }
    double waited_s() const { return since_ns == 0 ? 0 : static_cast<double>(now_ns() - since_ns) / 1e9; }
};

inline constexpr int kAnyone = -2;

// Wakes the rank that sleeps on the word, if one does.
void wake(std::atomic<uint32_t>& word);

class Waiter {
  public:
    // `words` and `cpus` have one word per rank. `spin` is false if there are more ranks than CPUs.
    Waiter(std::atomic<uint32_t>* words, std::atomic<uint32_t>* cpus, int rank, int size, bool spin, Guard& guard);

    // Returns once `ready()` is true, or the reason why not. `peer` is the rank whose post makes it true, or kAnyone.
    template <class Ready>
    Waking until(int peer, Patience& patience, const Ready& ready) {
        for (int i = 0; i < kQuickLooks; ++i) {
            if (ready()) return Waking::Ready;
            relax();
        }
        return slowly(peer, patience,
                      Look{[](const void* what) { return (*static_cast<const Ready*>(what))(); }, &ready});
    }

    // Wakes the ranks that wait for what this rank has just posted.
    void tell() {
        for (int peer = 0; peer < size_; ++peer) {
            const uint32_t waits_for = words_[peer].load(std::memory_order_seq_cst);
            if (waits_for != 0 && (waits_for == own_ || waits_for == kForAnyone)) wake(words_[peer]);
        }
    }
    void tell(int peer) {
        if (words_[peer].load(std::memory_order_seq_cst) != 0) wake(words_[peer]);
    }
    // Makes this rank's own sleeping thread, if there is one, look again.
    void nudge() { wake(words_[rank_]); }

  private:
    static constexpr int kQuickLooks = 64;
    static constexpr uint32_t kForAnyone = UINT32_MAX;

    Waking slowly(int peer, Patience& patience, const Look& ready);
    bool spin(int peer, Patience& patience, const Look& ready);
    void tell_cpu() const;
    bool leave_cpu_of(int peer);
    Waking sleep(int peer, Patience& patience, const Look& ready);

    std::atomic<uint32_t>* words_;
    std::atomic<uint32_t>* cpus_;
    int rank_;
    int size_;
    uint32_t own_;
    Guard& guard_;
    bool may_spin_;
    int misses_ = 0;  // fruitless spins since the last fruitful one
    unsigned waits_ = 0;
    int64_t moved_ns_ = 0;  // when this rank last tried another CPU
};

}  // namespace ringway::shm
