#include "shm/membership.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shm/peer_memory.h"

namespace ringway::shm {
namespace {

constexpr int64_t kReadAtOnce = 16 << 20;  // between two looks for a fault

// A forked child has its parent's mapping and descriptors, but is no member. The count of forks on the way to this
// process tells it apart; asking for the pid would cost a system call each time.
std::atomic<uint32_t> forks{0};

uint32_t generation() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

// The pid of a process as this process sees it: a peer in another PID namespace knows itself by another one.
int visible_pid(const Peer& peer) {
    if (peer.pidfd < 0) return peer.pid;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", peer.pidfd);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return peer.pid;
    int pid = 0;
    char line[128];
    while (std::fgets(line, sizeof line, file) != nullptr && std::sscanf(line, "Pid: %d", &pid) != 1) {}
    std::fclose(file);
    return pid;
}

// Likewise, for system calls; 0 if unknown. Peers in other PID namespaces may have this process's number, and where /proc is
// that of another namespace, it has other numbers than the system calls. A rank may also be a thread of this process.
int readable_pid(const Peer& peer) {
    char own[32] = {};
    if (readlink("/proc/self", own, sizeof own - 1) < 0 || std::atoi(own) != getpid()) return 0;
    if (peer.pidfd < 0) return peer.pid == getpid() ? getpid() : 0;
    return visible_pid(peer);
}

// A process that was killed and is not yet reaped has its exit code at the end of its stat line.
int signal_of_zombie(int pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    char text[1024];
    const size_t size = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[size] = '\0';
    const char* name_end = std::strrchr(text, ')');
    const char* last = std::strrchr(text, ' ');
    if (name_end == nullptr || last == nullptr || name_end[1] != ' ' || name_end[2] != 'Z') return 0;
    int code = 0;
    if (std::sscanf(last, "%d", &code) != 1) return 0;
    return code & 0x7f;
}

// The first version of the kernel's struct pidfd_info (Linux 6.13; it has the exit code since 6.15).
struct PidfdInfo {
    uint64_t mask;
    uint64_t cgroup;
    uint32_t ids[11];
    int32_t exit_code;
};
constexpr uint64_t kInfoExit = 1 << 3;

int signal_of_reaped(int pidfd) {
    PidfdInfo info{};
    info.mask = kInfoExit;
    if (ioctl(pidfd, _IOWR(0xFF, 11, PidfdInfo), &info) != 0 || (info.mask & kInfoExit) == 0) return 0;
    return info.exit_code & 0x7f;
}

// 0 if the kernel does not say, or if the process ended by itself.
int signal_that_ended(const Peer& peer) {
    for (int tries = 0; tries < 5; ++tries) {
        int number = signal_of_zombie(visible_pid(peer));
        if (number == 0 && peer.pidfd >= 0) number = signal_of_reaped(peer.pidfd);
        if (number != 0) return number;
        usleep(1000);  // it may be between the two states
    }
    return 0;
}

// For kernels without pidfds: each member locks its byte of the memfd. The kernel drops the lock when the process ends,
// however it ends, and a forked child does not inherit it.
struct flock byte_of(int rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

}  // namespace

Peer::~Peer() {
    if (pidfd >= 0) close(pidfd);
}

Membership::Membership(std::shared_ptr<Mapping> mapping, int rank, Peers peers, int cpus)
    : rank_(rank),
      size_(mapping->size),
      cpus_(cpus),
      born_in_(generation()),
      segment_(std::move(mapping), rank),
      peers_(std::move(peers)) {
    struct flock lock = byte_of(rank_);
    fcntl(segment_.fd(), F_SETLK, &lock);
    ReadSizes sizes = read_sizes(size_);
    for (int peer = 0; peer < size_; ++peer) {
        const Peer& other = *peers_[static_cast<size_t>(peer)];
        pids_.push_back(sizes.none() ? 0 : peer == rank_ ? getpid() : readable_pid(other));
        if (!may_read(pids_.back())) sizes = {};
    }
    segment_.header().reads_to[rank_].store(sizes.most, std::memory_order_seq_cst);
    segment_.header().reads_from[rank_].store(std::max<int64_t>(sizes.least, 1), std::memory_order_seq_cst);
    segment_.header().joined[rank_].store(1, std::memory_order_seq_cst);
}

bool Membership::has_ended(int peer) {
    const Peer& other = *peers_[static_cast<size_t>(peer)];
    if (other.pidfd >= 0) {
        pollfd probe{other.pidfd, POLLIN, 0};
        return poll(&probe, 1, 0) == 1 && (probe.revents & POLLIN) != 0;
    }
    if (other.pid == getpid()) return false;  // a rank of this process, whose lock this process cannot see
    if (segment_.header().joined[peer].load(std::memory_order_seq_cst) == 0) return false;
    struct flock lock = byte_of(peer);
    return fcntl(segment_.fd(), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

ReadSizes Membership::reads(int rank) const {
    const int64_t least = segment_.header().reads_from[rank].load(std::memory_order_seq_cst);
    if (least == 0) return {};
    return {least, segment_.header().reads_to[rank].load(std::memory_order_seq_cst)};
}

bool Membership::all_read(int64_t bytes) const {
    for (int rank = 0; rank < size_; ++rank)
        if (!reads(rank).contain(bytes)) return false;
    return true;
}

void Membership::read(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own) {
    if (const int error = try_to_read(peer, to, from, bytes, own)) unreadable(peer, error, own);
}

bool Membership::read_if_possible(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own) {
    return try_to_read(peer, to, from, bytes, own) == 0;
}

int Membership::try_to_read(int peer, std::byte* to, uint64_t from, int64_t bytes, const CallFacts& own) {
    const int pid = pids_[static_cast<size_t>(peer)];
    for (int64_t done = 0; done < bytes; done += kReadAtOnce) {
        check();
        const int64_t piece = std::min(kReadAtOnce, bytes - done);
        const int error = read_memory(pid, to + done, from + static_cast<uint64_t>(done), piece);
        if (error != 0) return error;
    }
    // It may have given up the call, and its caller may use the memory again; or another process may have got its pid.
    if (bytes > 0 && (has_left(peer) || has_ended(peer))) unreadable(peer, ESRCH, own);
    check();
    return 0;
}

// A process that ends loses its memory before its pidfd says so.
void Membership::unreadable(int peer, int error, const CallFacts& own) {
    const auto never = [] { return false; };
    const Look look{[](const void* what) { return (*static_cast<const decltype(never)*>(what))(); }, &never};
    for (int tries = 0; tries < 1000; ++tries) {
        if (stop(peer, true, own, look)) throw Unfinished{faulted() ? Outcome::Faulted : Outcome::Closed};
        usleep(1000);
    }
    report(FaultKind::Unreadable, peer, own, [error](Fault& fault) {
        std::strncpy(fault.reason, std::strerror(error), sizeof fault.reason - 1);
    });
    throw Unfinished{Outcome::Faulted};
}

bool Membership::gone(int peer, bool look_for_dead, const CallFacts& own, const Look& ready) {
    const Peer& other = *peers_[static_cast<size_t>(peer)];
    const bool left = has_left(peer);
    if ((!left && (!look_for_dead || !has_ended(peer))) || ready()) return false;
    const int signal = left ? 0 : signal_that_ended(other);
    report(left ? FaultKind::PeerLeft : FaultKind::PeerLost, peer, own, [&](Fault& fault) {
        fault.pid = other.pid;
        fault.signal = signal;
    });
    return true;
}

bool Membership::stop(int peer, bool look_for_dead, const CallFacts& own, const Look& ready) {
    if (leaving_.load(std::memory_order_seq_cst) || faulted()) return true;
    if (peer != kAnyone) return gone(peer, look_for_dead, own, ready);
    // From anyone: a rank that has left is not missed as long as there are others.
    int there = 0;
    int last = rank_;
    for (int other = 0; other < size_; ++other) {
        if (other == rank_) continue;
        last = other;
        const bool absent = has_left(other);
        if (!absent && gone(other, look_for_dead, own, ready)) return true;
        there += absent ? 0 : 1;
    }
    return there == 0 && size_ > 1 && gone(last, look_for_dead, own, ready);
}

bool Membership::forked() const { return generation() != born_in_; }

void Membership::check() {
    if (forked()) throw Unfinished{Outcome::Forked};
    if (leaving_.load(std::memory_order_relaxed)) throw Unfinished{Outcome::Closed};
    if (faulted()) throw Unfinished{Outcome::Faulted};
}

const Fault* Membership::fault() const {
    const Fault& fault = segment_.header().fault;
    // Writing it takes some milliseconds at most, unless the writer is killed before it is done.
    for (int tries = 0; tries < 200 && fault.state.load(std::memory_order_seq_cst) == 1; ++tries) usleep(1000);
    return fault.state.load(std::memory_order_seq_cst) == 2 ? &fault : nullptr;
}

void Membership::report(FaultKind kind, int rank, const CallFacts& own, const std::function<void(Fault&)>& fill) {
    Fault& fault = segment_.header().fault;
    uint32_t none = 0;
    if (!fault.state.compare_exchange_strong(none, 1, std::memory_order_seq_cst)) return;
    fault.kind = kind;
    fault.reporter = rank_;
    fault.rank = rank;
    fault.own = own;
    if (fill) fill(fault);
    fault.state.store(2, std::memory_order_seq_cst);
    wake_everybody();
}

void Membership::wake_everybody() {
    Header& header = segment_.header();
    for (int peer = 0; peer < size_; ++peer) {
        wake(header.waiting[peer]);
        wake(header.waiting_p2p[peer]);
    }
}

void Membership::report_timeout(const CallFacts& own, double waited, const std::vector<int>& missing) {
    report(FaultKind::Timeout, -1, own, [&](Fault& fault) {
        fault.waited = waited;
        for (const int rank : missing) fault.missing[rank / 64] |= uint64_t{1} << (rank % 64);
    });
}

void Membership::leave() {
    if (forked()) return;
    // First, because ranks that read this one's memory look at it, and `leaving_` lets this rank's calls end.
    segment_.header().left[rank_].store(1, std::memory_order_seq_cst);
    if (!leaving_.exchange(true)) wake_everybody();
}

}  // namespace ringway::shm
