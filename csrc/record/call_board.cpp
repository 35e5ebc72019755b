#include "record/call_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "agreement.h"
#include "cgroup.h"
#include "record/callsite.h"

namespace ringway {
namespace {

constexpr uint64_t kSlots = 128;
constexpr uint32_t kPlaces = 256;
constexpr size_t kTokenBytes = 32;

}  // namespace

struct CallBoard::Slot {
    std::atomic<uint64_t> number;  // the call's sequence plus one
    PostedCall call;
};

struct CallBoard::Place {
    std::atomic<uint32_t> site;
    char text[124];
};

struct CallBoard::Seat {
    int32_t rank;  // of the group; written before the seat's first call
    Slot slots[kSlots];
    Place places[kPlaces];
};

struct CallBoard::Header {
    char token[kTokenBytes];
    int32_t size;  // of the group
    int32_t seats;
    std::atomic<int32_t> taken;
    std::atomic<uint32_t> state;  // of the fault: 0 none, 1 being written, 2 readable
    std::atomic<uint64_t> abort_mark;  // the complement of the first collective that an abort may have spoilt; 0: no abort
    Fault fault;
};

int CallBoard::create(int size, int seats, const std::string& token) {
    if (token.size() != kTokenBytes) throw std::runtime_error("the token of a call board has 32 characters");
    Header header{};
    std::memcpy(header.token, token.data(), kTokenBytes);
    header.size = size;
    header.seats = seats;
    const MemoryLeft left = memory_left();
    const auto bytes = static_cast<off_t>(sizeof(Header) + static_cast<size_t>(seats) * sizeof(Seat));
    if (left.bytes < bytes)
        throw std::runtime_error("no memory for the call board of a group: only " + std::to_string(left.bytes) +
                                 " bytes are left " + left.limited_by);
    const int fd = memfd_create("ringway-call-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    // Reserve the pages now: running out of memory is then an error here, not a SIGBUS in a call.
    if (fd < 0 || ftruncate(fd, bytes) != 0 || (errno = posix_fallocate(fd, 0, bytes)) != 0 ||
        pwrite(fd, &header, sizeof(header), 0) < 0) {
        const int failure = errno;
        if (fd >= 0) close(fd);
        const bool shortage = failure == EMFILE || failure == ENFILE;
        throw std::runtime_error(std::string(shortage ? "no descriptor" : "no memory") +
                                 " for the call board of a group: " + std::strerror(failure));
    }
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);  // shrinking it would kill all ranks with SIGBUS
    return fd;
}

CallBoard::CallBoard(int fd, int rank, std::vector<int> ranks, const std::string& token) : ranks_(std::move(ranks)) {
    struct stat facts {};
    if (fstat(fd, &facts) != 0 || static_cast<size_t>(facts.st_size) < sizeof(Header))
        throw std::runtime_error("this is not a call board");
    bytes_ = static_cast<size_t>(facts.st_size);
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) throw std::runtime_error("the group's call board cannot be mapped");
    header_ = static_cast<Header*>(base);
    seats_ = reinterpret_cast<Seat*>(header_ + 1);
    try {
        take_seat(rank, token);
    } catch (...) {
        munmap(base, bytes_);
        throw;
    }
}

CallBoard::~CallBoard() { munmap(header_, bytes_); }

void CallBoard::take_seat(int rank, const std::string& token) {
    if (std::string(header_->token, kTokenBytes) != token || header_->size != static_cast<int32_t>(ranks_.size()) ||
        bytes_ != sizeof(Header) + static_cast<size_t>(header_->seats) * sizeof(Seat))
        throw std::runtime_error("this is the call board of another group");
    const int32_t seat = header_->taken.fetch_add(1);
    if (seat >= header_->seats) throw std::runtime_error("every seat of the group's call board is taken");
    own_ = seats_ + seat;
    own_->rank = rank;
}

