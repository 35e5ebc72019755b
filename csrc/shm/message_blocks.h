// The blocks of device memory that a rank's messages go through.
//
// A sender takes a block, copies a message to it, and sends a reference. The receiver copies from it, and its stream then
// writes the message's number to the block's word. The block is free again once its word has that number.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "shm/device_memory.h"
#include "shm/messages.h"

namespace ringway::shm {

class MessageBlocks {
  public:
    static constexpr size_t kBlocks = 16;
    // What a message by reference consists of.
    struct Referred {
        DeviceMemory::Region region;
        uint32_t block;
        uint32_t number;
    };

    // `words` has kBlocks words for each rank.
    MessageBlocks(DeviceMemory& memory, uint32_t* words, int rank) : memory_(memory), words_(words), rank_(rank) {}

    // A free block for a message of so many bytes, with its reference. None if all are taken, or there is no memory.
    std::optional<Span> take(int64_t bytes, int receiver, Message::Reference& reference);
    // The message with this reference was not sent.
    void give_back(const Message::Reference& reference);
    // Whether a message is under way to a receiver for whom `waits` holds.
    bool any_sent(const std::function<bool(int)>& waits);

    static Referred read(const Message::Reference& reference);
    // The number of the message that was last taken from a block of a rank.
    uint32_t& taken(int sender, size_t block) const { return words_[static_cast<size_t>(sender) * kBlocks + block]; }

  private:
    static_assert(sizeof(Referred) <= Message::kReferenceBytes);
    struct Block {
        Span memory;
        uint32_t number = 0;  // of the message in it, or of the last one
        int receiver = -1;    // -1 if the last one was not sent
    };

    bool is_free(size_t block) const;
    std::optional<size_t> find(int64_t bytes);

    DeviceMemory& memory_;
    uint32_t* const words_;
    const int rank_;
    std::mutex lock_;  // what follows
    std::vector<Block> blocks_;
    int64_t allocated_ = 0;
    uint32_t messages_ = 0;  // the number of the latest
};

}  // namespace ringway::shm
