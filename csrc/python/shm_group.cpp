#include "python/shm_group.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace ringway::shm {
namespace {

constexpr double kForever = 1e9;

nb::dict described(const CallFacts& facts) {
    nb::dict d;
    d["op"] = static_cast<int>(facts.op);
    d["dtype"] = static_cast<int>(facts.dtype);
    d["reduce"] = static_cast<int>(facts.reduce);
    d["root"] = facts.root;
    d["count"] = facts.count;
    d["number"] = facts.number;
    // Another process wrote it, and may have truncated it in the middle of a character.
    d["place"] = nb::steal(PyUnicode_DecodeUTF8(
        facts.place, static_cast<Py_ssize_t>(strnlen(facts.place, kTextBytes)), "replace"));
    return d;
}

// At the interpreter's exit a thread that still runs may sleep, and never end.
void close_or_stop(Engine& engine) { interpreter_exits() ? engine.stop() : engine.close(); }

// Drops the last reference but those of the engine's own threads. They may need the GIL to end.
void release(std::shared_ptr<Engine> engine) {
    if (engine->members.forked()) {
        // A forked child does not have its parent's threads, which may have held the locks: never destroy the engine.
        new std::shared_ptr<Engine>(std::move(engine));
        return;
    }
    GilRelease gil;
    close_or_stop(*engine);
    engine.reset();
}

}  // namespace

nb::object described(const Fault* fault) {
    if (fault == nullptr) return nb::none();
    nb::dict d;
    d["kind"] = static_cast<int>(fault->kind);
    d["reporter"] = fault->reporter;
    d["rank"] = fault->rank;
    d["pid"] = fault->pid;
    d["signal"] = fault->signal;
    d["bytes"] = fault->bytes;
    d["reason"] = nb::steal(PyUnicode_DecodeUTF8(
        fault->reason, static_cast<Py_ssize_t>(strnlen(fault->reason, sizeof fault->reason)), "replace"));
    d["waited"] = fault->waited;
    nb::list missing;
    for (int rank = 0; rank < kMaxRanks; ++rank)
        if ((fault->missing[rank / 64] >> (rank % 64)) & 1) missing.append(rank);
    d["missing"] = missing;
    d["own"] = described(fault->own);
    d["theirs"] = described(fault->theirs);
    const Pair& pair = fault->pair;
    d["pair"] = pair.from == pair.to ? nb::object(nb::none())
                                     : nb::object(nb::make_tuple(pair.from, pair.to, pair.sent, pair.expected));
    return d;
}

bool PyTask::wait(double timeout_s) const {
    GilHost host;
    if (message && message->bytes >= kLarge) host.block();
    const bool done = collective ? engine->progress.wait(*collective, timeout_s, host)
                                 : engine->messages.wait(*message, timeout_s, host);
    host.resume();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (done) collective ? engine->progress.sweep() : engine->messages.sweep();
    return done;
}

PyGroup::PyGroup(int fd, int rank, const std::vector<PyPeer>& processes, int cpus, double timeout_s, nb::object raise)
    : timeout_s_(timeout_s), raise_(std::move(raise)) {
    Peers peers;
    for (const PyPeer& process : processes) peers.push_back(process.peer);
    auto mapping = std::make_shared<Mapping>(fd, static_cast<int>(peers.size()));
    auto engine = std::make_shared<Engine>(std::move(mapping), rank, std::move(peers), cpus);
    Engine* const address = engine.get();
    engine_ = std::shared_ptr<Engine>(address, [engine](Engine*) mutable { release(std::move(engine)); });
}

void PyGroup::close() { close_or_stop(*engine_); }

void PyGroup::fail() {
    if (!engine_->members.forked()) engine_->members.abort();
}

void PyGroup::abort() {
    fail();
    close();
}

nb::object PyGroup::fault() const { return described(engine_->members.fault()); }

void PyGroup::run(const Request& request, GilHost& host) {
    Outcome outcome;
    if (!engine_->progress.run_now(request, host, outcome)) outcome = run_in_turn(request, host);
    host.resume();
    check(outcome);
}

void PyGroup::run(const std::shared_ptr<PythonMessage>& message) {
    PointToPoint& messages = engine_->messages;
    GilHost host;
    if (message->bytes >= kLarge) host.block();
    messages.start(message, false);
    const bool done = messages.wait(*message, kForever, host);
    if (!done && !messages.withdraw(*message)) engine_->members.report_interrupted();
    host.resume();
    messages.sweep();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    check(message->outcome());
}

void PyGroup::check(Outcome outcome) const {
    if (outcome == Outcome::Done) return;
    if (outcome == Outcome::Interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
    const nb::object reason = fault();
    or_sleep([&] { raise_(static_cast<int>(outcome), reason); });
    throw std::logic_error("the fault was not raised");
}

PyTask PyGroup::submit(std::shared_ptr<PythonCollective> task) {
    PyTask handle{engine_, std::move(task), nullptr};
    GilRelease gil;
    engine_->progress.submit(handle.collective);
    return handle;
}

PyTask PyGroup::start(std::shared_ptr<PythonMessage> message, bool in_background) {
    PyTask handle{engine_, nullptr, std::move(message)};
    GilRelease gil;
    engine_->messages.start(handle.message, in_background);
    return handle;
}

// The task uses the caller's memory until it is done. So an interrupted caller ends the group, and then waits for it.
Outcome PyGroup::run_in_turn(const Request& request, GilHost& host) {
    auto task = std::make_shared<Collective>();
    task->request = request;
    host.block();
    engine_->progress.submit(task);
    if (engine_->progress.wait(*task, kForever, host)) return task->outcome();
    engine_->members.report_interrupted();
    Host deaf;
    GilRelease gil;  // callbacks of earlier calls may need it
    engine_->progress.wait(*task, kForever, deaf);
    return Outcome::Interrupted;
}

}  // namespace ringway::shm
