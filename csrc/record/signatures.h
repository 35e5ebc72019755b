// What each rank of a group on one host calls, side by side, so that ranks that call different things are told
// before anything wrong is sent. For backends that do not see it themselves.
//
// A rank posts the signature of its call, then looks at what the others posted under the same number. Of two
// ranks that part, whoever posts later sees it, writes the group's fault and sends nothing; the other, which may
// wait for data by then, finds the fault when it next looks. A rank looks at the latest kSlots calls of another,
// so one that is further ahead than that is not compared.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "record/record.h"

namespace ringway {

struct Posted {
    uint64_t sequence;
    int64_t bytes;
    int32_t peer;
    uint32_t site;
    Op op;
    DType dtype;
    Reduce reduce;
};

// Thrown where ranks part; the fault says how.
struct Parted {};

class Signatures {
  public:
    struct Fault {
        int32_t rank;   // saw it (global ranks)
        int32_t other;  // called something else
        Posted own, theirs;
        char own_place[128], their_place[128];
    };

    // A new, empty segment: a memfd, for a group of `size` of which `seats` ranks at most share it.
    static int create(int size, int seats, const std::string& token);
    // Maps the segment and closes nothing. Throws where it is not the one that the token names, or where every
    // seat is taken. `rank` is the group's own, `ranks` are the members' global ranks, for the fault.
    Signatures(int fd, int rank, std::vector<int> ranks, const std::string& token);
    ~Signatures();
    Signatures(const Signatures&) = delete;
    Signatures& operator=(const Signatures&) = delete;

    // Throws Parted where another rank made a different call under the same number, here or before.
    void post(const Entry& call);
    // The group's fault; null while there is none.
    const Fault* fault() const;

  private:
    struct Slot;
    struct Place;
    struct Seat;
    struct Header;
    void take_seat(int rank, const std::string& token);
    void keep_place(uint32_t site);
    void report(const Seat& other, const Posted& own, const Posted& theirs);

    Header* header_ = nullptr;
    Seat* seats_ = nullptr;
    Seat* own_ = nullptr;
    size_t bytes_ = 0;
    std::vector<int> ranks_;
};

}  // namespace ringway
