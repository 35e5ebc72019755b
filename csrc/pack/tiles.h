// Splits long arrays among threads, and into pieces that stay in a cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace ringway::pack::PACK_NAMESPACE {
namespace {

constexpr int64_t kTile = 32768;            // elements that a thread takes at a time
constexpr int64_t kWorthAThread = 1 << 17;  // elements below which starting a thread costs more than it saves

// Calls work(begin, end) for tiles of [0, count), on as many threads as pay off.
template <class Work>
void in_tiles(int64_t count, int64_t block, int threads, Work work) {
    const int64_t tile = block > 0 ? std::max<int64_t>(kTile / block, 1) * block : kTile;
    const int64_t tiles = (count + tile - 1) / tile;
    const int useful = static_cast<int>(std::min<int64_t>({threads, count / kWorthAThread + 1, tiles}));
    std::atomic<int64_t> next{0};
    const auto take = [&] {
        for (int64_t i = next++; i < tiles; i = next++) work(i * tile, std::min(count, (i + 1) * tile));
    };
    std::vector<std::thread> helpers;
    helpers.reserve(static_cast<size_t>(useful));
    try {
        for (int i = 1; i < useful; ++i) helpers.emplace_back(take);
    } catch (const std::system_error&) {
        // There are no more threads. Those that are there do all the work.
    }
    take();
    for (std::thread& helper : helpers) helper.join();
}

// Calls work(offset, n) for strips of [begin, end), each at most `length` long.
template <class Work>
void in_strips(int64_t begin, int64_t end, int64_t length, Work work) {
    for (; begin < end; begin += length) work(begin, static_cast<int>(std::min(length, end - begin)));
}

}  // namespace
}  // namespace ringway::pack::PACK_NAMESPACE
