#include "record/group_record.h"

#include <utility>

namespace ringway {

GroupRecord::GroupRecord(std::shared_ptr<Recorder> recorder, const std::string& group, int32_t size,
                         std::vector<int32_t> ranks)
    : recorder_(std::move(recorder)), group_(recorder_->group(group)), size_(size), ranks_(std::move(ranks)) {}

GroupRecord::Begun GroupRecord::begin(Op op, int64_t bytes, DType dtype, Reduce reduce, int32_t peer, uint32_t label,
                                      uint32_t site) {
    std::atomic<uint64_t>& counter = is_point_to_point(op) ? messages_ : collectives_;
    Entry entry;
    entry.sequence = counter.fetch_add(1, std::memory_order_relaxed);
    entry.bytes = bytes;
    entry.group = group_;
    entry.label = label;
    entry.site = site;
    // A peer of -1 is none, or any; as an unsigned number it is past the end.
    entry.peer = static_cast<size_t>(peer) < ranks_.size() ? ranks_[static_cast<size_t>(peer)] : peer;
    entry.size = size_;
    entry.op = op;
    entry.dtype = dtype;
    entry.reduce = reduce;
    entry.quiet = is_quiet();
    entry.profiled = is_profiled();
    const uint64_t token = recorder_->begin(entry);
    if (board_ != nullptr && !is_point_to_point(op)) {
        try {
            board_->post(entry);
        } catch (const DifferentCalls&) {
            end(token, State::Failed);
            throw;
        }
    }
    return {token, entry.sequence};
}

std::optional<bool> GroupRecord::take_back() {
    const auto own = find_starting();
    if (own == starting_here.end()) return {};
    const auto [id, sequence, message, passed_on, token] = *own;
    if (passed_on != passed_on_here) return {};
    Entry entry;
    // The error may have come before the caller had the token.
    if (recorder_->find(token, entry) && entry.state == State::Issued) end(token, State::Failed);
    uint64_t next = sequence + 1;
    if (!(message ? messages_ : collectives_).compare_exchange_strong(next, sequence)) return false;
    if (board_ != nullptr && !message) board_->withdraw(sequence);
    return true;
}

void GroupRecord::end(uint64_t token, State state, const DeviceTimes& times) {
    recorder_->end(token, state, times);
    completed_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace ringway
