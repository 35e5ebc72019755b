#include "record/responder.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "record/stacks.h"
#include "record/json.h"

namespace ringway {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kOfGroup = 64, kOfAll = 64;
constexpr auto kPatience = std::chrono::milliseconds(1000);  // for the GIL
constexpr int64_t kStacksStayTrue = 2000000000;  // ns for which stacks are reused
constexpr int kMaxSignals = 65;

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
    const int fd = socket(where.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) throw failed("make a socket");
    if (bind(fd, reinterpret_cast<sockaddr*>(&where), length) != 0 || listen(fd, 128) != 0) {
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
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    if (bind(fd, reinterpret_cast<sockaddr*>(&where), bytes) == 0 && listen(fd, 16) == 0) return fd;
    ::close(fd);
    return -1;
}

bool same_user(int connection) {
    ucred who{};
    socklen_t length = sizeof(who);
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}

bool read_exactly(int fd, char* into, size_t count) {
    while (count > 0) {
        const ssize_t got = recv(fd, into, count, 0);
        if (got <= 0) return false;
        into += got;
        count -= static_cast<size_t>(got);
    }
    return true;
}

bool same_secret(const char* given, const std::string& token) {
    unsigned char differ = token.size() == kTokenBytes ? 0 : 1;
    for (size_t i = 0; i < std::min(kTokenBytes, token.size()); ++i) differ |= given[i] ^ token[i];
    return differ == 0;
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
    std::thread([this] { run(); }).detach();
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
    pollfd watched[] = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}, {local_listener_, POLLIN, 0}};
    while (!closing_) {
        if (poll(watched, 3, -1) < 0) continue;
        if (watched[0].revents != 0) {
            uint64_t count = 0;
            if (read(wake_, &count, sizeof(count)) > 0 && !closing_) write_dump();
        }
        for (const int which : {1, 2}) {
            if ((watched[which].revents & POLLIN) == 0 || closing_) continue;
            const int connection = accept4(watched[which].fd, nullptr, nullptr, SOCK_CLOEXEC);
            if (connection < 0) continue;
            if (which == 1 || same_user(connection)) serve(connection, which == 2);
            ::close(connection);
        }
    }
    std::lock_guard<std::mutex> guard(lock_);
    ended_ = true;
    changed_.notify_all();
}

void Responder::serve(int connection, bool vouched_for) {
    const timeval patience{2, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    char head[kTokenBytes + 3];
    if (!read_exactly(connection, head, sizeof(head))) return;
    if (!vouched_for && !same_secret(head, token_)) return;
    const auto* bytes = reinterpret_cast<unsigned char*>(head + kTokenBytes);
    std::string group(static_cast<size_t>(bytes[1] | bytes[2] << 8), '\0');
    if (!read_exactly(connection, &group[0], group.size())) return;
    const std::string text = reply(static_cast<char>(bytes[0]), group);
    for (size_t sent = 0; sent < text.size();) {
        const ssize_t done = send(connection, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
        if (done <= 0) return;
        sent += static_cast<size_t>(done);
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

// Writes another file and renames it, so that a reader never sees half of it. Errors must not disturb the rank.
void Responder::write_dump() {
    std::string path;
    {
        std::lock_guard<std::mutex> guard(lock_);
        path = dump_path_;
    }
    if (path.empty()) return;
    const std::string text = report("", "", 0, SIZE_MAX) + "\n";
    const std::string aside = path + ".part";
    std::FILE* file = std::fopen(aside.c_str(), "w");
    const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const bool closed = file != nullptr && std::fclose(file) == 0;
    if (!written || !closed || std::rename(aside.c_str(), path.c_str()) != 0) {
        std::fprintf(stderr, "ringway: the recorder could not be written to %s: %s\n", path.c_str(),
                     std::strerror(errno));
        ::unlink(aside.c_str());
    }
}

}  // namespace ringway
