// A thread of an engine.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ringway::shm {

// Threads share the object that they work on, so it lives as long as one of them runs. Its other users may drop it on
// such a thread, in a task's callback: the thread then frees it when it ends.
class Shared : public std::enable_shared_from_this<Shared> {};

class Worker {
  public:
    explicit Worker(Shared& owner) : owner_(owner) {}
    ~Worker() {
        if (thread_.joinable()) thread_.detach();  // this is that thread, or it has ended
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // Not thread-safe. Throws std::system_error if there are no more threads.
    template <class Work>
    void start(Work work) {
        thread_ = std::thread([this, alive = owner_.shared_from_this(), work = std::move(work)] {
            on_worker() = true;
            id_.store(std::this_thread::get_id());
            work();
        });
    }
    bool started() const { return thread_.joinable(); }
    bool is_this_thread() const { return id_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

    // Waits for the thread to end. Several threads may call it at a time. Threads of engines do not wait: the two threads
    // of a group, or those of two groups, could wait for each other.
    void join() {
        if (on_worker()) return;
        std::lock_guard<std::mutex> guard(joining_);
        if (thread_.joinable()) thread_.join();
    }

  private:
    static bool& on_worker() {
        static thread_local bool here = false;
        return here;
    }

    Shared& owner_;
    std::mutex joining_;
    std::thread thread_;
    std::atomic<std::thread::id> id_{};
};

}  // namespace ringway::shm
