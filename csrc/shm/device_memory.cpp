#include "shm/device_memory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ringway::shm {

using device::Entered;
using device::kSuccess;

namespace {

constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kRelaxedMode = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr size_t kChecksPerOffer = 4;

bool same(const device::IpcHandle& one, const device::IpcHandle& other) {
    return std::memcmp(one.bytes, other.bytes, sizeof one.bytes) == 0;
}

}  // namespace

Relaxed::Relaxed(const device::Driver& driver) : driver_(driver), mode_(kRelaxedMode) {
    driver_.exchange_capture_mode(&mode_);
}

Relaxed::~Relaxed() { driver_.exchange_capture_mode(&mode_); }

DeviceMemory::DeviceMemory(const device::MemoryDriver& driver, device::Context context, int rank, int size,
                           std::function<bool()> drain)
    : driver_(driver),
      context_(context),
      rank_(rank),
      size_(size),
      drain_(std::move(drain)),
      opened_(static_cast<size_t>(size), std::vector<Opened>(kSlots)) {}

size_t DeviceMemory::offer_bytes() { return sizeof(Offer); }

int64_t DeviceMemory::offered(const std::byte* offer, size_t bytes, int place) {
    if (bytes != sizeof(Offer) || place < 0 || place >= kDeviceRanks) throw std::invalid_argument("not an offer");
    Offer copy;
    std::memcpy(&copy, offer, sizeof copy);
    return copy.regions[place].bytes;
}

bool DeviceMemory::still_there(const Slot& slot) const {
    uint64_t id = 0;
    return driver_.pointer_attribute(&id, device::kBufferId, slot.base) == kSuccess && id == slot.id;
}

// Looks at some slots in turn: the allocator may have given their memory back to the driver.
void DeviceMemory::forget_freed() {
    for (size_t i = 0; i < kChecksPerOffer; ++i) {
        Slot& slot = slots_[checked_++ % kSlots];
        if (slot.id != 0 && !still_there(slot)) slot = {};
    }
}

// The slot of the allocation that holds the span, or -1 if it cannot be shared.
int DeviceMemory::slot_of(const Span& span, uint64_t& offset) {
    uint64_t base = 0, id = 0;
    size_t size = 0;
    if (driver_.address_range(&base, &size, span.address) != kSuccess) return -1;
    if (span.address + static_cast<uint64_t>(span.bytes) > base + size) return -1;
    if (driver_.pointer_attribute(&id, device::kBufferId, base) != kSuccess || id == 0) return -1;
    offset = span.address - base;
    for (size_t i = 0; i < kSlots; ++i)
        if (slots_[i].id == id) return static_cast<int>(i);
    Slot made;
    made.id = id;
    made.base = base;
    if (driver_.ipc_get(&made.handle, base) != kSuccess) return -1;
    Slot* least = nullptr;
    for (Slot& slot : slots_)
        if (!slot.keep && (least == nullptr || slot.used < least->used)) least = &slot;
    if (least == nullptr) return -1;
    *least = made;
    return static_cast<int>(least - slots_.data());
}

// Its slot is -1 if it cannot be shared.
DeviceMemory::Region DeviceMemory::region_of(const Span& span, bool keep) {
    Region region{};
    region.slot = slot_of(span, region.offset);
    if (region.slot < 0) return region;
    Slot& slot = slots_[static_cast<size_t>(region.slot)];
    slot.used = ++uses_;
    slot.keep |= keep;
    region.bytes = span.bytes;
    region.handle = slot.handle;
    return region;
}

std::vector<std::byte> DeviceMemory::offer(const std::vector<Span>& spans, bool keep, int& refused) {
    if (spans.size() > kDeviceRanks) throw std::invalid_argument("too many spans");
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    forget_freed();
    Offer offer{};
    for (Region& region : offer.regions) region.slot = -1;
    refused = -1;
    for (size_t i = 0; i < spans.size(); ++i) {
        if (spans[i].bytes == 0) continue;
        offer.regions[i] = region_of(spans[i], keep);
        if (offer.regions[i].slot >= 0) continue;
        refused = static_cast<int>(i);
        return {};
    }
    for (size_t i = 0; i < kSlots; ++i) offer.live |= uint64_t{slots_[i].id != 0} << i;
    const auto* from = reinterpret_cast<const std::byte*>(&offer);
    return {from, from + sizeof offer};
}

