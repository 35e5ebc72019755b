#include "device/stream_watch.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <thread>

namespace ringway::device {
namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING: such events are cheaper
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr int kThreadLocalMode = 1;     // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr int64_t kReportNs = 100'000'000;
// The device counts milliseconds in single precision from the event of its clock: a young one keeps microseconds exact.
constexpr int64_t kClockNs = 1'000'000'000;
constexpr int64_t kClockPatienceNs = 2'000'000;
constexpr int kClockReadings = 3;
constexpr double kLongestLimit = 1e9;  // seconds; more would not fit into a deadline
// While a caller waits for the device, and otherwise.
constexpr auto kLookNow = std::chrono::microseconds(10);
constexpr int kEagerLooks = 500;
constexpr auto kLook = std::chrono::milliseconds(1);
// If no event is followed: nobody waits for what there is to find.
constexpr auto kLookLater = std::chrono::milliseconds(10);
// Looks with nothing to follow before the thread sleeps: to wake it costs its waker more than all the rest.
constexpr int kLinger = 100;

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

Event StreamWatch::take_event(Device& device, bool timed) {
    std::vector<Event>& spare = timed ? device.spare_timed : device.spare;
    if (!spare.empty()) {
        const Event event = spare.back();
        spare.pop_back();
        return event;
    }
    Event event = nullptr;
    const Status status = driver_.event_create(&event, timed ? 0 : kDisableTiming);
    if (status != kSuccess) throw std::runtime_error("CUDA error: " + driver_.name_of(status));
    return event;
}

bool StreamWatch::is_capturing(int device, uintptr_t stream) {
    Context context;
    {
        std::lock_guard<std::mutex> guard(lock_);
        context = context_of(device);
    }
    const Entered entered(driver_, context);
    int capturing = 0;
    return driver_.is_capturing(reinterpret_cast<Stream>(stream), &capturing) == kSuccess && capturing != 0;
}

Mark StreamWatch::mark(int device, uintptr_t stream) {
    std::lock_guard<std::mutex> guard(lock_);
    const Context context = context_of(device);
    Device& known = devices_[device];
    const Entered entered(driver_, context);
    int capturing = 0;
    const Stream on = reinterpret_cast<Stream>(stream);
    if (driver_.is_capturing(on, &capturing) != kSuccess || capturing != 0) return {};
    if (known.clock_stream == nullptr && driver_.stream_create(&known.clock_stream, kNonBlocking) == kSuccess)
        known.clock = read_clock(known.clock_stream);
    known.timed = true;
    if (known.clock.event == nullptr) return {};
    Mark mark{take_event(known, true), monotonic_ns(), on};
    if (driver_.event_record(mark.event, on) == kSuccess) return mark;
    driver_.event_destroy(mark.event);
    return {};
}

void StreamWatch::drop(int device, Mark mark) {
    if (mark.event == nullptr) return;
    std::lock_guard<std::mutex> guard(lock_);
    devices_[device].spare_timed.push_back(mark.event);
}

// Reads the device's clock against the host's: an event on an idle stream passes between its record and the answer.
StreamWatch::Clock StreamWatch::read_clock(Stream idle) {
    Clock best;
    int64_t best_doubt = std::numeric_limits<int64_t>::max();
    for (int reading = 0; reading < kClockReadings; ++reading) {
        Event event = nullptr;
        if (driver_.event_create(&event, 0) != kSuccess) return best;
        const int64_t before = monotonic_ns();
        int64_t after = before;
        Status status = driver_.event_record(event, idle);
        while (status == kSuccess) {
            status = driver_.event_query(event);
            after = monotonic_ns();
            if (status != kNotReady || after - before > kClockPatienceNs) break;
            status = kSuccess;
        }
        if (status == kSuccess && after - before < best_doubt) std::swap(best.event, event);
        if (event != nullptr) driver_.event_destroy(event);
        if (status != kSuccess || after - before >= best_doubt) continue;
        best.host_ns = before + (after - before) / 2;
        best_doubt = after - before;
    }
    return best;
}

// The device may be too busy to tell the time; then the clock before serves on.
void StreamWatch::renew_clocks() {
    std::unique_lock<std::mutex> guard(lock_);
    for (auto& [number, device] : devices_) {
        if (!device.timed || monotonic_ns() - device.clock.host_ns < kClockNs) continue;
        device.timed = false;
        const Stream idle = device.clock_stream;
        driver_.set_current(device.context);
        guard.unlock();
        const Clock clock = read_clock(idle);
        guard.lock();
        if (clock.event == nullptr) continue;
        if (device.clock_before.event != nullptr) driver_.event_destroy(device.clock_before.event);
        device.clock_before = device.clock;
        device.clock = clock;
    }
}

DeviceTimes StreamWatch::times_of(const Followed& followed) {
    if (followed.started.event == nullptr) return {};
    std::lock_guard<std::mutex> guard(lock_);
    const Device& device = devices_[followed.place.device];
    const bool older = followed.started.host_ns < device.clock.host_ns && device.clock_before.event != nullptr;
    const Clock& clock = older ? device.clock_before : device.clock;
    float from = 0, to = 0;
    if (driver_.event_elapsed(&from, clock.event, followed.started.event) != kSuccess ||
        driver_.event_elapsed(&to, clock.event, followed.event) != kSuccess)
        return {};
    uint32_t& number = streams_[followed.place];
    if (number == 0) number = static_cast<uint32_t>(streams_.size());
    const auto at = [&clock](float milliseconds) { return clock.host_ns + static_cast<int64_t>(milliseconds * 1e6); };
    const int64_t completed = std::max(at(from), at(to));
    // A stream runs the calls of a group one after the other, but a call may be issued while the one before it runs.
    int64_t& last = followed.calls->ended_ns_[number];
    const int64_t started = last <= completed ? std::max(at(from), last) : at(from);
    last = completed;
    return {started, completed, number, followed.started.stream != followed.place.stream};
}

bool StreamWatch::follow(const std::shared_ptr<StreamCalls>& calls, uint64_t token, uint64_t note, int device,
                         uintptr_t stream, Mark started) {
    const bool timed = started.event != nullptr;
    Followed followed{{device, reinterpret_cast<Stream>(stream)}, nullptr, nullptr, calls, {token, note}, 0, 0, started};
    std::unique_lock<std::mutex> guard(lock_);
    followed.context = context_of(device);
    bool captured = false;
    // The default stream is never captured and never destroyed. There the watch itself records events, each behind many
    // calls: an event takes its caller longer than the rest of this function.
    if (timed || followed.place.stream != nullptr) {
        const Entered entered(driver_, followed.context);
        followed.event = take_event(devices_[device], timed);
        guard.unlock();
        int capturing = 0;
        captured = driver_.is_capturing(followed.place.stream, &capturing) == kSuccess && capturing != 0;
        const Status status = captured ? kSuccess : driver_.event_record(followed.event, followed.place.stream);
        if (status != kSuccess) {
            driver_.event_destroy(followed.event);
            if (timed) driver_.event_destroy(started.event);
            throw std::runtime_error("CUDA error: " + driver_.name_of(status));
        }
        guard.lock();
    }
    followed.since_ns = monotonic_ns();
    const double limit = calls->limit.load(std::memory_order_relaxed);
    followed.deadline_ns =
        limit > 0 && limit < kLongestLimit ? followed.since_ns + static_cast<int64_t>(limit * 1e9)
                                           : std::numeric_limits<int64_t>::max();
    if (captured) {
        Device& known = devices_[device];
        (timed ? known.spare_timed : known.spare).push_back(followed.event);
        if (timed) known.spare_timed.push_back(started.event);
        return false;
    }
    start_thread();
    calls->pending_.fetch_add(1, std::memory_order_relaxed);
    new_.push_back(std::move(followed));
    if (asleep_) wake_.notify_one();
    return true;
}

void StreamWatch::start_thread() {
    if (started_) return;
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
    started_ = true;
}

void StreamWatch::add_open(const std::shared_ptr<StreamCalls>& calls) {
    std::lock_guard<std::mutex> guard(lock_);
    if (calls->looked_after_.exchange(true)) return;
    start_thread();
    calls->idle_looks_ = 0;
    open_.push_back(calls);
    if (asleep_) wake_.notify_one();
}

// Which groups have calls that have been open for long. A group without open calls is dropped after a while.
void StreamWatch::look_at_open(std::map<StreamCalls*, Told>& told) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto is_idle = [](const std::shared_ptr<StreamCalls>& calls) {
        if (calls->look_at_ns.load() != 0 && !calls->failed()) calls->idle_looks_ = 0;
        if (++calls->idle_looks_ <= kLinger) return false;
        calls->looked_after_.store(false);
        if (calls->look_at_ns.load() == 0 || calls->failed()) return true;
        calls->looked_after_.store(true);  // a call was opened just now
        return false;
    };
    open_.erase(std::remove_if(open_.begin(), open_.end(), is_idle), open_.end());
    for (const std::shared_ptr<StreamCalls>& calls : open_) {
        const int64_t due = calls->look_at_ns.load();
        if (due == 0 || calls->failed() || monotonic_ns() < due) continue;
        Told& about = told[calls.get()];
        about.calls = calls;
        about.news.open = true;
    }
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

void StreamWatch::end(const Followed& followed, State state, const DeviceTimes& times) {
    StreamCalls& calls = *followed.calls;
    std::lock_guard<std::mutex> guard(calls.using_);
    if (!calls.closed_) calls.record_.end(followed.call.token, state, times);
    calls.pending_.fetch_sub(1, std::memory_order_release);
}

void StreamWatch::end_failed(const Followed& followed) {
    if (followed.event != nullptr) driver_.event_destroy(followed.event);
    if (followed.started.event != nullptr) driver_.event_destroy(followed.started.event);
    end(followed, State::Failed);
}

// Records an event behind the calls of a line that have none.
Status StreamWatch::cover(Followed& last) {
    if (last.event != nullptr) return kSuccess;
    Event event = nullptr;
    {
        std::lock_guard<std::mutex> guard(lock_);
        event = take_event(devices_[last.place.device], false);
    }
    const Status status = driver_.event_record(event, last.place.stream);
    if (status == kSuccess)
        last.event = event;
    else
        driver_.event_destroy(event);
    return status;
}

// How many calls at the front of a line the device has passed. An event says so of every call before it.
size_t StreamWatch::passed(std::deque<Followed>& line, Status& status) {
    status = cover(line.back());
    if (status != kSuccess) return line.size();
    size_t first = 0;  // with an event
    while (line[first].event == nullptr) ++first;
    status = driver_.event_query(line[first].event);
    if (status == kNotReady) return 0;
    if (status != kSuccess) return first + 1;
    size_t behind = first + 1, ahead = line.size();  // passed before the one, not known from the other on
    while (behind < ahead) {
        size_t middle = behind == first + 1 && ahead == line.size() ? ahead - 1 : (behind + ahead) / 2;
        while (line[middle].event == nullptr) ++middle;  // the last has one
        if (middle >= ahead) {
            ahead = (behind + ahead) / 2;
        } else if (driver_.event_query(line[middle].event) == kSuccess) {
            behind = middle + 1;
        } else {
            ahead = std::min(middle, (behind + ahead) / 2);
        }
    }
    return behind;
}

// Looks at the calls of one stream, which end in order.
void StreamWatch::look(std::deque<Followed>& line, std::map<StreamCalls*, Told>& told) {
    std::vector<Event> spare, spare_timed;
    const int device = line.front().place.device;
    driver_.set_current(line.front().context);
    while (!line.empty()) {
        if (line.front().calls->failed()) {
            end_failed(line.front());
            line.pop_front();
            continue;
        }
        Status status = kSuccess;
        const size_t count = passed(line, status);
        if (count == 0) break;
        for (size_t at = 0; at < count; ++at) {
            Followed& first = line.front();
            const bool timed = first.started.event != nullptr;
            if (status == kSuccess) {
                first.call.times = times_of(first);
                if (first.event != nullptr) (timed ? spare_timed : spare).push_back(first.event);
                if (timed) spare_timed.push_back(first.started.event);
            } else {
                if (first.event != nullptr) driver_.event_destroy(first.event);
                if (timed) driver_.event_destroy(first.started.event);
            }
            if (status != kSuccess || monotonic_ns() - first.since_ns > kLateNs) {
                Told& about = told[first.calls.get()];
                about.calls = first.calls;
                about.news.ended.push_back(first.call);
                if (status != kSuccess) about.news.failure = driver_.name_of(status);
            } else {
                end(first, State::Completed, first.call.times);
            }
            line.pop_front();
        }
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
    if (!spare.empty() || !spare_timed.empty()) {
        std::lock_guard<std::mutex> guard(lock_);
        Device& known = devices_[device];
        known.spare.insert(known.spare.end(), spare.begin(), spare.end());
        known.spare_timed.insert(known.spare_timed.end(), spare_timed.begin(), spare_timed.end());
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
    int idle = 0, eager = 0;
    while (true) {
        {
            std::unique_lock<std::mutex> guard(lock_);
            idle = lines.empty() && new_.empty() && open_.empty() ? idle + 1 : 0;
            if (idle > kLinger) {
                asleep_ = true;
                wake_.wait(guard, [this] { return !new_.empty() || !open_.empty() || stop_; });
                asleep_ = false;
                idle = 0;
            }
            if (stop_ && lines.empty() && new_.empty()) return;
            take_new(lines);
        }
        renew_clocks();
        std::map<StreamCalls*, Told> told;
        for (auto line = lines.begin(); line != lines.end();) {
            look(line->second, told);
            line = line->second.empty() ? lines.erase(line) : std::next(line);
        }
        look_at_open(told);
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
        if (settling_ == 0) {
            eager = 0;
            wake_.wait_for(guard, lines.empty() && new_.empty() && !open_.empty() ? kLookLater : kLook,
                           [this] { return settling_ > 0; });
            continue;
        }
        looked_.notify_all();
        guard.unlock();
        // A sleep takes longer than most calls.
        if (++eager < kEagerLooks)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(kLookNow);
    }
}

}  // namespace ringway::device