// Write each line of the program once, not with every call.
void CallBoard::keep_place(uint32_t id) {
    Place& own = own_->places[id % kPlaces];
    if (own.site.load(std::memory_order_relaxed) == id) return;
    const CallSite& where = *site(id);
    const std::string text = where.file + ":" + std::to_string(where.line);
    const size_t skipped = text.size() < sizeof(own.text) ? 0 : text.size() - sizeof(own.text) + 1;
    own.site.store(0, std::memory_order_release);
    std::memcpy(own.text, text.c_str() + skipped, text.size() - skipped + 1);
    own.site.store(id, std::memory_order_release);
}

void CallBoard::post(const Entry& call) {
    if (header_->state.load(std::memory_order_acquire) != 0) throw DifferentCalls{};
    const PostedCall own{call.sequence, signature(call.op, call.bytes, call.dtype, call.reduce, call.peer),
                         call.bytes, call.peer, call.site, call.op, call.dtype, call.reduce};
    if (call.site != 0) keep_place(call.site);
    Slot& mine = own_->slots[call.sequence % kSlots];
    const uint64_t number = call.sequence + 1;
    mine.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    mine.call = own;
    // Post, then look: if two ranks do so at the same time, at least one sees the other.
    mine.number.store(number, std::memory_order_seq_cst);
    const Seat* const end = seats_ + std::min(header_->taken.load(std::memory_order_acquire), header_->seats);
    for (const Seat* seat = seats_; seat != end; ++seat) {
        const Slot& theirs = seat->slots[call.sequence % kSlots];
        if (theirs.number.load(std::memory_order_seq_cst) != number) continue;
        const PostedCall posted = theirs.call;
        std::atomic_thread_fence(std::memory_order_acquire);
        if (theirs.number.load(std::memory_order_relaxed) != number || posted.signature == own.signature) continue;
        report(*seat, own, posted);
        throw DifferentCalls{};
    }
}

void CallBoard::withdraw(uint64_t sequence) {
    std::atomic<uint64_t>& number = own_->slots[sequence % kSlots].number;
    if (number.load(std::memory_order_relaxed) == sequence + 1) number.store(0, std::memory_order_release);
}

void CallBoard::report(const Seat& other, const PostedCall& own, const PostedCall& theirs) {
    uint32_t none = 0;
    if (!header_->state.compare_exchange_strong(none, 1)) return;
    Fault& fault = header_->fault;
    fault.rank = ranks_[static_cast<size_t>(own_->rank)];
    fault.other = ranks_[static_cast<size_t>(other.rank)];
    fault.own = own;
    fault.theirs = theirs;
    const auto copy = [](const Seat& seat, uint32_t id, char* into) {
        const Place& known = seat.places[id % kPlaces];
        const bool there = id != 0 && known.site.load(std::memory_order_acquire) == id;
        std::snprintf(into, sizeof(Fault::own_place), "%s", there ? known.text : "an unknown line");
    };
    copy(*own_, own.site, fault.own_place);
    copy(other, theirs.site, fault.their_place);
    header_->state.store(2, std::memory_order_release);
}

const CallBoard::Fault* CallBoard::fault() const {
    uint32_t state = header_->state.load(std::memory_order_acquire);
    for (int tries = 0; state == 1 && tries < 1000; ++tries) {
        usleep(100);
        state = header_->state.load(std::memory_order_acquire);
    }
    return state == 2 ? &header_->fault : nullptr;
}

void CallBoard::announce_abort(uint64_t first) {
    const uint64_t marked = ~first;
    uint64_t known = header_->abort_mark.load();
    while (known < marked && !header_->abort_mark.compare_exchange_weak(known, marked)) {
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the abort comes after it
}

std::optional<uint64_t> CallBoard::aborted_from() const {
    const uint64_t marked = header_->abort_mark.load();
    if (marked == 0) return {};
    return ~marked;
}

}  // namespace ringway
