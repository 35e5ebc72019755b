#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "python/shm_call.h"
#include "python/shm_device_path.h"
#include "python/shm_group.h"
#include "shm/device_link.h"

namespace nb = nanobind;
using namespace ringway;
using namespace ringway::shm;
using Release = nb::call_guard<GilRelease>;
using PySpan = std::pair<uint64_t, int64_t>;  // address and bytes

namespace {

using PyCopies = std::vector<std::tuple<uint64_t, uint64_t, int64_t>>;  // to, from, bytes

std::vector<DeviceLink::Copy> copies_of(const PyCopies& given) {
    std::vector<DeviceLink::Copy> copies;
    for (const auto& [to, from, bytes] : given) copies.push_back({{from, bytes}, to});
    return copies;
}

Message::Reference reference_of(const nb::bytes& given) {
    Message::Reference reference{};
    if (given.size() != reference.size()) throw std::invalid_argument("not a reference");
    std::memcpy(reference.data(), given.data(), reference.size());
    return reference;
}

}  // namespace

void bind_shm_device(nb::module_& m) {
    m.attr("SHM_DEVICE_RANKS") = kDeviceRanks;
    m.attr("SHM_DIRECT") = kDirect;
    m.attr("SHM_EVERY_RANK") = DeviceLink::kEveryRank;
    nb::class_<LaunchOrder>(m, "LaunchOrder").def(nb::init<>());
    nb::class_<DeviceLink>(m, "ShmDevice")
        .def("__init__", [](DeviceLink* self, PyGroup& group, const std::string& library, int device, GroupRecord* record,
                            LaunchOrder& order) {
            new (self) DeviceLink(group.shared_engine(), library, device, record, order);
        }, nb::arg("group"), nb::arg("library"), nb::arg("device"), nb::arg("record").none(), nb::arg("order"),
             nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
        .def_prop_ro("has_mps", &DeviceLink::has_mps)
        .def_prop_ro("uuid", &DeviceLink::uuid)
        .def_prop_ro("device_index", &DeviceLink::device_index)
        .def_prop_ro("open_mappings", [](DeviceLink& self) { return self.memory().open_mappings(); })
        .def_static("offer_bytes", &DeviceMemory::offer_bytes)
        .def_static("offered", [](nb::bytes offer, int place) {
            return DeviceMemory::offered(static_cast<const std::byte*>(offer.data()), offer.size(), place);
        }, nb::arg("offer"), nb::arg("place"))
        .def("offer", [](DeviceLink& self, const std::vector<PySpan>& given, bool keep) -> nb::object {
            std::vector<Span> spans;
            for (const auto& [address, bytes] : given) spans.push_back({address, bytes});
            int refused = -1;
            const std::vector<std::byte> offer = self.memory().offer(spans, keep, refused);
            return refused >= 0 ? nb::object(nb::int_(refused)) : nb::object(nb::bytes(offer.data(), offer.size()));
        }, nb::arg("spans"), nb::arg("keep"))
        .def("accept", [](DeviceLink& self, nb::bytes offers, const std::vector<DeviceMemory::Wanted>& wanted, bool keep) {
            std::vector<Span> spans;
            {
                const auto* from = static_cast<const std::byte*>(offers.data());
                const size_t bytes = offers.size();
                GilRelease gil;
                spans = self.memory().accept(from, bytes, wanted, keep);
            }
            std::vector<PySpan> found;
            for (const Span& span : spans) found.emplace_back(span.address, span.bytes);
            return found;
        }, nb::arg("offers"), nb::arg("wanted"), nb::arg("keep"))
        .def("enter", [](DeviceLink& self) { return self.order().enter(&self); })
        .def("wait_for_earlier", [](DeviceLink& self, uint64_t place, double seconds) {
            return self.order().wait_for_earlier(place, seconds);
        }, nb::arg("place"), nb::arg("seconds"), Release())
        .def("leave", [](DeviceLink& self, uint64_t place) { self.order().leave(place); }, nb::arg("place"))
        .def("follow", &DeviceLink::follow, nb::arg("stream"))
        .def("arrive", &DeviceLink::arrive, nb::arg("stream"), nb::arg("worker"))
        .def("copy", [](DeviceLink& self, uintptr_t stream, const PyCopies& copies) {
            self.copy(stream, copies_of(copies));
        }, nb::arg("stream"), nb::arg("copies"))
        .def("depart", [](DeviceLink& self, uintptr_t stream, int worker, nb::handle call, int64_t count, double timeout_s,
                        const PyCopies& copies) {
            self.depart(stream, worker, facts_of(call, count), timeout_s, copies_of(copies));
        }, nb::arg("stream"), nb::arg("worker"), nb::arg("call"), nb::arg("count"), nb::arg("timeout"), nb::arg("copies"))
        .def("send", [](DeviceLink& self, PyGroup& group, nb::handle call, double timeout_s, uintptr_t stream, PySpan memory,
                        int receiver) -> nb::object {
            Message::Reference reference{};
            {
                GilRelease gil;
                if (!self.stage(stream, {memory.first, memory.second}, receiver, reference)) return nb::none();
            }
            try {
                return nb::cast(message(group, call, timeout_s, nb::bytes(reference.data(), reference.size()), nb::none()));
            } catch (...) {
                self.unstage(reference);
                throw;
            }
        }, nb::arg("group"), nb::arg("call"), nb::arg("timeout"), nb::arg("stream"), nb::arg("memory"), nb::arg("receiver"))
        .def("fetch", [](DeviceLink& self, uintptr_t stream, int sender, nb::bytes given, PySpan message, nb::handle call,
                         int64_t count, double timeout_s) {
            const Message::Reference reference = reference_of(given);
            const CallFacts facts = facts_of(call, count);
            GilRelease gil;
            self.fetch(stream, sender, reference, {message.first, message.second}, facts, timeout_s);
        }, nb::arg("stream"), nb::arg("sender"), nb::arg("reference"), nb::arg("message"), nb::arg("call"), nb::arg("count"),
             nb::arg("timeout"))
        .def("allocate", [](DeviceLink& self, size_t bytes) { return self.memory().allocate(bytes); }, nb::arg("bytes"),
             Release())
        .def("free", [](DeviceLink& self, uint64_t address) { self.memory().free(address); }, nb::arg("address"), Release())
        .def("drain", &DeviceLink::drain, nb::arg("seconds"), Release())
        .def("close", &DeviceLink::close, Release());

    nb::class_<DeviceFastPath, FastPath>(m, "ShmDeviceFastPath")
        .def(nb::init<PyGroup&, GroupRecord&, int, nb::dict, nb::object, nb::object>(), nb::arg("group"), nb::arg("record"),
             nb::arg("kind"), nb::arg("profiler"), nb::arg("stream_of"), nb::arg("kernel_of"), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>())
        .def("attach", [](DeviceFastPath& self, nb::object link, std::vector<int64_t> direct_from, bool reduces,
                          bool takes_turns, bool one_gpu) {
            self.attach(std::move(link), {std::move(direct_from), reduces, takes_turns, one_gpu});
        }, nb::arg("link").none(), nb::arg("direct_from"), nb::arg("reduces"), nb::arg("takes_turns"), nb::arg("one_gpu"));
}
