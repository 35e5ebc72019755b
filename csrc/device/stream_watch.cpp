#include "device/stream_watch.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>

namespace ringway::device {
namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING: such events are cheaper
constexpr int kThreadLocalMode = 1;     // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr int64_t kLateNs = 100'000'000;
constexpr int64_t kReportNs = 100'000'000;
constexpr double kLongestLimit = 1e9;  // seconds; more would not fit into a deadline
// While a caller waits for the device, while the recorder's times are used, and otherwise.
constexpr auto kLookNow = std::chrono::microseconds(10);
constexpr auto kLookSoon = std::chrono::microseconds(50);
constexpr auto kLook = std::chrono::milliseconds(1);
// Looks with nothing to follow before the thread sleeps: to wake it costs its waker more than all the rest.
constexpr int kLinger = 100;

// Makes a context current on this thread for a while.
class Entered {
  public:
    Entered(const Driver& driver, Context context) : driver_(driver) {
        driver_.get_current(&before_);
        changed_ = before_ != context;
        if (changed_) driver_.set_current(context);
    }
    ~Entered() {
        if (changed_) driver_.set_current(before_);
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

  private:
    const Driver& driver_;
    Context before_ = nullptr;
    bool changed_ = false;
};

}  // namespace

void StreamCalls::close() {
    Report dropped;  // destroyed after the lock is released
    std::lock_guard<std::mutex> guard(using_);
    closed_ = true;
    std::swap(dropped, report_);
    failed_.store(true, std::memory_order_release);
}

// What one look found out about a group's calls.
struct StreamWatch::Told {
    std::shared_ptr<StreamCalls> calls;
    StreamCalls::News news;
};

Context StreamWatch::context_of(int device) {
    Device& known = devices_[device];
    if (known.context == nullptr) {
        int number = 0;
        Status status = driver_.device_get(&number, device);
        if (status == kSuccess) status = driver_.primary_context(&known.context, number);
        if (status != kSuccess) throw std::runtime_error("CUDA error: " + driver_.name_of(status));
    }
    return known.context;
}

bool StreamWatch::follow(const std::shared_ptr<StreamCalls>& calls, uint64_t token, uint64_t note, int device,
                         uintptr_t stream) {
    Followed followed{{device, reinterpret_cast<Stream>(stream)}, nullptr, nullptr, calls, {token, note}, 0, 0};
    {
        std::lock_guard<std::mutex> guard(lock_);
        followed.context = context_of(device);
        std::vector<Event>& spare = devices_[device].spare;
        if (!spare.empty()) {
            followed.event = spare.back();
            spare.pop_back();
        }
    }
    bool captured = false;
    {
        const Entered entered(driver_, followed.context);
        int capturing = 0;
        captured = driver_.is_capturing(followed.place.stream, &capturing) == kSuccess && capturing != 0;
        Status status = kSuccess;
        if (followed.event == nullptr) status = driver_.event_create(&followed.event, kDisableTiming);
        if (status == kSuccess && !captured) status = driver_.event_record(followed.event, followed.place.stream);
        if (status != kSuccess) {
            if (followed.event != nullptr) driver_.event_destroy(followed.event);
            throw std::runtime_error("CUDA error: " + driver_.name_of(status));
        }
    }
    followed.since_ns = monotonic_ns();
    const double limit = calls->limit.load(std::memory_order_relaxed);
    followed.deadline_ns =
        limit > 0 && limit < kLongestLimit ? followed.since_ns + static_cast<int64_t>(limit * 1e9)
                                           : std::numeric_limits<int64_t>::max();

    std::lock_guard<std::mutex> guard(lock_);
    if (captured) {
        devices_[device].spare.push_back(followed.event);
        return false;
    }
    if (!started_) {
        std::thread([self = shared_from_this()] { self->serve(); }).detach();
        started_ = true;
    }
    calls->pending_.fetch_add(1, std::memory_order_relaxed);
    new_.push_back(std::move(followed));
    if (asleep_) wake_.notify_one();
    return true;
}

void StreamWatch::settle(const StreamCalls& calls, double seconds) {
    std::unique_lock<std::mutex> guard(lock_);
    if (calls.pending() == 0 || calls.failed()) return;
    ++settling_;
    wake_.notify_one();
    looked_.wait_for(guard, std::chrono::duration<double>(seconds),
                     [&calls] { return calls.pending() == 0 || calls.failed(); });
    --settling_;
}

void StreamWatch::stop() {
    if (getpid() != made_by_) return;  // a forked child has no thread to stop, and the lock may be locked forever
    std::lock_guard<std::mutex> guard(lock_);
    stop_ = true;
    wake_.notify_one();
}

void StreamWatch::end(const Followed& followed, State state) {
    StreamCalls& calls = *followed.calls;
    std::lock_guard<std::mutex> guard(calls.using_);
    if (!calls.closed_) calls.record_.end(followed.call.token, state);
    calls.pending_.fetch_sub(1, std::memory_order_release);
}

void StreamWatch::end_failed(const Followed& followed) {
    driver_.event_destroy(followed.event);
    end(followed, State::Failed);
}

// Looks at the calls of one stream, which end in order.
void StreamWatch::look(std::deque<Followed>& line, std::map<StreamCalls*, Told>& told) {
    std::vector<Event> passed;
    const int device = line.front().place.device;
    driver_.set_current(line.front().context);
    while (!line.empty()) {
        Followed& first = line.front();
        if (first.calls->failed()) {
            end_failed(first);
            line.pop_front();
            continue;
        }
        const Status status = driver_.event_query(first.event);
        if (status == kNotReady) break;
        if (status == kSuccess) {
            passed.push_back(first.event);
        } else {
            driver_.event_destroy(first.event);
        }
        if (status != kSuccess || monotonic_ns() - first.since_ns > kLateNs) {
            Told& about = told[first.calls.get()];
            about.calls = first.calls;
            about.news.ended.push_back(first.call);
            if (status != kSuccess) about.news.failure = driver_.name_of(status);
        } else {
            end(first, State::Completed);
        }
        line.pop_front();
    }
    const int64_t now = monotonic_ns();
    if (!line.empty() && now - line.front().since_ns > kLateNs) {
        // Calls of several groups may wait here: those of a group that has failed end now, and each of the others has its
        // own deadline.
        const auto has_failed = [this](const Followed& waiting) {
            if (!waiting.calls->failed()) return false;
            end_failed(waiting);
            return true;
        };
        line.erase(std::remove_if(line.begin(), line.end(), has_failed), line.end());
        for (const Followed& waiting : line) {
            Told& about = told[waiting.calls.get()];
            about.calls = waiting.calls;
            const bool overdue = now > waiting.deadline_ns;
            if (about.news.waiting.token == 0 || (overdue && !about.news.overdue)) about.news.waiting = waiting.call;
            about.news.overdue = about.news.overdue || overdue;
        }
    }
    if (!passed.empty()) {
        std::lock_guard<std::mutex> guard(lock_);
        std::vector<Event>& spare = devices_[device].spare;
        spare.insert(spare.end(), passed.begin(), passed.end());
    }
}

void StreamWatch::take_new(std::map<Place, std::deque<Followed>>& lines) {
    for (Followed& followed : new_) lines[followed.place].push_back(std::move(followed));
    new_.clear();
}

void StreamWatch::serve() {
    int mode = kThreadLocalMode;  // otherwise a query invalidates a graph that another thread captures
    driver_.exchange_capture_mode(&mode);
    std::map<Place, std::deque<Followed>> lines;
    int idle = 0;
    while (true) {
        {
            std::unique_lock<std::mutex> guard(lock_);
            idle = lines.empty() && new_.empty() ? idle + 1 : 0;
            if (idle > kLinger) {
                asleep_ = true;
                wake_.wait(guard, [this] { return !new_.empty() || stop_; });
                asleep_ = false;
                idle = 0;
            }
            if (stop_ && lines.empty() && new_.empty()) return;
            take_new(lines);
        }
        bool soon = false;
        std::map<StreamCalls*, Told> told;
        for (auto line = lines.begin(); line != lines.end();) {
            look(line->second, told);
            if (line->second.empty()) {
                line = lines.erase(line);
                continue;
            }
            StreamCalls& calls = *line->second.front().calls;
            std::lock_guard<std::mutex> guard(calls.using_);
            soon = soon || (!calls.closed_ && calls.record_.recorder().keeps_times());
            ++line;
        }
        for (auto& [calls, about] : told) {
            const int64_t now = monotonic_ns();
            if (about.news.ended.empty() && now - calls->reported_ns_ < kReportNs) continue;
            calls->reported_ns_ = now;
            StreamCalls::Report report;
            {
                std::lock_guard<std::mutex> guard(calls->using_);
                report = calls->report_;
            }
            if (report) report(about.news);
            calls->pending_.fetch_sub(about.news.ended.size(), std::memory_order_release);
        }
        std::unique_lock<std::mutex> guard(lock_);
        if (settling_ > 0) {
            looked_.notify_all();
            guard.unlock();
            std::this_thread::sleep_for(kLookNow);
        } else if (soon) {
            guard.unlock();
            std::this_thread::sleep_for(kLookSoon);
        } else {
            wake_.wait_for(guard, kLook, [this] { return settling_ > 0; });
        }
    }
}

}  // namespace ringway::device
