// A call in flight on some thread of this rank.
#pragma once

#include <atomic>

#include "shm/membership.h"

namespace ringway::shm {

class Task {
  public:
    virtual ~Task() = default;

    bool done() const { return done_.load(std::memory_order_acquire); }
    // Valid only once done.
    Outcome outcome() const { return outcome_; }

    // Ends the task. Called once, by the thread that did its work, which holds no lock.
    void finish(Outcome outcome) {
        outcome_ = outcome;
        done_.store(true, std::memory_order_release);
        finished();
    }

  protected:
    virtual void finished() {}

  private:
    Outcome outcome_ = Outcome::Done;
    std::atomic<bool> done_{false};
};

}  // namespace ringway::shm
