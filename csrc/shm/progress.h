// The order of a group's collectives, and the thread that runs those that nobody waits for.
//
// A synchronous call runs on its caller's thread if no call is before it. Else it queues behind the earlier ones. A
// collective that is issued on the progress thread itself, by a task's callback, runs there at once, before the next one
// in the queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/collectives.h"
#include "shm/task.h"

namespace ringway::shm {

class Collective : public Task {
  public:
    Request request;
};

class Progress {
  public:
    Progress(Membership& members, Collectives& collectives);
    ~Progress();

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
    // After `stop`: waits for the thread to end, unless this is that thread.
    void join();

  private:
    bool has_thread();
    void work();

    Membership& members_;
    Collectives& collectives_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Collective>> queue_;
    std::vector<std::shared_ptr<Collective>> spent_;
    bool busy_ = false;
    bool stopping_ = false;
    std::thread thread_;
    std::atomic<std::thread::id> worker_{};
};

}  // namespace ringway::shm
