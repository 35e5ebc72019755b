// A thread of each rank that tells others where the rank is, whatever the rank itself is doing.
//
// It needs neither the GIL nor the rank's help: a rank that is stuck in C code with the GIL held answers too. It
// listens on TCP for the ranks of the job, which prove that they have this rank's token, and on an abstract unix socket
// for the user's own tools on the host (`ringway top`), whose user the kernel confirms. It sleeps until it gets a request.
//
//   challenge  16 random bytes, from the responder
//   request    tag (32 bytes); nonce (16), kind (1), a group's name, to the end of the caller's stream
//   reply      tag (32 bytes); one JSON object, to the end of the connection
//   kinds      'C' calls; 'S' calls and the Python stacks, asked for when others wait for this rank
//
// The tags are HMAC-SHA256 with the token as key: the request's over "ask", the challenge and what follows the tag; the
// reply's over "answer", the challenge, what followed the request's tag, and the JSON object. So neither can be replayed,
// and nothing is parsed before it is verified. On the unix socket there are no challenge, no tags and no nonce.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "record/recorder.h"

namespace ringway {

class Responder {
  public:
    // Listens on `address`. `facts` is a JSON object that is part of each reply.
    Responder(std::shared_ptr<Recorder> recorder, const std::string& address, const std::string& token,
              const std::string& facts);
    ~Responder();
    Responder(const Responder&) = delete;
    Responder& operator=(const Responder&) = delete;

    int port() const { return port_; }

    // Sleeps until a request for stacks comes; false at the end. The rank runs this in a thread of its own, without the
    // GIL.
    bool wait();
    // That thread's answer: stacks taken with the GIL. If it is late, the responder reads them without the GIL.
    void answer(const std::string& stacks);
    // For interpreters that cannot be asked for stacks directly: a signal at which faulthandler writes them to `fd`. It is
    // raised in the responder's own thread only.
    void use_signal(int number, int fd);
    // From now on replies say that the rank is leaving, and why. Waits end, and Python is not called any more.
    void farewell(const std::string& why);
    // For a later job of this process: other facts, perhaps another recorder.
    void tell_of(std::shared_ptr<Recorder> recorder, const std::string& facts);

    // At this signal the responder's thread writes the recorder's calls to `path`. The handler that was installed before
    // is called too.
    void dump_at(int number, const std::string& path);

    // Idempotent and bounded. The thread has stopped when it returns.
    void close();

  private:
    void run();
    // A connection that has not sent its whole request yet.
    struct Caller {
        int fd;
        bool vouched_for;     // by the kernel: the same user on the same host
        int64_t deadline_ns;  // for the whole request, not for each part of it
        std::string source;   // caller_source.h; empty if the kernel vouches for it
        std::string challenge;
        std::string request;
    };

    bool accept_from(int listener);
    bool admit(int fd, bool local);
    void evict_one();
    bool read_request(Caller& caller);
    void answer_request(const Caller& caller);
    void send_all(int connection, const std::string& text);
    std::string reply(char kind, const std::string& group);
    std::string report(const std::string& extra, const std::string& group, size_t of_group, size_t of_all);
    std::string stacks();
    void write_dump();
    void close_sockets();

    std::mutex lock_;
    std::condition_variable changed_;
    std::shared_ptr<Recorder> recorder_;
    const std::string token_;
    std::string facts_;
    std::string leaving_;
    std::string answer_;
    std::string dump_path_;
    uint64_t asked_ = 0, seen_ = 0, answered_ = 0;
    std::string latest_stacks_;
    int64_t latest_stacks_ns_ = 0;
    int signal_ = 0, signal_fd_ = -1;
    int listener_ = -1, local_listener_ = -1, wake_ = -1;
    int port_ = 0;
    pid_t pid_;
    std::atomic<bool> closing_{false};
    bool ended_ = false;
    std::vector<Caller> callers_;  // of the responder's thread alone
};

}  // namespace ringway
