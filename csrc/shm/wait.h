// Waiting for another rank: a bounded spin where the ranks have a CPU each, then sleep on a futex.
//
// A rank that sleeps says in its waiting word whom it waits for; who posts something looks at those words and
// wakes only those that wait for it. The word is also what the futex sleeps on, so a poster that clears it
// between the announcement and the sleep is not missed.
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

// What the engine asks of the thread that it runs on. The Python binding releases the GIL in `block`.
class Host {
  public:
    virtual ~Host() = default;
    virtual void block() {}                       // the thread is about to wait for longer; called often
    virtual bool interrupted() { return false; }  // whether the user wants out (Ctrl-C)
};

enum class Waking { Ready, TimedOut, Interrupted, Stopped };

// Whether what is waited for has come.
struct Look {
    bool (*look)(const void*);
    const void* what;

    bool operator()() const { return look(what); }
};

// Says whether a wait that is not over should be given up: a fault, a close, a peer that is gone. A peer may have
// done all that was asked of it and then gone, so `ready` is asked again once it is seen to be gone.
class Guard {
  public:
    virtual ~Guard() = default;
    virtual bool stop(int peer, bool look_for_dead, const Look& ready) = 0;
};

// How long one call may still take, and on which thread it waits.
struct Patience {
    Patience(double timeout_s, Host& host) : timeout_s(timeout_s), host(host) {}
    double timeout_s;
    Host& host;
    int64_t since_ns = 0;  // when it first had to wait

    int64_t deadline_ns(int64_t now) {
        if (since_ns == 0) since_ns = now;
        const double left = timeout_s * 1e9;
        return left < 9e18 ? since_ns + static_cast<int64_t>(left) : INT64_MAX;
    }
    double waited_s() const { return since_ns == 0 ? 0 : static_cast<double>(now_ns() - since_ns) / 1e9; }
};

inline constexpr int kAnyone = -2;

// Wakes who sleeps on the word, if anybody does.
void wake(std::atomic<uint32_t>& word);

class Waiter {
  public:
    // `words` holds one word a rank; `spin` is false where the ranks do not fit the CPUs.
    Waiter(std::atomic<uint32_t>* words, int rank, int size, bool spin, Guard& guard);

    // Returns once `ready()` is true, or says why not. `peer` is the rank whose post makes it true, or kAnyone.
    template <class Ready>
    Waking until(int peer, Patience& patience, const Ready& ready) {
        for (int i = 0; i < kQuickLooks; ++i) {
            if (ready()) return Waking::Ready;
            relax();
        }
        return slowly(peer, patience,
                      Look{[](const void* what) { return (*static_cast<const Ready*>(what))(); }, &ready});
    }

    // Wakes whoever sleeps for what this rank has just posted.
    void tell() {
        for (int peer = 0; peer < size_; ++peer) {
            const uint32_t waits_for = words_[peer].load(std::memory_order_seq_cst);
            if (waits_for != 0 && (waits_for == own_ || waits_for == kForAnyone)) wake(words_[peer]);
        }
    }
    void tell(int peer) {
        if (words_[peer].load(std::memory_order_seq_cst) != 0) wake(words_[peer]);
    }
    // Makes this rank's own sleeper, if there is one, look again.
    void nudge() { wake(words_[rank_]); }

  private:
    static constexpr int kQuickLooks = 64;
    static constexpr uint32_t kForAnyone = UINT32_MAX;

    Waking slowly(int peer, Patience& patience, const Look& ready);
    bool spin(Patience& patience, const Look& ready);
    Waking sleep(int peer, Patience& patience, const Look& ready);

    std::atomic<uint32_t>* words_;
    int rank_;
    int size_;
    uint32_t own_;
    Guard& guard_;
    bool may_spin_;
    int misses_ = 0;  // spins in vain since the last that was not
    unsigned waits_ = 0;
};

}  // namespace ringway::shm
