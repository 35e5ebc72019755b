// The call board of one group on one host: each rank posts its calls, and compares them with those of the others. Ranks
// that call different things find out before any wrong data is sent. For backends that do not compare calls themselves.
//
// A rank posts its call, then looks at what the others posted under the same number. If two ranks differ, the one
// that posts later sees it, writes the group's fault and sends nothing. The other may already be waiting for data;
// it finds the fault when it next checks. The board keeps the latest kSlots calls of each rank, so a rank that is
// further ahead than that is not compared.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "record/record.h"

namespace ringway {

struct PostedCall {
    uint64_t sequence;
    uint64_t signature;  // agreement.h
    int64_t bytes;
    int32_t peer;
    uint32_t site;
    Op op;
    DType dtype;
    Reduce reduce;
};

// Thrown when ranks called different things; the board's fault says which.
struct DifferentCalls {};

class CallBoard {
  public:
    struct Fault {
        int32_t rank;   // saw the difference (global ranks)
        int32_t other;  // called something else
        PostedCall own, theirs;
        char own_place[128], their_place[128];
    };

    // A new, empty board: a memfd for a group of `size`, of which at most `seats` ranks share it.
    static int create(int size, int seats, const std::string& token);
    // Maps the board and does not close `fd`. Throws if the token names another board, or if every seat is taken.
    // `rank` is the group's own; `ranks` are the members' global ranks, for the fault.
    CallBoard(int fd, int rank, std::vector<int> ranks, const std::string& token);
    ~CallBoard();
    CallBoard(const CallBoard&) = delete;
    CallBoard& operator=(const CallBoard&) = delete;

    // Throws DifferentCalls if another rank made a different call under the same number, or under an earlier one.
    void post(const Entry& call);
    // This rank's call of that number was not started.
    void withdraw(uint64_t sequence);
    // The group's fault; null while there is none.
    const Fault* fault() const;

    // This rank is about to abort the group. An aborted NCCL kernel goes on to send, and what it sends is garbage: a rank that
    // notices a death later than another may receive it and end its call as if all were well. Collectives before `first` are
    // known to have ended well.
    void announce_abort(uint64_t first);
    // The first collective that a rank's abort may have spoilt; nothing if no rank has announced one.
    std::optional<uint64_t> aborted_from() const;

  private:
    struct Slot;
    struct Place;
    struct Seat;
    struct Header;
    void take_seat(int rank, const std::string& token);
    void keep_place(uint32_t site);
    void report(const Seat& other, const PostedCall& own, const PostedCall& theirs);

    Header* header_ = nullptr;
    Seat* seats_ = nullptr;
    Seat* own_ = nullptr;
    size_t bytes_ = 0;
    std::vector<int> ranks_;
};

}  // namespace ringway
