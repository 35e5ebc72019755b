#include "record/record_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace ringway {
namespace {

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 'w', 'a', 'y', 'R'};
constexpr uint32_t kLayout = 2;
constexpr size_t kTextRoom = 1 << 20;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "the ring is read by other processes");

constexpr size_t kHeaderBytes = (sizeof(RecordHeader) + 63) / 64 * 64;

// One entry of the texts: `length` bytes follow, padded to eight. A site's line is in `line`.
struct TextEntry {
    TextKind kind;
    uint32_t id;
    int32_t line;
    uint32_t length;
};

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

std::runtime_error failed(const std::string& what, const std::string& path) {
    return std::runtime_error("cannot " + what + " the recorder's file " + path + ": " + std::strerror(errno));
}

bool put_in_place(const std::string& aside, const std::string& path) {
    struct stat facts {};
    const bool exists = lstat(path.c_str(), &facts) == 0;
    if (exists && S_ISDIR(facts.st_mode)) {
        errno = EISDIR;
        return false;
    }
    if (exists && std::rename(path.c_str(), (path + ".previous").c_str()) != 0 && errno != ENOENT) return false;
    return std::rename(aside.c_str(), path.c_str()) == 0;
}

}  // namespace

bool read_slot(const Slot& slot, uint64_t token, Entry& out) {
    if (slot.token.load(std::memory_order_acquire) != token) return false;
    out = slot.entry;
    out.state = static_cast<State>(slot.state.load(std::memory_order_acquire));
    out.completed_ns = slot.completed_ns.load(std::memory_order_relaxed);
    out.started_ns = slot.started_ns.load(std::memory_order_relaxed);
    out.stream = slot.stream.load(std::memory_order_relaxed);
    out.beside = slot.beside.load(std::memory_order_relaxed) != 0;
    std::atomic_thread_fence(std::memory_order_acquire);
    return slot.token.load(std::memory_order_relaxed) == token;
}

RecordFile::RecordFile(size_t capacity, const std::string& path)
    : capacity_(std::max<size_t>(capacity, 1)), text_bytes_(path.empty() ? 0 : kTextRoom) {
    bytes_ = kHeaderBytes + capacity_ * sizeof(Slot) + text_bytes_;
    int fd = -1;
    if (!path.empty()) {
        std::string aside = path + ".XXXXXX";
        fd = mkostemp(&aside[0], O_CLOEXEC);
        if (fd < 0) throw failed("create", path);
        // Reserve the room now: a full disk is then an error here, not a SIGBUS in the middle of a call.
        errno = posix_fallocate(fd, 0, static_cast<off_t>(bytes_));
        const char* const failure = errno != 0 ? "make room for" : put_in_place(aside, path) ? nullptr : "create";
        if (failure != nullptr) {
            const int why = errno;
            ::close(fd);
            ::unlink(aside.c_str());
            errno = why;
            throw failed(failure, path);
        }
    }
    const int flags = path.empty() ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) ::close(fd);
    if (base_ == MAP_FAILED) throw failed("map", path.empty() ? "(memory)" : path);
    header_ = new (base_) RecordHeader{};
    std::memcpy(header_->magic, kMagic, sizeof(kMagic));
    header_->layout = kLayout;
    header_->slot_bytes = sizeof(Slot);
    header_->capacity = capacity_;
    header_->text_bytes = text_bytes_;
    header_->pid = getpid();
    header_->started_unix_ns = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
    header_->started_ns = monotonic_ns();
    header_->next.store(1, std::memory_order_relaxed);
    slots_ = reinterpret_cast<Slot*>(static_cast<char*>(base_) + kHeaderBytes);  // zeroes are empty slots
    texts_ = reinterpret_cast<char*>(slots_ + capacity_);
}

RecordFile::RecordFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw failed("open", path);
    struct stat facts {};
    fstat(fd, &facts);
    bytes_ = static_cast<size_t>(facts.st_size);
    void* base = bytes_ < kHeaderBytes ? MAP_FAILED : mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (base == MAP_FAILED) throw std::runtime_error(path + " is not a recorder's file");
    header_ = static_cast<RecordHeader*>(base);
    const size_t room = bytes_ - kHeaderBytes;
    if (std::memcmp(header_->magic, kMagic, sizeof(kMagic)) != 0 || header_->layout != kLayout ||
        header_->slot_bytes != sizeof(Slot) || header_->next == 0 || header_->capacity == 0 || header_->capacity > room / sizeof(Slot) ||
        header_->text_bytes != room - header_->capacity * sizeof(Slot)) {
        munmap(base, bytes_);
        throw std::runtime_error(path + " is not a recorder's file, or of another version");
    }
    base_ = base;
    capacity_ = header_->capacity;
    text_bytes_ = header_->text_bytes;
    slots_ = reinterpret_cast<Slot*>(static_cast<char*>(base) + kHeaderBytes);
    texts_ = reinterpret_cast<char*>(slots_ + capacity_);
}

RecordFile::~RecordFile() {
    if (base_ != nullptr && base_ != MAP_FAILED) munmap(base_, bytes_);
}

void RecordFile::keep(TextKind kind, uint32_t id, int32_t line, const std::string& text) {
    const uint64_t used = header_->text_used.load(std::memory_order_relaxed);
    const size_t needed = sizeof(TextEntry) + padded(text.size());
    if (used + needed > text_bytes_) return;
    const TextEntry entry{kind, id, line, static_cast<uint32_t>(text.size())};
    std::memcpy(texts_ + used, &entry, sizeof(entry));
    std::memcpy(texts_ + used + sizeof(entry), text.data(), text.size());
    header_->text_used.store(used + needed, std::memory_order_release);
}

Texts RecordFile::texts() const {
    Texts found;
    const uint64_t used = std::min<uint64_t>(header_->text_used.load(std::memory_order_acquire), text_bytes_);
    for (uint64_t at = 0; at + sizeof(TextEntry) <= used;) {
        TextEntry entry;
        std::memcpy(&entry, texts_ + at, sizeof(entry));
        at += sizeof(entry);
        if (entry.length > used - at) break;
        const std::string text(texts_ + at, entry.length);
        at += padded(entry.length);
        const size_t cut = text.find('\n');
        if (entry.kind == TextKind::Text)
            found.texts[entry.id] = text;
        else
            found.sites[entry.id] = {text.substr(0, cut), text.substr(cut + 1), entry.line};
    }
    return found;
}

std::vector<Entry> RecordFile::recent(size_t count, bool only_pending) const {
    const uint64_t last = total();
    const uint64_t kept = std::min<uint64_t>({count, last, capacity_});
    std::vector<Entry> entries;
    if (!only_pending) entries.reserve(kept);
    Entry entry;
    for (uint64_t i = 0; i < kept; ++i) {
        const uint64_t token = last - kept + 1 + i;
        const auto ended = [&](State state) { return only_pending && state != State::Issued; };
        if (ended(static_cast<State>(slot(token).state.load(std::memory_order_relaxed)))) continue;
        if (read_slot(slot(token), token, entry) && !ended(entry.state)) entries.push_back(entry);
    }
    return entries;
}

}  // namespace ringway
