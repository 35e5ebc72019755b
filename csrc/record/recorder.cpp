#include "record/recorder.h"

#include <time.h>

#include <utility>

#include "record/callsite.h"

namespace ringway {
namespace {

constexpr uint32_t kMaxLabels = 16384;
constexpr uint32_t kMaxTexts = kMaxLabels + 65536;  // the rest is for the names of groups
constexpr uint32_t kNoRoom = UINT32_MAX;            // shows as "…"
// Every call reads them. This model needs no function call for that, unlike the default one of shared libraries.
__attribute__((tls_model("initial-exec"))) thread_local bool quiet_here = false;
__attribute__((tls_model("initial-exec"))) thread_local bool profiled_here = false;

}  // namespace

int64_t monotonic_ns() {
#if defined(__aarch64__)
    // The counter behind the kernel's monotonic clock, the same for all processes of a host. Reading it directly takes a
    // third of the time; it only lacks the kernel's slow adjustments of its rate.
    static const uint64_t scale = [] {
        uint64_t frequency;
        asm("mrs %0, cntfrq_el0" : "=r"(frequency));
        return (uint64_t{1000000000} << 32) / frequency;
    }();
    uint64_t ticks;
    asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return static_cast<int64_t>((static_cast<unsigned __int128>(ticks) * scale) >> 32);
#else
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
#endif
}

void set_quiet(bool quiet) { quiet_here = quiet; }
bool is_quiet() { return quiet_here; }
void set_profiled(bool profiled) { profiled_here = profiled; }
bool is_profiled() { return profiled_here; }

Recorder::Recorder(size_t capacity, const std::string& path) : file_(capacity, path) {
    texts_.emplace_back();  // id 0 is the empty text
    text_ids_.emplace("", 0);
}

uint64_t Recorder::begin(const Entry& call) {
    const uint64_t token = file_.header().next.fetch_add(1, std::memory_order_relaxed);
    if (file_.keeps_texts() && call.site >= sites_kept_.load(std::memory_order_relaxed)) keep_site(call.site);
    Slot& slot = file_.slot(token);
    slot.token.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    slot.entry = call;
    slot.entry.token = token;
    slot.entry.issued_ns = monotonic_ns();
    slot.completed_ns.store(0, std::memory_order_relaxed);
    slot.started_ns.store(0, std::memory_order_relaxed);
    slot.stream.store(0, std::memory_order_relaxed);
    slot.beside.store(0, std::memory_order_relaxed);
    slot.state.store(static_cast<uint8_t>(State::Issued), std::memory_order_relaxed);
    slot.token.store(token, std::memory_order_release);
    return token;
}

void Recorder::end(uint64_t token, State state, const DeviceTimes& times) {
    Slot& slot = file_.slot(token);
    if (slot.token.load(std::memory_order_relaxed) != token) return;  // the ring has wrapped since
    slot.completed_ns.store(times.completed_ns != 0 ? times.completed_ns : monotonic_ns(), std::memory_order_relaxed);
    if (times.started_ns != 0) {
        slot.started_ns.store(times.started_ns, std::memory_order_relaxed);
        slot.stream.store(times.stream, std::memory_order_relaxed);
        slot.beside.store(times.beside ? 1 : 0, std::memory_order_relaxed);
    }
    slot.state.store(static_cast<uint8_t>(state), std::memory_order_release);
    const bool logged = ledger_.enabled() && state == State::Completed;
    const bool traced = tracing_.load(std::memory_order_relaxed);
    Entry entry;
    if ((!logged && !traced) || !read_slot(slot, token, entry) || entry.quiet) return;
    if (logged) ledger_.add(entry);
    if (!traced) return;
    std::lock_guard<std::mutex> guard(trace_lock_);
    if (trace_.calls.size() < trace_limit_)
        trace_.calls.push_back(entry);
    else
        ++trace_.dropped;
}

void Recorder::start_trace(size_t limit) {
    std::lock_guard<std::mutex> guard(trace_lock_);
    trace_ = Trace{};
    trace_limit_ = limit;
    tracing_.store(true, std::memory_order_relaxed);
}

Recorder::Trace Recorder::stop_trace() {
    std::lock_guard<std::mutex> guard(trace_lock_);
    tracing_.store(false, std::memory_order_relaxed);
    return std::exchange(trace_, Trace{});
}

bool Recorder::find(uint64_t token, Entry& out) const { return read_slot(file_.slot(token), token, out); }

uint32_t Recorder::intern(const std::string& text) {
    std::lock_guard<std::mutex> guard(texts_lock_);
    const auto found = text_ids_.find(text);
    if (found != text_ids_.end()) return found->second;
    if (text_ids_.size() >= kMaxLabels || texts_.size() >= kMaxTexts) return kNoRoom;
    return text_ids_.emplace(text, add_text(text)).first->second;
}

uint32_t Recorder::add_text(const std::string& text) {
    const auto id = static_cast<uint32_t>(texts_.size());
    texts_.push_back(text);
    file_.keep(TextKind::Text, id, 0, text);
    return id;
}

uint32_t Recorder::group(const std::string& name) {
    std::lock_guard<std::mutex> guard(texts_lock_);
    if (texts_.size() >= kMaxTexts) return kNoRoom;
    Life& life = groups_[name];
    if (life.number > 0) {
        texts_[life.id] = name + "~" + std::to_string(life.number);
        file_.keep(TextKind::Text, life.id, 0, texts_[life.id]);
    }
    life = {add_text(name), life.number + 1};
    return life.id;
}

std::string Recorder::text(uint32_t id) const {
    std::lock_guard<std::mutex> guard(texts_lock_);
    return id < texts_.size() ? texts_[id] : "…";
}

// Sites are numbered in the order in which they are found, so the file is complete once it has all up to the newest.
void Recorder::keep_site(uint32_t newest) {
    std::lock_guard<std::mutex> guard(texts_lock_);
    for (uint32_t id = sites_kept_.load(std::memory_order_relaxed); id <= newest; ++id) {
        const CallSite& where = *site(id);
        file_.keep(TextKind::Site, id, where.line, where.file + "\n" + where.function);
        sites_kept_.store(id + 1, std::memory_order_relaxed);
    }
}

}  // namespace ringway
