// Calls on CUDA streams. An event behind each call, and a thread that learns without the GIL when the device has passed
// it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/driver.h"
#include "record/group_record.h"

namespace ringway::device {

// Calls that take longer may have failed.
inline constexpr int64_t kLateNs = 100'000'000;

// A call that took long, or whose end the device could not tell.
struct LateCall {
    uint64_t token;
    uint64_t note;
    DeviceTimes times = {};
};

// A moment of a stream, for a call whose times are wanted. No event: nobody wants them.
struct Mark {
    Event event = nullptr;
    int64_t host_ns = 0;
    Stream stream = nullptr;
};

// The calls of one group.
class StreamCalls {
  public:
    // What happened since the last report.
    struct News {
        std::vector<LateCall> ended;  // late
        LateCall waiting{0, 0};       // has waited for long: the first that is overdue, or the first; a token of 0 is none
        bool overdue = false;
        bool open = false;    // calls that no stream has waited for are open for long
        std::string failure;  // what the device said if it could not be asked
    };
    using Report = std::function<void(const News& news)>;

    // Quick calls end in the record on the watch's thread. Late ones are reported instead, because they may have failed:
    // `report` ends their records. It is also called from time to time while a call takes long.
    StreamCalls(GroupRecord& record, Report report) : record_(record), report_(std::move(report)) {}

    // Seconds until a call is overdue; none by default.
    std::atomic<double> limit{0.0};

    // When to look after calls that no stream has waited for: their owner knows them, and only Python can ask about their
    // ends. 0 if there are none. Set it, then call StreamWatch::look_after.
    std::atomic<int64_t> look_at_ns{0};

    // How many calls the device has not passed yet, as far as the watch knows.
    size_t pending() const { return pending_.load(std::memory_order_acquire); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // The group has failed: pending calls end as failed.
    void fail() { failed_.store(true, std::memory_order_release); }
    // The group is over. Nothing is reported any more, and the record is no longer used once this returns.
    void close();

  private:
    friend class StreamWatch;
    GroupRecord& record_;
    std::mutex using_;  // the record and the report
    Report report_;
    bool closed_ = false;
    std::atomic<size_t> pending_{0};
    std::atomic<bool> failed_{false};
    // The watch's
    int64_t reported_ns_ = 0;
    int idle_looks_ = 0;
    std::atomic<bool> looked_after_{false};  // it is among the watch's open groups
    std::map<uint32_t, int64_t> ended_ns_;  // by stream: when the device passed the last call whose times are known
};

// One for each process.
class StreamWatch : public std::enable_shared_from_this<StreamWatch> {
  public:
    explicit StreamWatch(const std::string& library) : driver_(library), made_by_(getpid()) {}

    // Follows a call that was just issued on the stream of the device, by an event behind it. False if the stream captures
    // a graph: then the call runs whenever that is replayed, and nothing is followed. Throws std::runtime_error.
    // With a mark, from before the call, the record gets the device's times.
    bool follow(const std::shared_ptr<StreamCalls>& calls, uint64_t token, uint64_t note, int device, uintptr_t stream,
                Mark started = {});

    // Reports to the calls' owner once `look_at_ns` is past.
    void look_after(const std::shared_ptr<StreamCalls>& calls) {
        if (!calls->looked_after_.load()) add_open(calls);
    }

    // Marks where a stream is now. An empty mark if it captures a graph, or if the device refuses.
    Mark mark(int device, uintptr_t stream);
    // For a mark that nothing follows.
    void drop(int device, Mark mark);
    bool is_capturing(int device, uintptr_t stream);

    // Waits until the device has passed the calls or the group has failed, and no longer than `seconds`. Until then
    // the watch looks more often.
    void settle(const StreamCalls& calls, double seconds);

    // Ends the thread once it has nothing left to follow.
    void stop();

  private:
    struct Place {
        int device;
        Stream stream;
        bool operator<(const Place& other) const {
            return device != other.device ? device < other.device : stream < other.stream;
        }
    };
    struct Followed {
        Place place;
        Event event;
        Context context;
        std::shared_ptr<StreamCalls> calls;
        LateCall call;
        int64_t since_ns;
        int64_t deadline_ns;
        Mark started;
    };
    // An event that passed at a known time of the host's clock.
    struct Clock {
        Event event = nullptr;
        int64_t host_ns = 0;
    };
    struct Device {
        Context context = nullptr;
        std::vector<Event> spare, spare_timed;
        Stream clock_stream = nullptr;
        bool timed = false;         // since the clock was read
        Clock clock, clock_before;  // the latest, and one for calls that began before it
    };
    struct Told;

    void start_thread();
    void add_open(const std::shared_ptr<StreamCalls>& calls);
    void look_at_open(std::map<StreamCalls*, Told>& told);
    Context context_of(int device);
    Event take_event(Device& device, bool timed);
    Clock read_clock(Stream idle);
    void renew_clocks();
    DeviceTimes times_of(const Followed& followed);
    void serve();
    void take_new(std::map<Place, std::deque<Followed>>& lines);
    void end(const Followed& followed, State state, const DeviceTimes& times = {});
    void end_failed(const Followed& followed);
    Status cover(Followed& last);
    size_t passed(std::deque<Followed>& line, Status& status);
    void look(std::deque<Followed>& line, std::map<StreamCalls*, Told>& told);

    Driver driver_;
    const pid_t made_by_;
    std::mutex lock_;
    std::condition_variable wake_;
    std::map<int, Device> devices_;
    std::map<Place, uint32_t> streams_;  // numbers of streams on which calls were timed
    std::vector<Followed> new_;
    std::vector<std::shared_ptr<StreamCalls>> open_;  // groups that may have calls to look after
    std::condition_variable looked_;
    int settling_ = 0;  // callers of settle
    bool started_ = false;
    bool asleep_ = false;
    bool stop_ = false;
};

}  // namespace ringway::device