// Kernels in flight may use the mapping. If they do not end, it stays open.
void DeviceMemory::close_mapping(Opened& opened) {
    if (opened.base == 0 || opened.keep) return;
    if (!drain_()) return;
    driver_.ipc_close(opened.base);
    opened = {};
}

std::vector<Span> DeviceMemory::accept(const std::byte* offers, size_t bytes, const std::vector<Wanted>& wanted,
                                                 bool keep) {
    if (bytes != sizeof(Offer) * static_cast<size_t>(size_)) throw std::invalid_argument("not an offer of every rank");
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    Offer offer;
    for (int peer = 0; peer < size_; ++peer) {
        std::memcpy(&offer, offers + sizeof offer * static_cast<size_t>(peer), sizeof offer);
        for (size_t i = 0; i < kSlots; ++i) {
            Opened& opened = opened_[static_cast<size_t>(peer)][i];
            if (opened.base != 0 && ((offer.live >> i) & 1) == 0) close_mapping(opened);
        }
    }
    std::vector<Span> spans;
    for (const auto& [peer, place] : wanted) {
        if (peer < 0 || peer >= size_ || peer == rank_ || place < 0 || place >= kDeviceRanks)
            throw std::invalid_argument("no such span");
        std::memcpy(&offer, offers + sizeof offer * static_cast<size_t>(peer), sizeof offer);
        const Region& region = offer.regions[place];
        const bool empty = region.slot < 0 || region.slot >= kSlots;
        spans.push_back(empty ? Span{} : mapped(peer, region, keep));
    }
    return spans;
}

// Maps a region of another rank.
Span DeviceMemory::mapped(int peer, const Region& region, bool keep) {
    Opened& opened = opened_[static_cast<size_t>(peer)][static_cast<size_t>(region.slot)];
    if (opened.base != 0 && !same(opened.handle, region.handle)) {
        opened.keep = false;
        close_mapping(opened);
        if (opened.base != 0) throw std::runtime_error("the device still uses memory that a peer has freed");
    }
    if (opened.base == 0) {
        opened.handle = region.handle;
        driver_.require(driver_.ipc_open(&opened.base, region.handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
    }
    opened.keep |= keep;
    return {opened.base + region.offset, region.bytes};
}

DeviceMemory::Region DeviceMemory::show(const Span& span, bool keep) {
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    return region_of(span, keep);
}

Span DeviceMemory::open(int peer, const Region& region, bool keep) {
    if (peer < 0 || peer >= size_ || peer == rank_ || region.slot < 0 || region.slot >= kSlots)
        throw std::runtime_error("rank " + std::to_string(peer) + " shows no memory");
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    return mapped(peer, region, keep);
}

uint64_t DeviceMemory::allocate(size_t bytes) {
    const uint64_t address = try_allocate(bytes);
    if (address == 0) throw std::runtime_error("cuMemAlloc: no " + std::to_string(bytes) + " bytes of device memory");
    return address;
}

uint64_t DeviceMemory::try_allocate(size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    uint64_t address = 0;
    if (driver_.allocate(&address, bytes) != kSuccess) return 0;
    allocated_.push_back(address);
    return address;
}

void DeviceMemory::free(uint64_t address) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = std::find(allocated_.begin(), allocated_.end(), address);
    if (found == allocated_.end()) return;
    allocated_.erase(found);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    driver_.free(address);
}

int DeviceMemory::open_mappings() {
    const std::lock_guard<std::mutex> guard(lock_);
    int count = 0;
    for (const auto& peer : opened_)
        for (const Opened& opened : peer) count += opened.base != 0;
    return count;
}

void DeviceMemory::close() {
    const std::lock_guard<std::mutex> guard(lock_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    for (auto& peer : opened_)
        for (Opened& opened : peer)
            if (opened.base != 0) driver_.ipc_close(std::exchange(opened.base, 0));
    for (const uint64_t address : allocated_) driver_.free(address);
    allocated_.clear();
}

}  // namespace ringway::shm
