#include "record/record_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

namespace ringway {
namespace {

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 'w', 'a', 'y', 'R'};
constexpr uint32_t kLayout = 1;
constexpr size_t kTextRoom = 1 << 20;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "the ring is read by other processes");

size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
size_t header_bytes() { return whole_lines(sizeof(RecordHeader)); }

std::runtime_error failed(const std::string& what, const std::string& path) {
    return std::runtime_error("cannot " + what + " the recorder's file " + path + ": " + std::strerror(errno));
}

int64_t unix_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

}  // namespace

bool read_slot(const Slot& slot, uint64_t token, Entry& out) {
    if (slot.token.load(std::memory_order_acquire) != token) return false;
    out = slot.entry;
    out.state = static_cast<State>(slot.state.load(std::memory_order_acquire));
    out.completed_ns = slot.completed_ns.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    return slot.token.load(std::memory_order_relaxed) == token;
}

RecordFile::RecordFile(size_t capacity, const std::string& path)
    : capacity_(std::max<size_t>(capacity, 1)), text_bytes_(path.empty() ? 0 : kTextRoom) {
    bytes_ = header_bytes() + capacity_ * sizeof(Slot) + text_bytes_;
    int fd = -1;
    if (!path.empty()) {
        fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0) throw failed("create", path);
        // The room is taken now: a full disk is an error here, not a SIGBUS in the middle of a call.
        const int refused = posix_fallocate(fd, 0, static_cast<off_t>(bytes_));
        if (refused != 0) {
            ::close(fd);
            ::unlink(path.c_str());
            errno = refused;
            throw failed("make room for", path);
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
    header_->started_unix_ns = unix_ns();
    header_->started_ns = monotonic_ns();
    header_->next.store(1, std::memory_order_relaxed);
    slots_ = reinterpret_cast<Slot*>(static_cast<char*>(base_) + header_bytes());  // zeroes are empty slots
    texts_ = reinterpret_cast<char*>(slots_ + capacity_);
}

RecordFile::RecordFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw failed("open", path);
    struct stat facts {};
    fstat(fd, &facts);
    bytes_ = static_cast<size_t>(facts.st_size);
    void* base = bytes_ < header_bytes() ? MAP_FAILED : mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (base == MAP_FAILED) throw std::runtime_error(path + " is not a recorder's file");
    header_ = static_cast<RecordHeader*>(base);
    const size_t room = bytes_ - header_bytes();
    if (std::memcmp(header_->magic, kMagic, sizeof(kMagic)) != 0 || header_->layout != kLayout ||
        header_->slot_bytes != sizeof(Slot) || header_->capacity == 0 || header_->capacity > room / sizeof(Slot) ||
        header_->text_bytes != room - header_->capacity * sizeof(Slot)) {
        munmap(base, bytes_);
        throw std::runtime_error(path + " is not a recorder's file, or of another version");
    }
    base_ = base;
    capacity_ = header_->capacity;
    text_bytes_ = header_->text_bytes;
    slots_ = reinterpret_cast<Slot*>(static_cast<char*>(base) + header_bytes());
    texts_ = reinterpret_cast<char*>(slots_ + capacity_);
}

RecordFile::~RecordFile() {
    if (base_ != nullptr && base_ != MAP_FAILED) munmap(base_, bytes_);
}

void RecordFile::keep(TextKind kind, uint32_t id, int32_t line, const std::string& text) {
    const uint64_t used = header_->text_used.load(std::memory_order_relaxed);
    const size_t needed = sizeof(TextEntry) + (text.size() + 7) / 8 * 8;
    if (used + needed > text_bytes_) return;
    const TextEntry entry{kind, id, line, static_cast<uint32_t>(text.size())};
    std::memcpy(texts_ + used, &entry, sizeof(entry));
    std::memcpy(texts_ + used + sizeof(entry), text.data(), text.size());
    header_->text_used.store(used + needed, std::memory_order_release);
}

}  // namespace ringway
