#include "shm/message_blocks.h"

#include <atomic>
#include <cstring>

namespace ringway::shm {
namespace {

constexpr int64_t kLeastBytes = 2 << 20;
constexpr int64_t kMostBytes = int64_t{4} << 30;  // of all blocks
constexpr size_t kForLarge = 4;                   // blocks that many small messages leave to large ones

}  // namespace

bool MessageBlocks::is_free(size_t block) const {
    const Block& given = blocks_[block];
    return given.receiver < 0 || reinterpret_cast<std::atomic<uint32_t>&>(taken(rank_, block)).load() == given.number;
}

// The smallest block that is free and large enough, or a new one.
std::optional<size_t> MessageBlocks::find(int64_t bytes) {
    std::optional<size_t> best;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        const int64_t room = blocks_[i].memory.bytes;
        if (room >= bytes && (!best || room < blocks_[*best].memory.bytes) && is_free(i)) best = i;
    }
    if (best || blocks_.size() == kBlocks || bytes > kMostBytes) return best;
    int64_t room = kLeastBytes;
    while (room < bytes) room *= 2;
    if (allocated_ + room > kMostBytes) return {};
    if (room == kLeastBytes && blocks_.size() >= kBlocks - kForLarge) return {};
    const uint64_t address = memory_.try_allocate(static_cast<size_t>(room));
    if (address == 0) return {};
    allocated_ += room;
    blocks_.push_back({{address, room}});
    return blocks_.size() - 1;
}

std::optional<Span> MessageBlocks::take(int64_t bytes, int receiver, Message::Reference& reference) {
    const std::lock_guard<std::mutex> guard(lock_);
    const std::optional<size_t> found = find(bytes);
    if (!found) return {};
    Block& block = blocks_[*found];
    const Span memory{block.memory.address, bytes};
    const Referred referred{memory_.show(memory, true), static_cast<uint32_t>(*found), messages_ + 1};
    if (referred.region.slot < 0) return {};
    std::memcpy(reference.data(), &referred, sizeof referred);
    block.number = ++messages_;
    block.receiver = receiver;
    return memory;
}

void MessageBlocks::give_back(const Message::Reference& reference) {
    const std::lock_guard<std::mutex> guard(lock_);
    blocks_.at(read(reference).block).receiver = -1;
}

bool MessageBlocks::any_sent(const std::function<bool(int)>& waits) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (size_t i = 0; i < blocks_.size(); ++i)
        if (!is_free(i) && waits(blocks_[i].receiver)) return true;
    return false;
}

MessageBlocks::Referred MessageBlocks::read(const Message::Reference& reference) {
    Referred referred;
    std::memcpy(&referred, reference.data(), sizeof referred);
    return referred;
}

}  // namespace ringway::shm
