#include "record/responder.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "record/caller_source.h"
#include "record/hmac.h"
#include "record/json.h"
#include "record/stacks.h"

namespace ringway {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kOfGroup = 64, kOfAll = 64;
constexpr auto kPatience = std::chrono::milliseconds(1000);  // for the GIL
constexpr int64_t kStacksStayTrue = 2000000000;  // ns for which stacks are reused
constexpr int kMaxSignals = 65;
constexpr size_t kTagBytes = 32, kNonceBytes = 16;
constexpr size_t kMaxRequest = 4096;
constexpr size_t kListeners = 3;           // descriptors that are watched besides the callers
constexpr size_t kMaxCallers = 64;
constexpr int kAcceptsAtOnce = 16;  // between two looks at what callers have sent
constexpr int64_t kPatienceWithCaller = 2'000'000'000;  // ns for a request, and for a reply
constexpr int64_t kAcceptPause = 100'000'000;           // ns, if there is no descriptor for a connection
constexpr int kLookForClose = 50;                       // ms

// The signal handler uses only these: the eventfd to write to, and the handler it replaced.
std::atomic<int> signal_wakes[kMaxSignals];
struct sigaction handlers_before[kMaxSignals];

void on_dump_signal(int number, siginfo_t* info, void* context) {
    const int saved = errno;
    const int fd = signal_wakes[number].load();
    const uint64_t one = 1;
    if (fd > 0 && write(fd, &one, sizeof(one)) < 0) errno = saved;
    const struct sigaction& before = handlers_before[number];
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    errno = saved;
}

std::runtime_error failed(const char* what) {
    return std::runtime_error(std::string("the responder cannot ") + what + ": " + std::strerror(errno));
}

int listen_tcp(const std::string& address, int& port) {
    sockaddr_storage where{};
    socklen_t length = 0;
    auto* four = reinterpret_cast<sockaddr_in*>(&where);
    auto* six = reinterpret_cast<sockaddr_in6*>(&where);
    if (inet_pton(AF_INET, address.c_str(), &four->sin_addr) == 1) {
        where.ss_family = AF_INET;
        length = sizeof(*four);
    } else if (inet_pton(AF_INET6, address.c_str(), &six->sin6_addr) == 1) {
        where.ss_family = AF_INET6;
        length = sizeof(*six);
    } else {
        throw std::runtime_error("the responder cannot listen on '" + address + "': not an address");
    }
    const int fd = socket(where.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) throw failed("make a socket");
    if (bind(fd, reinterpret_cast<sockaddr*>(&where), length) != 0 || listen(fd, SOMAXCONN) != 0) {
        ::close(fd);
        throw failed(("listen on " + address).c_str());
    }
    getsockname(fd, reinterpret_cast<sockaddr*>(&where), &length);
    port = ntohs(where.ss_family == AF_INET ? four->sin_port : six->sin6_port);
    return fd;
}

// For tools of the same user on the same host. Only `ringway top` needs it, so failing is not an error.
int listen_local() {
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    const int length = std::snprintf(where.sun_path + 1, sizeof(where.sun_path) - 1, "ringway/%d", getpid());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    if (bind(fd, reinterpret_cast<sockaddr*>(&where), bytes) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    ::close(fd);
    return -1;
}

bool same_user(int connection) {
    ucred who{};
    socklen_t length = sizeof(who);
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}

}  // namespace

Responder::Responder(std::shared_ptr<Recorder> recorder, const std::string& address, const std::string& token,
                     const std::string& facts)
    : recorder_(std::move(recorder)), token_(token), facts_(facts), pid_(getpid()) {
    if (token.size() != kTokenBytes) throw std::runtime_error("the responder's token has 32 characters");
    listener_ = listen_tcp(address, port_);
    local_listener_ = listen_local();
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    // This thread takes no signals: they are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread([this] { run(); }).detach();
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close_sockets();
        throw std::runtime_error(std::string("the responder cannot start its thread: ") + error.what());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Responder::~Responder() { close(); }

void Responder::close() {
    if (closing_.exchange(true)) return;
    if (getpid() != pid_) {
        // A forked child has no such thread, but it has the sockets, which would keep its parent's address in use.
        return close_sockets();
    }
    for (auto& wake : signal_wakes) {
        int own = wake_;
        wake.compare_exchange_strong(own, 0);
    }
    const uint64_t one = 1;
    if (write(wake_, &one, sizeof(one)) < 0) return;
    std::unique_lock<std::mutex> guard(lock_);
    changed_.notify_all();
    changed_.wait(guard, [this] { return ended_; });
    close_sockets();
}

void Responder::close_sockets() {
    for (const int fd : {listener_, local_listener_, wake_})
        if (fd >= 0) ::close(fd);
}

void Responder::run() {
    int64_t accept_again_ns = 0;
    std::vector<pollfd> watched;
    while (!closing_) {
        const int64_t now = monotonic_ns();
        const bool accepts = now >= accept_again_ns;
        int64_t next = accepts ? INT64_MAX : accept_again_ns;
        watched = {{wake_, POLLIN, 0}, {accepts ? listener_ : -1, POLLIN, 0}, {accepts ? local_listener_ : -1, POLLIN, 0}};
        for (const Caller& caller : callers_) {
            watched.push_back({caller.fd, POLLIN, 0});
            next = std::min(next, caller.deadline_ns);
        }
        const int limit = next == INT64_MAX ? -1 : static_cast<int>(std::max<int64_t>(0, next - now) / 1'000'000 + 1);
        if (poll(watched.data(), watched.size(), limit) < 0) continue;
        if (watched[0].revents != 0) {
            uint64_t count = 0;
            if (read(wake_, &count, sizeof(count)) > 0 && !closing_) write_dump();
        }
        // From the last to the first, because those that are done are erased.
        for (size_t i = callers_.size(); i-- > 0;) {
            const bool late = monotonic_ns() >= callers_[i].deadline_ns;
            const bool more = watched[kListeners + i].revents == 0 || (!closing_ && read_request(callers_[i]));
            if (more && !late) continue;
            ::close(callers_[i].fd);
            callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        for (const int which : {1, 2})
            if ((watched[which].revents & POLLIN) != 0 && !accept_from(watched[which].fd))
                accept_again_ns = monotonic_ns() + kAcceptPause;
    }
    for (const Caller& caller : callers_) ::close(caller.fd);
    callers_.clear();
    std::lock_guard<std::mutex> guard(lock_);
    ended_ = true;
    changed_.notify_all();
}

// False if the process has no room for another connection: asking again at once would only use up the CPU.
bool Responder::accept_from(int listener) {
    for (int i = 0; i < kAcceptsAtOnce && !closing_; ++i) {
        const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && errno == ECONNABORTED) continue;
        if (fd < 0) return errno == EAGAIN || errno == EINTR;
        if (!admit(fd, listener == local_listener_)) ::close(fd);
    }
    return true;
}

bool Responder::admit(int fd, bool local) {
    Caller caller{fd, local, monotonic_ns() + kPatienceWithCaller, "", {}, {}};
    if (local) {
        if (!same_user(fd)) return false;
    } else {
        caller.source = caller_source(fd);
        char challenge[kNonceBytes];
        if (caller.source.empty() || getrandom(challenge, sizeof(challenge), 0) != sizeof(challenge)) return false;
        if (send(fd, challenge, sizeof(challenge), MSG_NOSIGNAL) != sizeof(challenge)) return false;
        caller.challenge.assign(challenge, sizeof(challenge));
    }
    if (callers_.size() == kMaxCallers) evict_one();
    callers_.push_back(std::move(caller));
    return true;
}

// Drops the oldest caller of the source that has the most: a flood drops its own, and never a caller from elsewhere.
void Responder::evict_one() {
    std::map<std::string, size_t> counts;
    for (const Caller& caller : callers_) ++counts[caller.source];
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto oldest = std::find_if(callers_.begin(), callers_.end(),
                                     [&](const Caller& caller) { return caller.source == most->first; });
    ::close(oldest->fd);
    callers_.erase(oldest);
}

// Reads what has come, and answers a whole request. False if this connection is done.
bool Responder::read_request(Caller& caller) {
    char part[kMaxRequest + 1];
    const ssize_t got = recv(caller.fd, part, sizeof(part), 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    caller.request.append(part, static_cast<size_t>(got));
    if (got > 0) return caller.request.size() <= kMaxRequest;
    answer_request(caller);
    return false;
}

void Responder::answer_request(const Caller& caller) {
    std::string question = caller.request;
    size_t kind_at = 0;
    if (!caller.vouched_for) {
        kind_at = kNonceBytes;
        if (question.size() <= kTagBytes + kNonceBytes) return;
        question.erase(0, kTagBytes);
        if (!same_tag(hmac_sha256(token_, "ask" + caller.challenge + question), caller.request.data())) return;
    }
    if (question.size() <= kind_at) return;
    const std::string text = reply(question[kind_at], question.substr(kind_at + 1));
    if (caller.vouched_for) return send_all(caller.fd, text);
    const Tag tag = hmac_sha256(token_, "answer" + caller.challenge + question + text);
    send_all(caller.fd, std::string(tag.begin(), tag.end()) + text);
}

void Responder::send_all(int connection, const std::string& text) {
    const int64_t deadline = monotonic_ns() + kPatienceWithCaller;
    size_t sent = 0;
    while (sent < text.size() && !closing_ && monotonic_ns() < deadline) {
        const ssize_t done = send(connection, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
        if (done < 0 && errno != EAGAIN && errno != EINTR) return;
        if (done > 0) sent += static_cast<size_t>(done);
        pollfd room{connection, POLLOUT, 0};
        if (sent < text.size()) poll(&room, 1, kLookForClose);
    }
    shutdown(connection, SHUT_WR);
}

std::string Responder::reply(char kind, const std::string& group) {
    std::string extra = ",\"stacks\":" + json_text(kind == 'S' ? stacks() : "");
    {
        std::lock_guard<std::mutex> guard(lock_);
        extra += ",\"leaving\":" + json_text(leaving_);
    }
    return report(extra, group, kOfGroup, kOfAll);
}

std::string Responder::report(const std::string& extra, const std::string& group, size_t of_group, size_t of_all) {
    std::shared_ptr<Recorder> recorder;
    std::string facts;
    {
        std::lock_guard<std::mutex> guard(lock_);
        recorder = recorder_;
        facts = facts_;
    }
    return "{\"facts\":" + facts + ",\"pid\":" + std::to_string(pid_) + ",\"now\":" +
           std::to_string(monotonic_ns()) + ",\"total\":" + std::to_string(recorder->total()) + extra +
           ",\"calls\":" + calls_json(*recorder, group, of_group, of_all) + "}";
}

std::string Responder::stacks() {
    std::unique_lock<std::mutex> guard(lock_);
    if (!leaving_.empty()) return "";  // the interpreter may end at any moment
    const uint64_t question = ++asked_;
    changed_.notify_all();  // also wakes the rank's watch, which may have a fault to read
    if (latest_stacks_ns_ != 0 && monotonic_ns() - latest_stacks_ns_ < kStacksStayTrue) return latest_stacks_;
    if (changed_.wait_for(guard, kPatience, [&] { return answered_ >= question || closing_; }) && !closing_) {
        latest_stacks_ = answer_;
    } else if (!closing_) {
        // A thread holds the GIL and does not release it.
        const int number = signal_, fd = signal_fd_;
        guard.unlock();
        const std::string text = stacks_of_a_copy(number, fd);
        guard.lock();
        latest_stacks_ = text;
    }
    latest_stacks_ns_ = monotonic_ns();
    return latest_stacks_;
}

bool Responder::wait() {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [this] { return asked_ > seen_ || closing_ || !leaving_.empty(); });
    if (closing_ || !leaving_.empty()) return false;
    seen_ = asked_;
    return true;
}

void Responder::answer(const std::string& stacks) {
    std::lock_guard<std::mutex> guard(lock_);
    answer_ = stacks.substr(0, kMaxStackBytes);
    answered_ = seen_;
    changed_.notify_all();
}

void Responder::use_signal(int number, int fd) {
    std::lock_guard<std::mutex> guard(lock_);
    signal_ = number;
    signal_fd_ = fd;
}

void Responder::farewell(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock_);
    leaving_ = why;
    changed_.notify_all();
}

void Responder::tell_of(std::shared_ptr<Recorder> recorder, const std::string& facts) {
    std::lock_guard<std::mutex> guard(lock_);
    recorder_ = std::move(recorder);
    facts_ = facts;
}

void Responder::dump_at(int number, const std::string& path) {
    if (number <= 0 || number >= kMaxSignals) throw std::runtime_error("there is no signal " + std::to_string(number));
    {
        std::lock_guard<std::mutex> guard(lock_);
        dump_path_ = path;
    }
    const bool there_already = signal_wakes[number].exchange(wake_) != 0;
    if (there_already) return;
    struct sigaction action {};
    action.sa_sigaction = on_dump_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigfillset(&action.sa_mask);
    struct sigaction current {};
    sigaction(number, nullptr, &current);
    if (current.sa_sigaction == on_dump_signal) return;
    handlers_before[number] = current;
    if (sigaction(number, &action, nullptr) != 0) throw failed("install the handler of a signal");
}

// Writes a new file and renames it, so that a reader never sees half of it, and a link that another user has placed
// there is not followed. Errors must not disturb the rank.
void Responder::write_dump() {
    std::string path;
    {
        std::lock_guard<std::mutex> guard(lock_);
        path = dump_path_;
    }
    if (path.empty()) return;
    const std::string text = report("", "", 0, SIZE_MAX) + "\n";
    std::string aside = path + ".XXXXXX";
    const int fd = mkostemp(&aside[0], O_CLOEXEC);
    std::FILE* file = fd < 0 ? nullptr : fdopen(fd, "w");
    const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const bool closed = file != nullptr && std::fclose(file) == 0;
    if (!written || !closed || std::rename(aside.c_str(), path.c_str()) != 0) {
        std::fprintf(stderr, "ringway: the recorder could not be written to %s: %s\n", path.c_str(),
                     std::strerror(errno));
        if (fd >= 0) ::unlink(aside.c_str());
    }
}

}  // namespace ringway
