#include "shm/progress.h"

#include <chrono>
#include <system_error>

namespace ringway::shm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);  // between two checks for Ctrl-C

}  // namespace

// A forked child must not take the lock: a thread of the parent may have held it.
bool Progress::run_now(const Request& request, Host& host, Outcome& outcome) {
    if (members_.forked()) {
        outcome = Outcome::Forked;
        return true;
    }
    if (worker_.is_this_thread()) {
        outcome = collectives_.run(request, host);
        return true;
    }
    if (!Interruptible::let_go_on(host)) {
        outcome = Outcome::Interrupted;
        return true;
    }
    if (queued_.load() != 0 || busy_.exchange(true)) return false;
    Turn turn(*this);
    outcome = collectives_.run(request, host);
    turn.end();
    return true;
}

bool Progress::Turn::go_on(Host& host) {
    if (ended_) return true;
    const bool interrupted = progress_.collectives_.finish_interrupted(host) == Outcome::Interrupted;
    end();
    return !interrupted;
}

// A signal handler's call may have ended it already, and others run by now.
void Progress::Turn::end() {
    if (ended_) return;
    ended_ = true;
    progress_.busy_.store(false);
    if (progress_.queued_.load() == 0) return;
    { std::lock_guard<std::mutex> guard(progress_.lock_); }  // a thread that waits for this sleeps by now
    progress_.changed_.notify_all();
}

void Progress::submit(std::shared_ptr<Collective> task) {
    if (members_.forked()) return task->finish(Outcome::Forked);
    Host host;
    if (worker_.is_this_thread()) return task->finish(collectives_.run(task->request, host));
    bool ends;
    {
        std::lock_guard<std::mutex> guard(lock_);
        ends = stopping_ || !has_thread();
        if (!ends) {
            queue_.push_back(task);
            queued_.store(queue_.size());
        }
    }
    if (ends) return task->finish(members_.faulted() ? Outcome::Faulted : Outcome::Closed);
    changed_.notify_all();
}

// Starts the thread if there is none. If that fails, the group ends: the other ranks would wait forever.
bool Progress::has_thread() {
    if (worker_.started()) return true;
    try {
        worker_.start([this] { work(); });
    } catch (const std::system_error&) {
        members_.report_memory(CallFacts{}, 0);
    }
    return worker_.started();
}

bool Progress::wait(const Task& task, double timeout_s, Host& host) {
    if (task.done()) return true;
    if (members_.forked()) return false;
    host.block();
    if (!Interruptible::let_go_on(host)) return false;
    const int64_t start = now_ns();
    std::unique_lock<std::mutex> guard(lock_);
    while (!task.done()) {
        changed_.wait_for(guard, kSlice, [&] { return task.done(); });
        if (task.done()) break;
        if (static_cast<double>(now_ns() - start) / 1e9 > timeout_s) return false;
        guard.unlock();
        if (host.interrupted()) return false;
        guard.lock();
    }
    return true;
}

void Progress::work() {
    Host host;
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        changed_.wait(guard, [this] { return stopping_ || (!queue_.empty() && !busy_); });
        if (stopping_) return;
        if (busy_.exchange(true)) continue;  // another thread was quicker
        std::shared_ptr<Collective> task = std::move(queue_.front());
        queue_.pop_front();
        queued_.store(queue_.size());
        guard.unlock();
        task->finish(collectives_.run(task->request, host));
        guard.lock();
        busy_.store(false);
        spent_.push_back(std::move(task));
        changed_.notify_all();
    }
}

void Progress::sweep() {
    if (members_.forked()) return;
    std::vector<std::shared_ptr<Collective>> spent;
    std::lock_guard<std::mutex> guard(lock_);
    spent.swap(spent_);
}

void Progress::stop() {
    std::deque<std::shared_ptr<Collective>> rest;
    {
        std::lock_guard<std::mutex> guard(lock_);
        stopping_ = true;
        rest.swap(queue_);
        queued_.store(0);
    }
    changed_.notify_all();
    for (const auto& task : rest) task->finish(members_.faulted() ? Outcome::Faulted : Outcome::Closed);
}

}  // namespace ringway::shm
