#include "record/ledger.h"

#include <algorithm>

namespace ringway {
namespace {

constexpr size_t kMaxKinds = 2048;
constexpr size_t kMaxArrivals = 16384;

int highest_bit(uint64_t value) { return 63 - __builtin_clzll(value); }

int bucket_of(int64_t ns) {
    const auto value = static_cast<uint64_t>(std::max<int64_t>(ns, 0));
    if (value < 8) return static_cast<int>(value);
    const int top = highest_bit(value);
    const int bucket = (top - 2) * 8 + static_cast<int>((value >> (top - 3)) & 7);
    return std::min(bucket, Histogram::kBuckets - 1);
}

// The middle of a bucket.
int64_t value_of(int bucket) {
    if (bucket < 8) return bucket;
    const int top = bucket / 8 + 2;
    const int64_t width = int64_t{1} << (top - 3);
    return (8 + bucket % 8) * width + width / 2;
}

}  // namespace

void Histogram::add(int64_t ns) {
    ++count;
    total_ns += ns;
    max_ns = std::max(max_ns, ns);
    ++buckets_[bucket_of(ns)];
}

int64_t Histogram::percentile(double share) const {
    const auto wanted = static_cast<uint64_t>(share * static_cast<double>(count));
    uint64_t seen = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
        seen += buckets_[bucket];
        if (seen > wanted) return std::min(value_of(bucket), max_ns);
    }
    return max_ns;
}

size_t Ledger::KindHash::operator()(const Kind& kind) const {
    uint64_t hash = static_cast<uint64_t>(kind.bytes) * 0x9E3779B97F4A7C15u;
    hash ^= (static_cast<uint64_t>(kind.op) << 56) ^ (static_cast<uint64_t>(kind.label) << 32) ^
            (static_cast<uint64_t>(kind.site) << 16) ^ static_cast<uint64_t>(kind.size);
    return static_cast<size_t>(hash * 0xD6E8FEB86659FD93u >> 7);
}

void Ledger::choose(LedgerChoice choice) {
    std::lock_guard<std::mutex> guard(lock_);
    choice_ = std::move(choice);
    if (choice_.enabled && arrivals_.empty()) arrivals_.resize(kMaxArrivals);
    enabled_.store(choice_.enabled, std::memory_order_relaxed);
}

bool Ledger::chosen(uint8_t op, uint32_t label) const {
    if (!choice_.enabled) return false;
    if (choice_.all || (op < 64 && (choice_.ops >> op & 1) != 0)) return true;
    return label != 0 && choice_.labels.count(label) != 0;
}

void Ledger::add(const Entry& call) {
    const auto op = static_cast<uint8_t>(call.op);
    std::lock_guard<std::mutex> guard(lock_);
    if (!choice_.enabled || !(call.profiled || chosen(op, call.label))) return;
    add_locked({op, call.label, choice_.by_caller ? call.site : 0, call.size, call.bytes},
               call.completed_ns - (call.started_ns != 0 ? call.started_ns : call.issued_ns));
    if (!is_point_to_point(call.op)) arrivals_[arrived_++ % kMaxArrivals] = call;
}

void Ledger::add(const Kind& kind, int64_t ns, bool always) {
    std::lock_guard<std::mutex> guard(lock_);
    if (always || chosen(kind.op, kind.label)) add_locked(kind, ns);
}

void Ledger::add_locked(Kind kind, int64_t ns) {
    auto found = books_.find(kind);
    if (found == books_.end() && books_.size() >= kMaxKinds) {
        // The program keeps using new sizes or labels: from now on round sizes down to powers of two and drop labels.
        kind.label = kind.op == kUserOp ? kind.label : 0;
        kind.site = 0;
        if (kind.bytes > 0) kind.bytes = int64_t{1} << highest_bit(static_cast<uint64_t>(kind.bytes));
        found = books_.find(kind);
        if (found == books_.end() && books_.size() >= 2 * kMaxKinds) return;
    }
    if (found == books_.end()) found = books_.emplace(kind, std::make_unique<Histogram>()).first;
    found->second->add(ns);
}

std::vector<Ledger::Row> Ledger::rows() const {
    std::lock_guard<std::mutex> guard(lock_);
    std::vector<Row> rows;
    rows.reserve(books_.size());
    for (const auto& [kind, book] : books_)
        rows.push_back({kind, book->count, book->total_ns, book->max_ns, book->percentile(0.5),
                        book->percentile(0.99)});
    return rows;
}

std::vector<Entry> Ledger::arrivals() const {
    std::lock_guard<std::mutex> guard(lock_);
    const uint64_t kept = std::min<uint64_t>(arrived_, arrivals_.size());
    std::vector<Entry> latest;
    latest.reserve(kept);
    for (uint64_t at = arrived_ - kept; at < arrived_; ++at) latest.push_back(arrivals_[at % kMaxArrivals]);
    return latest;
}

void Ledger::reset() {
    std::lock_guard<std::mutex> guard(lock_);
    books_.clear();
    arrived_ = 0;
}

}  // namespace ringway
