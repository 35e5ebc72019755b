#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cgroup.h"

namespace ringway::shm {
namespace {

constexpr uint64_t kMagic = 0x79617767'6e697200;  // "\0ringway" in memory
constexpr size_t kPage = 4096;
constexpr size_t kSpare = 2 << 20;  // for what else a call needs, page tables for example

// The most and the least bytes of each buffer, and what all buffers of a kind may take together. The least has priority:
// it is what the algorithms need, a line for each rank.
constexpr size_t kMostEntry = 64 << 10, kAllEntries = 8 << 20;
constexpr size_t kCellOfARank = 64 << 10, kLeastCell = 128 << 10, kMostCell = 512 << 10, kAllCells = 32 << 20;
constexpr size_t kMostRing = 1024 << 10, kLeastRing = 16 << 10, kAllRings = 64 << 20;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// The size of each of `count` buffers: `most`, halved until all of them fit `all`.
size_t share(size_t most, size_t least, size_t all, size_t count) {
    size_t bytes = most;
    while (bytes / 2 >= least && bytes * count > all) bytes /= 2;
    return bytes;
}

OutOfMemory out_of_memory(const std::string& what, size_t bytes, int error) {
    return OutOfMemory("could not " + what + ": " + std::strerror(error), static_cast<int64_t>(bytes));
}

std::string a_segment_of(size_t bytes) { return "a shared segment of " + std::to_string(bytes) + " bytes"; }

// Allocates the pages now, so that a later write cannot fail. Asks first whether there is memory for `all`, the bytes that
// this rank and others are about to take: where a control group is full, the kernel does not refuse but kills.
void allocate(int fd, size_t offset, size_t bytes, const std::string& purpose, size_t all) {
    const MemoryLeft left = memory_left();
    if (left.bytes < static_cast<int64_t>(all + kSpare))
        throw OutOfMemory("could not reserve " + std::to_string(all) + " bytes of shared memory for " + purpose + ": only " +
                              std::to_string(left.bytes) + " bytes are left " + left.limited_by,
                          static_cast<int64_t>(all));
    int error;
    do {
        error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0)
        throw out_of_memory("reserve " + std::to_string(bytes) + " bytes of shared memory for " + purpose, bytes, error);
}

}  // namespace

Geometry::Geometry(int size) {
    const auto ranks = static_cast<size_t>(size);
    entry_bytes = share(kMostEntry, kLine * ranks, kAllEntries, ranks * kEntrySlots);
    cell_bytes = share(std::clamp(kCellOfARank * ranks, kLeastCell, kMostCell), kLine * ranks, kAllCells, ranks * kCells);
    out_bytes = round_up(cell_bytes / ranks, cell_bytes / ranks < kPage ? kLine : kPage);
    ring_bytes = share(kMostRing, kLeastRing, kAllRings, ranks * ranks);
    rings_at = round_up(sizeof(Header), kPage);
    fronts_at = round_up(rings_at + ranks * ranks * sizeof(RingControl), kPage);
    front_bytes = Segment::kEntriesAt + kEntrySlots * entry_bytes;
    words_at = fronts_at + ranks * front_bytes;
    cells_at = words_at + kStreamWordBytes;
    cells_bytes = round_up(kCells * (cell_bytes + out_bytes), kPage);
    ring_data_at = cells_at + ranks * cells_bytes;
    total = ring_data_at + ranks * ranks * ring_bytes;
}

int Segment::create(int size) {
    if (size < 1 || size > kMaxRanks)
        throw std::invalid_argument("a segment holds 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
                                    std::to_string(size));
    const Geometry geometry(size);
    const int fd = memfd_create("ringway", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw out_of_memory("create " + a_segment_of(geometry.total), geometry.total, errno);
    try {
        if (ftruncate(fd, static_cast<off_t>(geometry.total)) != 0)
            throw out_of_memory("size " + a_segment_of(geometry.total), geometry.total, errno);
        allocate(fd, 0, geometry.cells_at, "a group of " + std::to_string(size) + " ranks", geometry.cells_at);
        Header header{};
        header.magic = kMagic;
        header.layout = geometry.total;
        header.size = size;
        if (pwrite(fd, static_cast<const void*>(&header), offsetof(Header, fault), 0) < 0)
            throw out_of_memory("write the segment's header", 0, errno);
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);  // shrinking it would kill all ranks with SIGBUS
    } catch (...) {
        close(fd);
        throw;
    }
    return fd;
}

Mapping::Mapping(int fd, int size) : fd(fd), size(size), geometry(size) {
    void* mapped = mmap(nullptr, geometry.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED)
        throw out_of_memory("map " + a_segment_of(geometry.total), geometry.total, errno);
    base = static_cast<std::byte*>(mapped);
    const auto* header = reinterpret_cast<const Header*>(base);
    if (header->magic == kMagic && header->layout == geometry.total && header->size == size) return;
    munmap(base, geometry.total);
    throw std::invalid_argument("the shared segment was made by another version or for another group size");
}

Mapping::~Mapping() {
    munmap(base, geometry.total);
    close(fd);
}

Segment::Segment(std::shared_ptr<Mapping> mapping, int rank)
    : mapping_(std::move(mapping)),
      rank_(rank),
      size_(mapping_->size),
      geometry_(mapping_->geometry),
      base_(mapping_->base) {}

void Segment::reserve_cells(int writers) {
    if (cells_reserved_) return;
    const int lacking = std::clamp(size_ - header().have_cells.load(), 1, writers);
    allocate(fd(), geometry_.cells_at + geometry_.cells_bytes * rank_, geometry_.cells_bytes, "the cells of large calls",
             geometry_.cells_bytes * static_cast<size_t>(lacking));
    header().have_cells.fetch_add(1);
    cells_reserved_ = true;
}

void Segment::reserve_ring(int to) {
    allocate(fd(), geometry_.ring_data_at + geometry_.ring_bytes * pair(rank_, to), geometry_.ring_bytes,
             "a point-to-point ring", geometry_.ring_bytes);
}

}  // namespace ringway::shm
