#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cgroup.h"
#include "python/shm_call.h"
#include "python/shm_fast_path.h"
#include "python/shm_group.h"
#include "shm/peer_memory.h"

namespace nb = nanobind;
using namespace ringway;
using namespace ringway::shm;
using Release = nb::call_guard<GilRelease>;

void bind_shm(nb::module_& m) {
    m.def("shm_set_read_once_from", &set_read_once_from, nb::arg("bytes"));
    m.def("shm_bytes_read_once", &bytes_read_once);
    m.def("shm_create_segment", &Segment::create, nb::arg("size"));
    m.def("memory_left", [](const std::string& root) {
        const MemoryLeft left = memory_left(root);
        return nb::make_tuple(left.bytes, left.limited_by);
    }, nb::arg("root") = "");
    m.def("cpu_quota", [](const std::string& root) {
        const auto quota = cpu_quota(root);
        return quota ? nb::object(nb::make_tuple(quota->cgroup, quota->cpus)) : nb::object(nb::none());
    }, nb::arg("root") = "");
    m.attr("SHM_MAX_RANKS") = kMaxRanks;
    m.def("shm_isa", &reducer_isa);
    m.def("shm_can_reduce", [](int dtype, int reduce) {
        return find_reducer(static_cast<DType>(dtype), static_cast<Reduce>(reduce)) != nullptr;
    }, nb::arg("dtype"), nb::arg("reduce"));

    nb::class_<PyTask>(m, "ShmTask")
        .def("wait", &PyTask::wait, nb::arg("timeout"))
        .def("withdraw", [](const PyTask& self) {
            return self.message != nullptr && self.engine->messages.withdraw(*self.message);
        }, Release())
        .def("done", [](const PyTask& self) { return self.task().done(); })
        .def("outcome", [](const PyTask& self) { return static_cast<int>(self.task().outcome()); })
        .def("fault", [](const PyTask& self) { return described(self.engine->members.fault()); })
        .def("seen", [](const PyTask& self) {
            const std::vector<std::byte>& seen = self.collective->seen;
            return nb::bytes(seen.data(), seen.size());
        })
        .def("message", [](const PyTask& self) {
            const Message& message = *self.message;
            return nb::make_tuple(message.sends, message.peer, message.tag, message.facts.number);
        })
        .def("source", [](const PyTask& self) { return self.message ? self.message->source : -1; })
        .def("reference", [](const PyTask& self) -> nb::object {
            const Message& message = *self.message;
            if (!message.by_reference) return nb::none();
            return nb::bytes(message.reference.data(), message.reference.size());
        })
        .def("owned", [](const PyTask& self) -> nb::object {
            const Message& message = *self.message;
            if (message.owned == nullptr) return nb::none();
            return nb::bytes(message.owned.get(), static_cast<size_t>(message.bytes));
        })
        .def("when_done", [](const PyTask& self, nb::object callback) {
            self.attachment().when_done(std::move(callback));
        }, nb::arg("callback"));

    nb::class_<PyPeer>(m, "ShmPeer", nb::is_weak_referenceable())
        .def("__init__", [](PyPeer* self, int pid, int pidfd) {
            new (self) PyPeer{std::make_shared<const Peer>(pid, pidfd)};
        }, nb::arg("pid"), nb::arg("pidfd"))
        .def_prop_ro("pid", [](const PyPeer& self) { return self.peer->pid; })
        .def_prop_ro("pidfd", [](const PyPeer& self) { return self.peer->pidfd; });

    nb::class_<PyGroup>(m, "ShmGroup")
        .def(nb::init<int, int, const std::vector<PyPeer>&, int, double, nb::object>(), nb::arg("fd"), nb::arg("rank"),
             nb::arg("peers"), nb::arg("cpus"), nb::arg("timeout"), nb::arg("raise_outcome"))
        .def("collective", &collective, nb::arg("call"), nb::arg("timeout"))
        .def("show", &show, nb::arg("call"), nb::arg("timeout"), nb::arg("count"), nb::arg("shown"), nb::arg("manner"))
        .def("message", &message, nb::arg("call"), nb::arg("timeout"), nb::arg("reference").none() = nb::none(),
             nb::arg("room").none() = nb::none())
        .def("differ", [](PyGroup& self, nb::handle call, int64_t count, int source, int target, int64_t sent,
                          int64_t expected) { differ(self, facts_of(call, count), source, target, sent, expected); },
             nb::arg("call"), nb::arg("count"), nb::arg("source"), nb::arg("target"), nb::arg("sent"), nb::arg("expected"))
        .def("interrupted", [](PyGroup& self) { self.engine().members.report_interrupted(); })
        .def("fail", &PyGroup::fail)
        .def("set_timeout", &PyGroup::set_timeout, nb::arg("timeout"))
        .def("fault", &PyGroup::fault)
        .def("close", &PyGroup::close, Release())
        .def("abort", &PyGroup::abort, Release());

    nb::class_<ShmFastPath, FastPath>(m, "ShmFastPath")
        .def(nb::init<PyGroup&, GroupRecord&, nb::dict, nb::object, nb::object, nb::object>(), nb::arg("group"),
             nb::arg("record"), nb::arg("profiler"), nb::arg("work"), nb::arg("sent"), nb::arg("failed"),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
}
