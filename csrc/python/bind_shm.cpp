#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <unordered_map>

#include "record/callsite.h"
#include "python/gil_host.h"
#include "record/recorder.h"
#include "python/shm_tasks.h"
#include "record/call_board.h"
#include "python/tensor_view.h"

namespace nb = nanobind;
using namespace ringway;
using namespace ringway::shm;

namespace {

constexpr int64_t kLarge = 16 << 10;  // bytes from which the GIL is given away before the call, not while it waits

struct Place {
    std::byte* data;
    int64_t bytes;
};

// Any contiguous CPU tensor: by DLPack where that knows it, else by its own methods.
Place place_of(nb::handle tensor) {
    TensorView view;
    if (view_tensor(tensor.ptr(), view)) return {static_cast<std::byte*>(view.data), view.nbytes};
    const auto data = nb::cast<uintptr_t>(tensor.attr("data_ptr")());
    return {reinterpret_cast<std::byte*>(data), nb::cast<int64_t>(tensor.attr("nbytes"))};
}

// The line of the program that makes a call, as text that stays. Sites are few, so their texts are kept.
const char* text_of_site(uint32_t id) {
    static auto* texts = new std::unordered_map<uint32_t, std::string>;  // guarded by the GIL
    const auto found = texts->find(id);
    if (found != texts->end()) return found->second.c_str();
    const CallSite where = site(id);
    std::string text = where.file + ":" + std::to_string(where.line) + " in " + where.function;
    if (text.size() >= kTextBytes) text = "..." + text.substr(text.size() - (kTextBytes - 4));
    return texts->emplace(id, id == 0 ? std::string() : text).first->second.c_str();
}

nb::dict described(const CallFacts& facts) {
    nb::dict d;
    d["op"] = static_cast<int>(facts.op);
    d["dtype"] = static_cast<int>(facts.dtype);
    d["reduce"] = static_cast<int>(facts.reduce);
    d["root"] = facts.root;
    d["count"] = facts.count;
    d["number"] = facts.number;
    // Another process wrote it, and may have cut it in the middle of a character.
    d["place"] = nb::steal(PyUnicode_DecodeUTF8(
        facts.place, static_cast<Py_ssize_t>(strnlen(facts.place, kTextBytes)), "replace"));
    return d;
}

nb::object described(const Fault* fault) {
    if (fault == nullptr) return nb::none();
    nb::dict d;
    d["kind"] = static_cast<int>(fault->kind);
    d["reporter"] = fault->reporter;
    d["rank"] = fault->rank;
    d["pid"] = fault->pid;
    d["signal"] = fault->signal;
    d["bytes"] = fault->bytes;
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

class PyGroup;

// A call under way. Kept apart from the group, so that it outlives it.
struct PyTask {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<PythonCollective> collective;  // one of the two
    std::shared_ptr<PythonMessage> message;

    const Task& task() const { return collective ? static_cast<const Task&>(*collective) : *message; }
    Attachment& attachment() const { return collective ? collective->attachment : message->attachment; }

    // Whether it is done after at most so many seconds.
    bool wait(double timeout_s) const {
        GilHost host;
        const bool done = collective ? engine->progress.wait(*collective, timeout_s, host)
                                     : engine->messages.wait(*message, timeout_s, host);
        host.resume();
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        if (done) sweep();
        return done;
    }
    void sweep() const { collective ? engine->progress.sweep() : engine->messages.sweep(); }
};

class PyGroup {
  public:
    PyGroup(int fd, int rank, int size, const std::vector<int>& pids, const std::vector<int>& pidfds, int cpus,
            double timeout_s, nb::object raise)
        : timeout_s_(timeout_s), raise_(std::move(raise)) {
        std::vector<Peer> peers;
        for (size_t i = 0; i < pids.size(); ++i) peers.push_back({pids[i], pidfds[i]});
        auto mapping = std::make_shared<Mapping>(fd, size);
        engine_ = std::shared_ptr<Engine>(new Engine(std::move(mapping), rank, std::move(peers), cpus),
                                          &PyGroup::release);
    }

    // Threads that end may want the GIL, so it is not held while they are waited for.
    static void release(Engine* engine) {
        nb::gil_scoped_release gil;
        Engine::destroy(engine);
    }

    void close() {
        nb::gil_scoped_release gil;
        engine_->close();
    }
    void abort() {
        nb::gil_scoped_release gil;
        if (!engine_->members.forked()) engine_->members.abort();
        engine_->close();
    }

    nb::object fault() const { return described(engine_->members.fault()); }
    Engine& engine() { return *engine_; }
    double timeout_s() const { return timeout_s_; }
    void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }
    nb::handle raiser() const { return raise_; }

    // Runs on this thread what can run now; else queues it and waits. Raises what went wrong.
    void run(const Request& request, GilHost& host) {
        Outcome outcome;
        if (!engine_->progress.run_now(request, host, outcome)) outcome = run_in_turn(request, host);
        host.resume();
        check(outcome);
    }

    // Sends or receives, and waits. One that is interrupted is taken back, or would take what is meant for the next;
    // where it has begun to move, the group is over.
    void run(const std::shared_ptr<PythonMessage>& message) {
        PointToPoint& messages = engine_->messages;
        GilHost host;
        if (message->bytes >= kLarge) host.block();
        messages.start(message, false);
        const bool done = messages.wait(*message, 1e9, host);
        if (!done && !messages.withdraw(*message)) engine_->members.report_interrupted();
        host.resume();
        messages.sweep();
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        check(message->outcome());
    }

    void check(Outcome outcome) const {
        if (outcome == Outcome::Done) return;
        if (outcome == Outcome::Interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
        raise_(static_cast<int>(outcome), fault());
        throw std::logic_error("the fault was not raised");
    }

    PyTask submit(std::shared_ptr<PythonCollective> task) {
        PyTask handle{engine_, std::move(task), nullptr};
        engine_->progress.sweep();
        nb::gil_scoped_release gil;
        engine_->progress.submit(handle.collective);
        return handle;
    }

    PyTask start(std::shared_ptr<PythonMessage> message, bool in_background) {
        PyTask handle{engine_, nullptr, std::move(message)};
        engine_->messages.sweep();
        nb::gil_scoped_release gil;
        engine_->messages.start(handle.message, in_background);
        return handle;
    }

  private:
    // The caller's memory is used until the task is done, so an interrupted caller ends the group and waits.
    Outcome run_in_turn(const Request& request, GilHost& host) {
        auto task = std::make_shared<Collective>();
        task->request = request;
        host.block();
        engine_->progress.submit(task);
        if (engine_->progress.wait(*task, 1e9, host)) return task->outcome();
        engine_->members.report_interrupted();
        Host deaf;
        nb::gil_scoped_release gil;  // what is before the task may have to call back
        engine_->progress.wait(*task, 1e9, deaf);
        return Outcome::Interrupted;
    }

    std::shared_ptr<Engine> engine_;
    double timeout_s_;
    nb::object raise_;
};

// Everything about a call that is not memory.
struct CallOptions {
    int op, dtype, reduce, root;
    double factor, timeout_s;
    uint64_t number;

    void fill(Request& r) const {
        r.op = static_cast<Op>(op);
        r.dtype = static_cast<DType>(dtype);
        r.reduce = static_cast<Reduce>(reduce);
        r.root = root;
        r.factor = factor;
        r.timeout_s = timeout_s;
        r.number = number;
        r.site = current_site();
        r.place = text_of_site(r.site);
    }
};

// A group's blocks: those of the tensors in a list, or equal parts of a single one.
Blocks blocks_of(const std::vector<Place>& places, bool split, int size, std::vector<std::byte*>& list) {
    if (places.size() == 1) return {places[0].data, split ? places[0].bytes / size : 0, nullptr};
    for (const Place& place : places) list.push_back(place.data);
    return {nullptr, 0, list.data()};
}

std::vector<Place> places_of(const nb::sequence& tensors, Attachment& attachment) {
    std::vector<Place> places;
    for (nb::handle tensor : tensors) {
        places.push_back(place_of(tensor));
        attachment.keep(tensor);
    }
    return places;
}

// The pieces of one tensor that go to, or come from, each rank.
Blocks pieces_of(const Place& whole, const std::vector<int64_t>& bytes, std::vector<std::byte*>& list) {
    std::byte* at = whole.data;
    for (const int64_t piece : bytes) {
        list.push_back(at);
        at += piece;
    }
    return {nullptr, 0, list.data()};
}

std::vector<int64_t> sizes_of(const std::vector<Place>& places, const std::optional<std::vector<int64_t>>& splits,
                              int size) {
    if (splits) return *splits;
    std::vector<int64_t> sizes;
    if (places.size() == 1 && size != 1)
        sizes.assign(static_cast<size_t>(size), places[0].bytes / size);
    else
        for (const Place& place : places) sizes.push_back(place.bytes);
    return sizes;
}

// The elements that one rank contributes or gets.
int64_t block_bytes(Op op, const std::vector<Place>& in, const std::vector<Place>& out) {
    switch (op) {
        case Op::Barrier:
            return 0;
        case Op::Scatter:
        case Op::ReduceScatter:
        case Op::ReduceScatterSingle:
            return out[0].bytes;
        default:
            return in[0].bytes;
    }
}

using Splits = std::optional<std::vector<int64_t>>;

// Returns None when it is done, or a task when it is asynchronous.
nb::object collective(PyGroup& group, const nb::sequence& inputs, const nb::sequence& outputs, int op, int dtype,
                      int64_t element, int reduce, double factor, int root, const Splits& input_splits,
                      const Splits& output_splits, double timeout_s, uint64_t number, bool asynchronous) {
    auto task = std::make_shared<PythonCollective>();
    Request& r = task->request;
    CallOptions{op, dtype, reduce, root, factor, timeout_s, number}.fill(r);
    r.element = element;
    const int size = group.engine().members.size();
    const auto in = places_of(inputs, task->attachment);
    const auto out = places_of(outputs, task->attachment);
    if (r.op == Op::AllToAll || r.op == Op::AllToAllSingle) {
        task->send_bytes = sizes_of(in, input_splits, size);
        task->recv_bytes = sizes_of(out, output_splits, size);
        const bool lists = r.op == Op::AllToAll;
        r.in = lists ? blocks_of(in, false, size, task->in) : pieces_of(in[0], task->send_bytes, task->in);
        r.out = lists ? blocks_of(out, false, size, task->out) : pieces_of(out[0], task->recv_bytes, task->out);
        r.send_bytes = task->send_bytes.data();
        r.recv_bytes = task->recv_bytes.data();
        for (const int64_t bytes : task->send_bytes) r.count += bytes / element;
    } else {
        r.count = block_bytes(r.op, in, out) / element;
        r.in = blocks_of(in, r.op == Op::ReduceScatterSingle, size, task->in);
        r.out = blocks_of(out, r.op == Op::AllGatherSingle, size, task->out);
    }
    if (asynchronous) return nb::cast(group.submit(std::move(task)));
    GilHost host;
    if (r.count * element >= kLarge) host.block();
    group.run(r, host);
    return nb::none();
}

void fill(Message& message, Place place, Op op, DType dtype, int64_t element, int peer, int tag, double timeout_s,
          uint64_t number) {
    message.sends = op == Op::Send;
    message.peer = peer < 0 ? kAnyone : peer;
    message.tag = tag;
    message.data = place.data;
    message.bytes = place.bytes;
    message.timeout_s = timeout_s;
    CallFacts& facts = message.facts;
    facts.op = op;
    facts.dtype = dtype;
    facts.count = place.bytes / element;
    facts.root = peer;
    facts.number = number;
    std::strncpy(facts.place, text_of_site(current_site()), kTextBytes - 1);
}

nb::object message(PyGroup& group, nb::handle tensor, int op, int dtype, int64_t element, int peer, int tag,
                   double timeout_s, uint64_t number, bool asynchronous) {
    auto task = std::make_shared<PythonMessage>();
    task->attachment.keep(tensor);
    fill(*task, place_of(tensor), static_cast<Op>(op), static_cast<DType>(dtype), element, peer, tag, timeout_s, number);
    return nb::cast(group.start(std::move(task), asynchronous));
}

}  // namespace

#include "python/shm_quick.h"

void bind_shm(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const OutOfMemory& error) {
            PyErr_SetString(PyExc_MemoryError, error.what());
        }
    });
    m.def("shm_create_segment", &Segment::create, nb::arg("size"));
    m.attr("SHM_MAX_RANKS") = kMaxRanks;
    m.def("shm_isa", &reducer_isa);
    m.def("shm_can_reduce", [](int dtype, int reduce) {
        return find_reducer(static_cast<DType>(dtype), static_cast<Reduce>(reduce)) != nullptr;
    }, nb::arg("dtype"), nb::arg("reduce"));

    nb::class_<PyTask>(m, "ShmTask")
        .def("wait", &PyTask::wait, nb::arg("timeout"))
        .def("withdraw", [](const PyTask& self) {
            nb::gil_scoped_release gil;
            return self.message != nullptr && self.engine->messages.withdraw(*self.message);
        })
        .def("done", [](const PyTask& self) { return self.task().done(); })
        .def("outcome", [](const PyTask& self) { return static_cast<int>(self.task().outcome()); })
        .def("fault", [](const PyTask& self) { return described(self.engine->members.fault()); })
        .def("source", [](const PyTask& self) { return self.message ? self.message->source : -1; })
        .def("when_done", [](const PyTask& self, nb::object callback) {
            self.attachment().when_done(std::move(callback));
        }, nb::arg("callback"));

    nb::class_<PyGroup>(m, "ShmGroup")
        .def(nb::init<int, int, int, const std::vector<int>&, const std::vector<int>&, int, double, nb::object>(),
             nb::arg("fd"), nb::arg("rank"), nb::arg("size"), nb::arg("pids"), nb::arg("pidfds"), nb::arg("cpus"),
             nb::arg("timeout"), nb::arg("raise_outcome"))
        .def("collective", &collective, nb::arg("inputs"), nb::arg("outputs"), nb::arg("op"), nb::arg("dtype"),
             nb::arg("element"), nb::arg("reduce"), nb::arg("factor"), nb::arg("root"), nb::arg("input_splits").none(),
             nb::arg("output_splits").none(), nb::arg("timeout"), nb::arg("number"), nb::arg("asynchronous"))
        .def("message", &message, nb::arg("tensor"), nb::arg("op"), nb::arg("dtype"), nb::arg("element"),
             nb::arg("peer"), nb::arg("tag"), nb::arg("timeout"), nb::arg("number"), nb::arg("asynchronous"))
        .def("interrupted", [](PyGroup& self) { self.engine().members.report_interrupted(); })
        .def("set_timeout", &PyGroup::set_timeout, nb::arg("timeout"))
        .def("fault", &PyGroup::fault)
        .def("close", &PyGroup::close)
        .def("abort", &PyGroup::abort);

    nb::class_<Quick>(m, "ShmQuick")
        .def(nb::init<PyGroup&, Lane&, nb::dict>(), nb::arg("group"), nb::arg("lane"), nb::arg("profiler"),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("all_reduce", &Quick::all_reduce, nb::arg("tensor").none(), nb::arg("reduce"))
        .def("broadcast", &Quick::broadcast, nb::arg("tensor").none(), nb::arg("root"))
        .def("reduce", &Quick::reduce, nb::arg("tensor").none(), nb::arg("root"), nb::arg("reduce"))
        .def("all_gather", &Quick::all_gather_list, nb::arg("outputs").none(), nb::arg("input").none())
        .def("gather", &Quick::gather, nb::arg("input").none(), nb::arg("outputs").none(), nb::arg("root"))
        .def("scatter", &Quick::scatter, nb::arg("output").none(), nb::arg("inputs").none(), nb::arg("root"))
        .def("send", &Quick::send, nb::arg("tensor").none(), nb::arg("peer"), nb::arg("tag"), nb::arg("at_once"))
        .def("recv", &Quick::recv, nb::arg("tensor").none(), nb::arg("peer"), nb::arg("tag"))
        .def("all_gather_into_tensor", &Quick::all_gather, nb::arg("output").none(), nb::arg("input").none())
        .def("reduce_scatter", &Quick::reduce_scatter_list, nb::arg("output").none(), nb::arg("inputs").none(),
             nb::arg("reduce"))
        .def("reduce_scatter_tensor", &Quick::reduce_scatter, nb::arg("output").none(), nb::arg("input").none(),
             nb::arg("reduce"))
        .def("all_to_all_single", &Quick::all_to_all, nb::arg("output").none(), nb::arg("input").none())
        .def("barrier", &Quick::barrier)
        .def("serve", &Quick::serve, nb::arg("op"), nb::arg("least"), nb::arg("most"))
        .def("hold", &Quick::hold, nb::arg("change"));
}
