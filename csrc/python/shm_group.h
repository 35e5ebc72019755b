// A shared-memory group and its pending calls, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "python/gil_host.h"
#include "python/shm_tasks.h"
#include "shm/engine.h"

namespace ringway::shm {

namespace nb = nanobind;

// A call of at least this many bytes releases the GIL before it starts; a smaller one only if it has to wait.
inline constexpr int64_t kLarge = 16 << 10;

// A pending call. It may outlive the group.
struct PyTask {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<PythonCollective> collective;  // one of the two
    std::shared_ptr<PythonMessage> message;

    const Task& task() const { return collective ? static_cast<const Task&>(*collective) : *message; }
    Attachment& attachment() const { return collective ? collective->attachment : message->attachment; }

    // Waits for at most `timeout_s`; returns whether the call is done.
    bool wait(double timeout_s) const;
};

// A process that this one shares groups with.
struct PyPeer {
    std::shared_ptr<const Peer> peer;
};

class PyGroup {
  public:
    // `raise` is called with an outcome and the group's fault, and raises the Python error for them.
    PyGroup(int fd, int rank, const std::vector<PyPeer>& peers, int cpus, double timeout_s, nb::object raise);

    // Ends the calls of all ranks, unless a fault has ended them already.
    void fail();
    // Without the GIL: ending threads may need it.
    void close();
    void abort();

    nb::object fault() const;
    Engine& engine() { return *engine_; }
    const std::shared_ptr<Engine>& shared_engine() const { return engine_; }
    double timeout_s() const { return timeout_s_; }
    void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }

    // Runs the call on this thread if it can run now; else queues it and waits. Raises the error if it fails.
    void run(const Request& request, GilHost& host);
    // Sends or receives, and waits. An interrupted message is withdrawn, or it would take the data of the next one. If it
    // has begun to move, the group ends.
    void run(const std::shared_ptr<PythonMessage>& message);

    PyTask submit(std::shared_ptr<PythonCollective> task);
    PyTask start(std::shared_ptr<PythonMessage> message, bool in_background);

    // Raises the error for an outcome, unless that is Done.
    void check(Outcome outcome) const;

  private:
    Outcome run_in_turn(const Request& request, GilHost& host);

    std::shared_ptr<Engine> engine_;
    double timeout_s_;
    nb::object raise_;
};

// A group's fault as a dictionary; None for null.
nb::object described(const Fault* fault);

}  // namespace ringway::shm
