// Runs every pack kernel on buffers that end, or begin, at a page that may not be touched: each length from 0 to 300,
// and some around the strips and blocks; every dtype, codec and kind of residual; one, two and three frames.
//
// The buffers are exactly as long as they must be, so that one byte read or written beyond is a crash.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "pack/pack.h"

using namespace ringway;
using namespace ringway::pack;

namespace {

// Memory with a forbidden page on either side; `place` puts a buffer against one of them.
class Fenced {
public:
    explicit Fenced(size_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
        size_ = (bytes + page_ - 1) / page_ * page_;
        void* whole = mmap(nullptr, size_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (whole == MAP_FAILED) std::abort();
        begin_ = static_cast<uint8_t*>(whole) + page_;
        if (mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) std::abort();
    }
    uint8_t* place(size_t bytes, bool at_end) const { return at_end ? begin_ + size_ - bytes : begin_; }

private:
    size_t page_, size_;
    uint8_t* begin_;
};

struct Memory {
    Fenced values{1 << 17}, residual{1 << 17}, frames{1 << 18}, server{1 << 17}, out{1 << 17}, target{1 << 17};
};

int64_t record_bytes(Format format, int64_t length) {
    const int64_t kept = (format.block * length + 4095) / 4096;
    int64_t low = 0;
    while (kept << (low + 1) <= length) ++low;
    return 8 + (kept * (format.bits + low) + kept + ((length - 1) >> low) + 7) / 8;
}

int64_t message_bytes(Format format, int64_t numel) {
    if (numel == 0) return 0;
    if (format.kind == Kind::TopK)
        return numel / 4096 * record_bytes(format, 4096) + (numel % 4096 ? record_bytes(format, numel % 4096) : 0);
    const int64_t scales = format.block > 0 ? (numel + format.block - 1) / format.block : 1;
    const int64_t bits[] = {1, 8, 4, 8};
    return 4 * scales + (numel * bits[static_cast<int>(format.kind)] + 7) / 8;
}

size_t width(DType dtype) { return dtype == DType::F32 ? 4 : 2; }

void fill(uint8_t* data, DType dtype, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float value = static_cast<float>((i * 37) % 101 - 50) / 16.0f;
        if (dtype == DType::F32) std::memcpy(data + 4 * i, &value, 4);
        else std::memset(data + 2 * i, static_cast<int>(0x30 + i % 8), 2);  // small numbers in either half type
    }
}

// All steps of one rank that serves the first of `rows` shards.
void walk(const Memory& memory, Format format, DType dtype, const DType* residual, int64_t numel, int64_t rows,
          bool at_end) {
    const int64_t shard = (numel / rows + 8) / 8 * 8;
    const Window window{numel, shard, 0, shard};
    const int64_t stride = kHeaderBytes + message_bytes(format, shard);
    const int64_t count = std::min(shard, numel);
    const auto array = [&](const Fenced& fenced, DType of, int64_t elements) {
        uint8_t* data = fenced.place(width(of) * static_cast<size_t>(elements), at_end);
        fill(data, of, elements);
        return Array{data, of};
    };
    const Array none{nullptr, DType::F32};
    const Array values = array(memory.values, dtype, numel);
    const Array lost = residual == nullptr ? none : array(memory.residual, *residual, numel);
    const Array server = residual == nullptr ? none : array(memory.server, *residual, count);
    const Frames frames{memory.frames.place(static_cast<size_t>(rows * stride), at_end), stride, rows};
    std::memset(frames.data, 0, static_cast<size_t>(rows * stride));
    uint8_t* frame = memory.out.place(static_cast<size_t>(stride), at_end);
    std::memset(frame, 0, static_cast<size_t>(stride));
    const Steps& kernels = steps();
    if (format.kind != Kind::TopK) kernels.measure(format, values, lost, numel, 1);
    kernels.encode(format, values, lost, window, frames, 0.75f, 1);
    // What the first server receives: its own shard from everybody. All say the same here.
    for (int64_t row = 1; row < rows; ++row)
        std::memcpy(frames.data + row * stride, frames.data, static_cast<size_t>(stride));
    if (format.kind != Kind::TopK) kernels.measure_mean(format, frames, server, count, 1);
    kernels.encode_mean(format, frames, server, count, frame, 0.75f, 1);
    const Array target = array(memory.target, dtype, count);
    kernels.decode_mean(format, frames, count, target, 1);
    kernels.decode(format, Frames{frame, stride, 1}, Window{count, shard, 0, shard}, target, 1);
    const Array whole = array(memory.target, dtype, numel);
    kernels.encode(format, values, lost, window, frames, 0.75f, 1);
    kernels.decode(format, frames, window, whole, 1);
}

}  // namespace

int main() {
    const Memory memory;
    std::vector<int64_t> lengths;
    for (int64_t length = 0; length <= 300; ++length) lengths.push_back(length);
    for (const int64_t around : {512, 1024, 2048, 3072, 4096, 8192})
        for (int64_t by = -9; by <= 9; ++by) lengths.push_back(around + by);
    const DType dtypes[] = {DType::F32, DType::F16, DType::BF16};
    const DType residuals[] = {DType::F32, DType::BF16};
    const int64_t blocks[][3] = {{0, 64, 1024}, {0, 24, 256}, {0, 8, 128}, {0, 64, 256}, {41, 410, 2048}};
    int64_t walks = 0;
    for (int kind = 0; kind < 5; ++kind)
        for (const int64_t block : blocks[kind])
            for (const DType dtype : dtypes)
                for (int which = 0; which < 3; ++which)
                    for (const int64_t length : lengths)
                        for (const bool at_end : {true, false}) {
                            const DType* residual = which < 2 ? &residuals[which] : nullptr;
                            walk(memory, {static_cast<Kind>(kind), block, kind == 4 ? 2 + static_cast<int>(block % 7) : 0}, dtype, residual, length, 1 + length % 3,
                                 at_end);
                            ++walks;
                        }
    std::printf("ok: %lld walks, %s\n", static_cast<long long>(walks), steps().instructions);
}
