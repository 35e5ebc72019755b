#include "shm/device_link.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace ringway::shm {
namespace {

using device::Entered;
using device::kSuccess;
using device::Status;
using device::Stream;
using device::WordOperation;

constexpr unsigned kDisableTiming = 2;         // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortableAndMapped = 3;     // CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
constexpr unsigned kPortable = 1;              // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kLazyPeerAccess = 1;        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kThreadLocalMode = 1;            // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr int kRelaxedMode = 2;                // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr size_t kChecksPerOffer = 4;
constexpr double kDrainSeconds = 30;
constexpr double kReleaseSeconds = 5;
constexpr double kLeaveSeconds = 10;
constexpr double kLongest = 1e9;
constexpr int64_t kLeastBlock = 2 << 20;
constexpr int64_t kMostStaged = int64_t{4} << 30;
// How long a call in flight may go on once a peer is gone: the peer may have done its part.
constexpr int64_t kGraceNs = 100'000'000;
constexpr auto kLook = std::chrono::milliseconds(1);
constexpr auto kLookReleasing = std::chrono::microseconds(200);
constexpr int kLooksPerFaultCheck = 10;
constexpr uint32_t kFarAhead = uint32_t{1} << 30;
constexpr int kLinger = 100;  // looks with nothing in flight before the thread sleeps

// Calls that a capturing thread may make although they are no part of the graph.
class Relaxed {
  public:
    explicit Relaxed(const device::Driver& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
    ~Relaxed() { driver_.exchange_capture_mode(&mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

  private:
    const device::Driver& driver_;
    int mode_ = kRelaxedMode;
};

bool same(const device::IpcHandle& one, const device::IpcHandle& other) {
    return std::memcmp(one.bytes, other.bytes, sizeof one.bytes) == 0;
}

}  // namespace

DeviceLink::DeviceLink(std::shared_ptr<Engine> engine, const std::string& library, int device, GroupRecord* record,
                       LaunchOrder& order)
    : engine_(std::move(engine)),
      members_(engine_->members),
      rank_(members_.rank()),
      size_(members_.size()),
      record_(record),
      order_(order),
      index_(device),
      driver_(library),
      words_(members_.segment().stream_words()),
      opened_(static_cast<size_t>(size_), std::vector<Opened>(kSlots)) {
    if (size_ > kDeviceRanks) throw std::runtime_error("a group of more than " + std::to_string(kDeviceRanks) + " ranks");
    driver_.require(driver_.device_get(&device_, device), "cuDeviceGet");
    driver_.require(driver_.primary_context(&context_, device_), "cuDevicePrimaryCtxRetain");
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    driver_.require(driver_.register_host(words_, kStreamWordBytes, kPortableAndMapped), "cuMemHostRegister");
    const Status status = driver_.device_pointer(&words_on_device_, words_, 0);
    if (status != kSuccess) driver_.unregister_host(words_);
    driver_.require(status, "cuMemHostGetDevicePointer");
}

// A call that another thread still makes uses the bounce memory, so that is freed with the last reference, not by `close`.
DeviceLink::~DeviceLink() {
    close();
    if (bounce_ == nullptr || members_.forked()) return;
    const Entered entered(driver_, context_);
    driver_.synchronize_event(bounced_);
    driver_.free_host(bounce_);
}

bool DeviceLink::has_mps() const {
    int enabled = 0;
    return driver_.device_attribute(&enabled, device::kMpsEnabled, device_) == kSuccess && enabled != 0;
}

std::string DeviceLink::uuid() const {
    unsigned char bytes[16] = {};
    driver_.require(driver_.device_uuid(bytes, device_), "cuDeviceGetUuid");
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const unsigned char byte : bytes) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

// Memory

size_t DeviceLink::offer_bytes() { return sizeof(Offer); }

int64_t DeviceLink::offered(const std::byte* offer, size_t bytes, int place) {
    if (bytes != sizeof(Offer) || place < 0 || place >= kDeviceRanks) throw std::invalid_argument("not an offer");
    Offer copy;
    std::memcpy(&copy, offer, sizeof copy);
    return copy.regions[place].bytes;
}

bool DeviceLink::still_there(const Slot& slot) const {
    uint64_t id = 0;
    return driver_.pointer_attribute(&id, device::kBufferId, slot.base) == kSuccess && id == slot.id;
}

// Looks at some slots in turn: the allocator may have given their memory back to the driver.
void DeviceLink::forget_freed() {
    for (size_t i = 0; i < kChecksPerOffer; ++i) {
        Slot& slot = slots_[checked_++ % kSlots];
        if (slot.id != 0 && !still_there(slot)) slot = {};
    }
}

// The slot of the allocation that holds the span, or -1 if it cannot be shared.
int DeviceLink::slot_of(const Span& span, uint64_t& offset) {
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
DeviceLink::Region DeviceLink::region_of(const Span& span, bool keep) {
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

std::vector<std::byte> DeviceLink::offer(const std::vector<Span>& spans, bool keep, int& refused) {
    if (spans.size() > kDeviceRanks) throw std::invalid_argument("too many spans");
    const std::lock_guard<std::mutex> guard(memory_);
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
void DeviceLink::close_mapping(Opened& opened) {
    if (opened.base == 0 || opened.keep) return;
    if (!drain(kDrainSeconds)) return;
    driver_.ipc_close(opened.base);
    opened = {};
}

std::vector<DeviceLink::Span> DeviceLink::accept(const std::byte* offers, size_t bytes, const std::vector<Wanted>& wanted,
                                                 bool keep) {
    if (bytes != sizeof(Offer) * static_cast<size_t>(size_)) throw std::invalid_argument("not an offer of every rank");
    const std::lock_guard<std::mutex> guard(memory_);
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
        spans.push_back(empty ? Span{} : open(peer, region, keep));
    }
    return spans;
}

// Maps a region of another rank.
DeviceLink::Span DeviceLink::open(int peer, const Region& region, bool keep) {
    Opened& opened = opened_[static_cast<size_t>(peer)][static_cast<size_t>(region.slot)];
    if (opened.base != 0 && !same(opened.handle, region.handle)) {
        opened.keep = false;
        close_mapping(opened);
    }
    if (opened.base == 0) {
        opened.handle = region.handle;
        driver_.require(driver_.ipc_open(&opened.base, region.handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
    }
    opened.keep |= keep;
    return {opened.base + region.offset, region.bytes};
}

uint64_t DeviceLink::allocate(size_t bytes) {
    const std::lock_guard<std::mutex> guard(memory_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    uint64_t address = 0;
    driver_.require(driver_.allocate(&address, bytes), "cuMemAlloc");
    allocated_.push_back(address);
    return address;
}

void DeviceLink::free(uint64_t address) {
    const std::lock_guard<std::mutex> guard(memory_);
    const auto found = std::find(allocated_.begin(), allocated_.end(), address);
    if (found == allocated_.end()) return;
    allocated_.erase(found);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    driver_.free(address);
}

int DeviceLink::open_mappings() {
    const std::lock_guard<std::mutex> guard(memory_);
    int count = 0;
    for (const auto& peer : opened_)
        for (const Opened& opened : peer) count += opened.base != 0;
    return count;
}

// Order

bool DeviceLink::is_capturing(uintptr_t stream) const {
    const Entered entered(driver_, context_);
    int capturing = 0;
    return driver_.is_capturing(reinterpret_cast<Stream>(stream), &capturing) == kSuccess && capturing != 0;
}

void DeviceLink::follow(uintptr_t stream) {
    if (is_capturing(stream)) return;
    const Entered entered(driver_, context_);
    const std::lock_guard<std::mutex> guard(lock_);
    if (!in_flight_.empty() && in_flight_.back().stream != stream)
        driver_.require(driver_.wait_event(reinterpret_cast<Stream>(stream), in_flight_.back().event, 0), "cuStreamWaitEvent");
}

void DeviceLink::operate(uintptr_t stream, WordOperation* operations, unsigned count) {
    driver_.require(driver_.operate_on_words(reinterpret_cast<Stream>(stream), count, operations, 0), "cuStreamBatchMemOp");
}

void DeviceLink::signal(uintptr_t stream, int phase, int worker) {
    if (is_capturing(stream)) return signal_captured(stream, phase);
    const bool begins = phase == 0;
    if (begins) ++number_;
    const auto waits_for = [&](int peer) {
        if (peer == rank_) return false;
        return worker == kEveryRank || worker == (begins ? rank_ : peer);
    };
    WordOperation operations[1 + kDeviceRanks] = {};
    unsigned count = 0;
    // Written on every call, even if nobody waits for it: the words must not stay behind by half of their range.
    operations[count++] = {device::kWriteWord, on_device(reached(phase, rank_)), number_, 0, 0, 0};
    for (int peer = 0; peer < size_; ++peer) {
        if (!waits_for(peer)) continue;
        operations[count++] = {device::kWaitForWord, on_device(reached(phase, peer)), number_, device::kUntilReached, 0, 0};
    }
    operate(stream, operations, count);
}

void DeviceLink::signal_captured(uintptr_t stream, int phase) {
    WordOperation operations[3 * kDeviceRanks] = {};
    unsigned count = 0;
    for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_) operations[count++] = {device::kWriteWord, on_device(word(phase, rank_, peer)), 1, 0, 0, 0};
    for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        operations[count++] = {device::kWaitForWord, on_device(word(phase, peer, rank_)), 1, device::kUntilEqual, 0, 0};
        operations[count++] = {device::kWriteWord, on_device(word(phase, peer, rank_)), 0, 0, 0, 0};
    }
    operate(stream, operations, count);
}

void DeviceLink::require_open() const {
    if (closed_) throw std::runtime_error("the group was closed by another thread");
}

void DeviceLink::arrive(uintptr_t stream, int worker) {
    require_open();
    const Entered entered(driver_, context_);
    signal(stream, 0, worker);
}

void DeviceLink::copy(uintptr_t stream, const std::vector<Copy>& copies) {
    const Entered entered(driver_, context_);
    for (const auto& [from, to] : copies)
        if (from.bytes > 0 && from.address != to)
            driver_.require(driver_.copy_async(to, from.address, static_cast<size_t>(from.bytes),
                                               reinterpret_cast<Stream>(stream)),
                            "cuMemcpyDtoDAsync");
}

// The kernel has 8 addresses of inputs, 8 of outputs and the count as arguments. Triton adds pointers to scratch memory,
// which these kernels do not use; arguments beyond a kernel's own are ignored.
void DeviceLink::launch(uintptr_t stream, const Kernel& kernel, const std::vector<uint64_t>& ins,
                        const std::vector<uint64_t>& outs, int64_t count) {
    constexpr size_t kScratch = 2;
    if (count == 0) return;
    uint64_t arguments[2 * kDeviceRanks + 1 + kScratch] = {};
    void* parameters[std::size(arguments)];
    for (size_t i = 0; i < kDeviceRanks; ++i) {
        arguments[i] = ins[i < ins.size() ? i : 0];
        arguments[kDeviceRanks + i] = outs[i < outs.size() ? i : 0];
    }
    arguments[2 * kDeviceRanks] = static_cast<uint64_t>(count);
    for (size_t i = 0; i < std::size(arguments); ++i) parameters[i] = &arguments[i];
    const Entered entered(driver_, context_);
    const auto programs = static_cast<unsigned>((count + kernel.block - 1) / kernel.block);
    driver_.require(driver_.launch_kernel(kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes,
                                          reinterpret_cast<Stream>(stream), parameters, nullptr),
                    "cuLaunchKernel");
}

void DeviceLink::depart(uintptr_t stream, int worker, const CallFacts& facts, double timeout_s, const std::vector<Copy>& copies,
                      std::optional<uint64_t> record) {
    const Entered entered(driver_, context_);
    signal(stream, 1, worker);
    copy(stream, copies);
    watch_for(stream, facts, timeout_s, record);
}

// Follows a call until the stream has passed it.
void DeviceLink::watch_for(uintptr_t stream, const CallFacts& facts, double timeout_s, std::optional<uint64_t> record) {
    const auto on = reinterpret_cast<Stream>(stream);
    const bool captured = is_capturing(stream);
    std::lock_guard<std::mutex> guard(lock_);
    require_open();
    if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
    if (captured) {
        captured_ = true;
    } else {
        const int64_t now = now_ns();
        const double limit = std::min(timeout_s, kLongest) * 1e9;
        const device::Event event = take_event();
        const Status status = driver_.event_record(event, on);
        if (status != kSuccess) spare_.push_back(event);
        driver_.require(status, "cuEventRecord");
        in_flight_.push_back({event, facts, now, now + static_cast<int64_t>(limit), stream, record});
    }
    if (asleep_) changed_.notify_all();
}

device::Event DeviceLink::take_event() {
    if (spare_.empty()) {
        device::Event event = nullptr;
        driver_.require(driver_.event_create(&event, kDisableTiming), "cuEventCreate");
        return event;
    }
    const device::Event event = spare_.back();
    spare_.pop_back();
    return event;
}

// Messages

bool DeviceLink::is_taken(size_t block) const {
    const Block& given = blocks_[block];
    return given.receiver < 0 || reinterpret_cast<std::atomic<uint32_t>&>(taken(rank_, block)).load() == given.number;
}

// The smallest block that is free and large enough, or a new one.
std::optional<size_t> DeviceLink::free_block(int64_t bytes) {
    std::optional<size_t> best;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        const int64_t room = blocks_[i].memory.bytes;
        if (room >= bytes && (!best || room < blocks_[*best].memory.bytes) && is_taken(i)) best = i;
    }
    if (best || blocks_.size() == kBlocks) return best;
    int64_t room = kLeastBlock;
    while (room < bytes) room *= 2;
    if (staged_bytes_ + room > kMostStaged) return {};
    uint64_t address = 0;
    if (driver_.allocate(&address, static_cast<size_t>(room)) != kSuccess) return {};
    allocated_.push_back(address);
    staged_bytes_ += room;
    blocks_.push_back({{address, room}});
    return blocks_.size() - 1;
}

bool DeviceLink::stage(uintptr_t stream, const Span& message, int receiver, Message::Reference& reference) {
    if (message.bytes > kMostStaged) return false;
    const Entered entered(driver_, context_);
    const auto on = reinterpret_cast<Stream>(stream);
    // A copy that waits on the device for other work loses its turn there, for 200 µs.
    if (takes_turns()) driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
    Referred referred{};
    {
        const std::lock_guard<std::mutex> guard(memory_);
        require_open();
        const std::optional<size_t> block = free_block(message.bytes);
        if (!block) return false;
        Block& into = blocks_[*block];
        referred = {region_of({into.memory.address, message.bytes}, true), static_cast<uint32_t>(*block), messages_ + 1};
        if (referred.region.slot < 0) return false;
        driver_.require(driver_.copy_async(into.memory.address, message.address, static_cast<size_t>(message.bytes), on),
                        "cuMemcpyDtoDAsync");
        ++messages_;
        into.number = referred.number;
        into.receiver = receiver;
    }
    std::memcpy(reference.data(), &referred, sizeof referred);
    const Status status = driver_.synchronize_stream(on);
    if (status != kSuccess) unstage(reference);
    driver_.require(status, "cuStreamSynchronize");
    return true;
}

void DeviceLink::unstage(const Message::Reference& reference) {
    Referred referred;
    std::memcpy(&referred, reference.data(), sizeof referred);
    const std::lock_guard<std::mutex> guard(memory_);
    blocks_.at(referred.block).receiver = -1;
}

void DeviceLink::fetch(uintptr_t stream, int sender, const Message::Reference& reference, const Span& message,
                       const CallFacts& facts, double timeout_s, std::optional<uint64_t> record) {
    Referred referred;
    std::memcpy(&referred, reference.data(), sizeof referred);
    const Region& region = referred.region;
    const bool sound = region.slot >= 0 && region.slot < kSlots && region.bytes == message.bytes && referred.block < kBlocks;
    if (!sound) throw std::runtime_error("rank " + std::to_string(sender) + " sent a reference to no memory");
    const Entered entered(driver_, context_);
    Span from;
    {
        const std::lock_guard<std::mutex> guard(memory_);
        require_open();
        from = open(sender, region, true);
    }
    copy(stream, {{from, message.address}});
    WordOperation taken_now = {device::kWriteWord, on_device(taken(sender, referred.block)), referred.number, 0, 0, 0};
    operate(stream, &taken_now, 1);
    watch_for(stream, facts, timeout_s, record);
}

// A receiver that is alive still needs the messages that it has not taken.
void DeviceLink::wait_until_taken() {
    const auto needed = [this](size_t block) {
        const std::lock_guard<std::mutex> guard(memory_);
        if (block >= blocks_.size() || is_taken(block) || members_.faulted()) return false;
        const int receiver = blocks_[block].receiver;
        return !members_.has_left(receiver) && !members_.has_ended(receiver);
    };
    const int64_t until = now_ns() + static_cast<int64_t>(kLeaveSeconds * 1e9);
    for (size_t block = 0; block < kBlocks; ++block)
        while (needed(block) && now_ns() < until) std::this_thread::sleep_for(kLook);
}

// Through the host

bool DeviceLink::takes_turns() {
    if (!takes_turns_) takes_turns_ = !has_mps();
    return *takes_turns_;
}

// False while the stream captures a graph.
bool DeviceLink::can_bounce(uintptr_t stream) {
    if (is_capturing(stream)) return false;
    if (bounce_ != nullptr) return true;
    const Entered entered(driver_, context_);
    void* memory = nullptr;
    if (driver_.event_create(&bounced_, kDisableTiming) != kSuccess) return false;
    if (driver_.allocate_host(&memory, 2 * kBounceBytes, kPortable) != kSuccess) return false;
    bounce_ = static_cast<std::byte*>(memory);
    bounced_on_ = stream;
    return true;
}

void DeviceLink::download(uintptr_t stream, uint64_t from, int64_t bytes) {
    const Entered entered(driver_, context_);
    // On the same stream the copy comes after the last upload anyway.
    if (stream != std::exchange(bounced_on_, stream))
        driver_.require(driver_.synchronize_event(bounced_), "cuEventSynchronize");
    const auto on = reinterpret_cast<Stream>(stream);
    // A copy that waits on the device for other work loses its turn there, for 200 µs.
    if (takes_turns()) driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
    if (bytes > 0)
        driver_.require(driver_.download_async(bounce_in(), from, static_cast<size_t>(bytes), on), "cuMemcpyDtoHAsync");
    driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
}

void DeviceLink::upload(uintptr_t stream, uint64_t to, int64_t bytes) {
    const Entered entered(driver_, context_);
    const auto on = reinterpret_cast<Stream>(stream);
    if (bytes > 0)
        driver_.require(driver_.upload_async(to, bounce_out(), static_cast<size_t>(bytes), on), "cuMemcpyHtoDAsync");
    driver_.require(driver_.event_record(bounced_, on), "cuEventRecord");
}

void DeviceLink::wait_for_upload() {
    const Entered entered(driver_, context_);
    driver_.require(driver_.synchronize_event(bounced_), "cuEventSynchronize");
}

void DeviceLink::upload_from(uintptr_t stream, uint64_t to, const std::byte* from, int64_t bytes) {
    const Entered entered(driver_, context_);
    const auto on = reinterpret_cast<Stream>(stream);
    driver_.require(driver_.upload_async(to, from, static_cast<size_t>(bytes), on), "cuMemcpyHtoDAsync");
    driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
}

// The calls in flight

void DeviceLink::watch() {
    int mode = kThreadLocalMode;
    driver_.exchange_capture_mode(&mode);
    driver_.set_current(context_);
    std::unique_lock<std::mutex> guard(lock_);
    int idle = 0, looks = 0;
    while (!stopping_) {
        look_for_ended();
        const bool over = members_.faulted();
        if (over) release();
        if (in_flight_.empty() && !captured_ && ++idle > kLinger) {
            asleep_ = true;
            changed_.wait(guard, [&] { return stopping_ || captured_ || !in_flight_.empty(); });
            asleep_ = false;
            continue;
        }
        if (!in_flight_.empty() || captured_) idle = 0;
        if (!over && ++looks % kLooksPerFaultCheck == 0) look_for_faults(guard);
        changed_.wait_for(guard, over ? std::chrono::microseconds(kLookReleasing) : std::chrono::microseconds(kLook));
    }
}

void DeviceLink::look_for_ended() {
    const bool any = !in_flight_.empty();
    // An error of the device counts as an end: nothing on it will pass any more.
    while (!in_flight_.empty()) {
        const InFlight& ended = in_flight_.front();
        const Status status = driver_.event_query(ended.event);
        if (status == device::kNotReady) break;
        if (status != kSuccess && ended.record) members_.abort();
        if (ended.record) record_->end(*ended.record, members_.faulted() ? State::Failed : State::Completed);
        spare_.push_back(ended.event);
        in_flight_.pop_front();
    }
    if (any && in_flight_.empty()) passed_.notify_all();
}

// Asks about the first call in flight: later ones wait for it. Its event stays in place without the lock, because only this
// thread takes it away.
void DeviceLink::look_for_faults(std::unique_lock<std::mutex>& guard) {
    if (in_flight_.empty()) {
        guard.unlock();
        for (int peer = 0; peer < size_; ++peer)
            if (peer != rank_ && !members_.has_left(peer) && members_.has_ended(peer))
                members_.stop(peer, true, CallFacts{}, Look{[](const void*) { return false; }, nullptr});
        guard.lock();
        return;
    }
    const InFlight first = in_flight_.front();
    guard.unlock();
    struct Asked {
        const DeviceLink* link;
        device::Event event;
    } const asked{this, first.event};
    const Look passes{[](const void* what) {
                          const auto& asked = *static_cast<const Asked*>(what);
                          const int64_t until = now_ns() + kGraceNs;
                          for (;;) {
                              if (asked.link->driver_.event_query(asked.event) != device::kNotReady) return true;
                              if (now_ns() > until) return false;
                              std::this_thread::sleep_for(kLook);
                          }
                      },
                      &asked};
    for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_ && members_.stop(peer, true, first.facts, passes)) break;
    const int64_t now = now_ns();
    if (now > first.deadline_ns && driver_.event_query(first.event) == device::kNotReady) {
        std::vector<int> others;
        for (int peer = 0; peer < size_; ++peer)
            if (peer != rank_) others.push_back(peer);
        members_.report_timeout(first.facts, static_cast<double>(now - first.since_ns) / 1e9, others);
    }
    guard.lock();
}

void DeviceLink::release() {
    const auto write = [](uint32_t& word, uint32_t value) { reinterpret_cast<std::atomic<uint32_t>&>(word).store(value); };
    for (int phase = 0; phase < 2; ++phase)
        for (int peer = 0; peer < size_; ++peer) {
            if (peer == rank_) continue;
            write(word(phase, peer, rank_), 1);
            write(reached(phase, peer), number_ + kFarAhead);  // other ranks may be ahead of this one
        }
}

bool DeviceLink::drain(double seconds) {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.notify_all();
    return passed_.wait_for(guard, std::chrono::duration<double>(seconds), [this] { return in_flight_.empty(); });
}

void DeviceLink::close() {
    if (members_.forked() || closed_.exchange(true)) return;
    wait_until_taken();
    bool drained = drain(kDrainSeconds);
    if (!drained) {
        members_.abort();  // the streams of this rank wait for others, which will not come
        drained = drain(kReleaseSeconds);
    }
    {
        const std::lock_guard<std::mutex> guard(lock_);
        stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (const InFlight& left : in_flight_)
        if (left.record) record_->end(*left.record, State::Failed);
    in_flight_.clear();
    if (!drained) return;  // the device still uses the memory: it is given back when the process ends
    const std::lock_guard<std::mutex> guard(memory_);
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    for (auto& peer : opened_)
        for (Opened& opened : peer)
            if (opened.base != 0) driver_.ipc_close(std::exchange(opened.base, 0));
    for (const uint64_t address : allocated_) driver_.free(address);
    allocated_.clear();
    driver_.unregister_host(words_);
    for (const device::Event event : spare_) driver_.event_destroy(event);
}

}  // namespace ringway::shm
