// The record of one group: numbers the group's calls, writes them to the recorder, compares them with other ranks'.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "record/recorder.h"
#include "record/call_board.h"

namespace ringway {

class GroupRecord {
  public:
    // `ranks` are the members' global ranks, in order; calls are recorded with their peers' global ranks.
    GroupRecord(std::shared_ptr<Recorder> recorder, const std::string& group, int32_t size,
                std::vector<int32_t> ranks = {});

    struct Begun {
        uint64_t token;     // names the record
        uint64_t sequence;  // the call's number in its group
    };

    // Numbers the call and records it. Collectives and point-to-point calls are counted separately, because only
    // collectives come in the same order on every rank. Throws DifferentCalls if another rank made a different call.
    Begun begin(Op op, int64_t bytes, DType dtype, Reduce reduce, int32_t peer, uint32_t label, uint32_t site);
    void end(uint64_t token, State state, const DeviceTimes& times = {});

    // From now on, collectives are compared with those of the other ranks.
    void compare(std::shared_ptr<CallBoard> board) { board_ = std::move(board); }
    const CallBoard* board() const { return board_.get(); }
    // See CallBoard. Without a board, nobody is told.
    void announce_abort(uint64_t first) const {
        if (board_ != nullptr) board_->announce_abort(first);
    }
    std::optional<uint64_t> aborted_from() const { return board_ == nullptr ? std::nullopt : board_->aborted_from(); }

    // A call that is numbered in one step and started in a later one is `starting` in between. A signal handler that runs
    // there, on the same thread, must make no call of the group: it would get the later number and start first. Other
    // threads may.
    void starting(Op op, const Begun& begun) {
        starting_here.push_back({id_, begun.sequence, is_point_to_point(op), passed_on_here, begun.token});
    }
    void started() {
        const auto own = find_starting();
        if (own != starting_here.end()) starting_here.erase(own);
    }
    // Whether a call of this thread is.
    bool is_starting() const { return find_starting() != starting_here.end(); }

    // A backend calls this when it is about to send something, whatever call it belongs to. No Python runs between this
    // and the start, so an error of a signal handler comes either before it or after the start.
    static void passing_on() { ++passed_on_here; }
    // Gives back the number of the call that is starting on this thread, so that the next call gets it, and ends its record
    // if that has not ended. Nothing if there is none, or if some of the call may have been sent; false if a later call has
    // a number already.
    std::optional<bool> take_back();

    // The calls that are starting on this thread: group, number, whether it is a message, passed_on_here at that time,
    // token.
    using Starting = std::vector<std::array<uint64_t, 5>>;
    // Replaces them, and returns what they were. A completion callback may run inside a call that is starting, and may
    // make calls: it runs with none.
    static Starting exchange_starting(Starting groups) { return std::exchange(starting_here, std::move(groups)); }

    uint64_t collectives() const { return collectives_.load(std::memory_order_relaxed); }
    uint64_t messages() const { return messages_.load(std::memory_order_relaxed); }
    uint64_t completed() const { return completed_.load(std::memory_order_relaxed); }
    Recorder& recorder() { return *recorder_; }

  private:
    std::shared_ptr<Recorder> recorder_;
    uint32_t group_;
    int32_t size_;
    std::vector<int32_t> ranks_;
    std::shared_ptr<CallBoard> board_;
    std::atomic<uint64_t> collectives_{0};
    std::atomic<uint64_t> messages_{0};
    std::atomic<uint64_t> completed_{0};

    static inline std::atomic<uint64_t> ids{0};
    static inline thread_local Starting starting_here;
    static inline thread_local uint64_t passed_on_here = 0;
    Starting::iterator find_starting() const {
        return std::find_if(starting_here.begin(), starting_here.end(), [this](const auto& call) { return call[0] == id_; });
    }
    const uint64_t id_ = ids.fetch_add(1, std::memory_order_relaxed);  // unlike an address, never used again
};

}  // namespace ringway
