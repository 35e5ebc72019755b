// The order of a group's collectives, and the thread that runs those that nobody waits for.
//
// A synchronous call runs on its caller's thread if no call is before it. Else it queues behind the earlier ones. A
// collective that is issued on the progress thread itself, by a task's callback, runs there at once, before the next one
// in the queue.
//
// A synchronous call that is interrupted by a signal handler which waits for another call ends first, from within the
// handler's (see Interruptible).
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/collectives.h"
#include "shm/task.h"
#include "shm/worker.h"

namespace ringway::shm {

class Collective : public Task {
  public:
    Request request;
};

class Progress {
  public:
    Progress(Shared& owner, Membership& members, Collectives& collectives)
        : members_(members), collectives_(collectives), worker_(owner) {}

    // Runs the request on this thread if no call is before it; else returns false and does nothing.
    bool run_now(const Request& request, Host& host, Outcome& outcome);
    // Queues the task, and keeps it alive until it is done.
    void submit(std::shared_ptr<Collective> task);
    // True once the task is done; false if `timeout_s` has passed or the host was interrupted.
    bool wait(const Task& task, double timeout_s, Host& host);

    // Drops the tasks that are done. They may hold objects that only certain threads may release, so the progress thread
    // never does this.
    void sweep();
    // Ends all queued tasks. The rank must have left the membership.
    void stop();
    // After `stop`: waits for the thread to end, see Worker::join.
    void join() { worker_.join(); }

  private:
    bool has_thread();
    void work();
    // A call in `run_now`. No other one runs before it ends.
    class Turn final : public Interruptible {
      public:
        explicit Turn(Progress& progress) : progress_(progress) {}
        bool go_on(Host& host) override;
        void end();

      private:
        Progress& progress_;
        bool ended_ = false;
    };

    Membership& members_;
    Collectives& collectives_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Collective>> queue_;
    std::vector<std::shared_ptr<Collective>> spent_;
    // Whether a call runs, and how many are queued. A thread that ends a call clears the one and then looks at the other,
    // one that queues a call does the reverse, so at least one of them sees what the other did.
    std::atomic<bool> busy_{false};
    std::atomic<size_t> queued_{0};
    bool stopping_ = false;
    Worker worker_;
};

}  // namespace ringway::shm
