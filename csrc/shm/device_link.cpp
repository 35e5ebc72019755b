#include "shm/device_link.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <shared_mutex>
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
constexpr int kThreadLocalMode = 1;            // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr double kDrainSeconds = 30;
constexpr double kReleaseSeconds = 5;
constexpr double kLeaveSeconds = 10;
constexpr double kLongest = 1e9;
// How long a call in flight may go on once a peer is gone: the peer may have done its part.
constexpr int64_t kGraceNs = 100'000'000;
constexpr auto kLook = std::chrono::milliseconds(1);
constexpr auto kLookReleasing = std::chrono::microseconds(200);
constexpr int kLooksPerFaultCheck = 10;
constexpr uint32_t kFarAhead = uint32_t{1} << 30;
constexpr int kLinger = 100;  // looks with nothing in flight before the thread sleeps

int numbered(const device::MemoryDriver& driver, int device) {
    int found = 0;
    driver.require(driver.device_get(&found, device), "cuDeviceGet");
    return found;
}

device::Context context_of(const device::MemoryDriver& driver, int device) {
    device::Context found = nullptr;
    driver.require(driver.primary_context(&found, device), "cuDevicePrimaryCtxRetain");
    return found;
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
      device_(numbered(driver_, device)),
      context_(context_of(driver_, device_)),
      words_(members_.segment().stream_words()),
      memory_(driver_, context_, rank_, size_, [this] { return drain(kDrainSeconds); }),
      blocks_(memory_, words_ + kMessageWords, rank_) {
    if (size_ > kDeviceRanks) throw std::runtime_error("a group of more than " + std::to_string(kDeviceRanks) + " ranks");
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
    // The latest call comes after all others. Messages are no part of that order.
    const auto last = std::find_if(in_flight_.rbegin(), in_flight_.rend(), [](const InFlight& each) { return !each.message; });
    if (last != in_flight_.rend() && last->stream != stream)
        driver_.require(driver_.wait_event(reinterpret_cast<Stream>(stream), last->event, 0), "cuStreamWaitEvent");
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
    watch_for(stream, facts, timeout_s, record, false);
}

// Follows a call or a message until the stream has passed it.
void DeviceLink::watch_for(uintptr_t stream, const CallFacts& facts, double timeout_s, std::optional<uint64_t> record,
                           bool message) {
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
        in_flight_.push_back({event, facts, now, now + static_cast<int64_t>(limit), stream, record, message});
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

bool DeviceLink::stage(uintptr_t stream, const Span& message, int receiver, Message::Reference& reference) {
    const std::shared_lock<std::shared_timed_mutex> in_use(closing_);
    require_open();
    const Entered entered(driver_, context_);
    const auto on = reinterpret_cast<Stream>(stream);
    // A copy that waits on the device for other work loses its turn there, for 200 µs.
    if (takes_turns()) driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
    const std::optional<Span> block = blocks_.take(message.bytes, receiver, reference);
    if (!block) return false;
    try {
        copy(stream, {{message, block->address}});
        driver_.require(driver_.synchronize_stream(on), "cuStreamSynchronize");
    } catch (...) {
        unstage(reference);
        throw;
    }
    return true;
}

void DeviceLink::unstage(const Message::Reference& reference) { blocks_.give_back(reference); }

void DeviceLink::fetch(uintptr_t stream, int sender, const Message::Reference& reference, const Span& message,
                       const CallFacts& facts, double timeout_s, std::optional<uint64_t> record) {
    const std::shared_lock<std::shared_timed_mutex> in_use(closing_);
    require_open();
    const MessageBlocks::Referred referred = MessageBlocks::read(reference);
    if (referred.region.bytes != message.bytes || referred.block >= MessageBlocks::kBlocks)
        throw std::runtime_error("rank " + std::to_string(sender) + " sent a reference to no memory");
    const Span from = memory_.open(sender, referred.region, true);
    const Entered entered(driver_, context_);
    copy(stream, {{from, message.address}});
    WordOperation taken = {device::kWriteWord, on_device(blocks_.taken(sender, referred.block)), referred.number, 0, 0, 0};
    operate(stream, &taken, 1);
    watch_for(stream, facts, timeout_s, record, true);
}

// A receiver that is alive still needs the messages that it has not taken. Whether none does any more.
bool DeviceLink::wait_until_taken() {
    const auto waits = [this](int receiver) {
        return !members_.faulted() && !members_.has_left(receiver) && !members_.has_ended(receiver);
    };
    const int64_t until = now_ns() + static_cast<int64_t>(kLeaveSeconds * 1e9);
    while (blocks_.any_sent(waits)) {
        if (now_ns() > until) return false;
        std::this_thread::sleep_for(kLook);
    }
    return true;
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
    bounced_on_ = stream;
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
    bool calls_wait = false;  // for an earlier one; messages end in any order
    for (auto each = in_flight_.begin(); each != in_flight_.end();) {
        const Status status = calls_wait && !each->message ? device::kNotReady : driver_.event_query(each->event);
        if (status == device::kNotReady) {
            calls_wait |= !each->message;
            ++each;
            continue;
        }
        // An error of the device counts as an end: nothing on it will pass any more.
        if (status != kSuccess && each->record) members_.abort();
        if (each->record) record_->end(*each->record, members_.faulted() ? State::Failed : State::Completed);
        spare_.push_back(each->event);
        each = in_flight_.erase(each);
    }
    if (any && in_flight_.empty()) passed_.notify_all();
}

// Asks about the first call in flight: later ones wait for it, and messages wait for no rank. Its event stays in place
// without the lock, because only this thread takes it away.
void DeviceLink::look_for_faults(std::unique_lock<std::mutex>& guard) {
    const auto call = std::find_if(in_flight_.begin(), in_flight_.end(), [](const InFlight& each) { return !each.message; });
    if (call == in_flight_.end()) {
        guard.unlock();
        for (int peer = 0; peer < size_; ++peer)
            if (peer != rank_ && !members_.has_left(peer) && members_.has_ended(peer))
                members_.stop(peer, true, CallFacts{}, Look{[](const void*) { return false; }, nullptr});
        guard.lock();
        return;
    }
    const InFlight first = *call;
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
    if (!closing_.try_lock_for(std::chrono::duration<double>(kDrainSeconds))) {
        members_.abort();  // a stream that a message waits for waits for others, which will not come
        closing_.lock();
    }
    closing_.unlock();
    const bool taken = wait_until_taken();
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
    if (!drained || !taken) return;  // the memory is still in use: it is given back when the process ends
    memory_.close();
    const Entered entered(driver_, context_);
    const Relaxed relaxed(driver_);
    driver_.unregister_host(words_);
    for (const device::Event event : spare_) driver_.event_destroy(event);
}

}  // namespace ringway::shm
