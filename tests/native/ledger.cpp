// Counts on in a bucket of a histogram that 32 bits could no longer hold.
#include <cstdint>
#include <cstdio>

#include "record/record.h"

#define private public  // a bucket gets there only after days of calls
#include "record/ledger.h"
#undef private

int main() {
    ringway::Histogram histogram;
    constexpr int64_t kShort = 5, kLong = 1'000'000;  // 5 ns have a bucket of their own, the sixth
    histogram.add(kShort);
    histogram.buckets_[5] = histogram.count = (uint64_t{1} << 32) - 2;
    for (int i = 0; i < 4; ++i) histogram.add(kShort);
    for (int i = 0; i < 10; ++i) histogram.add(kLong);
    std::printf("%llu %llu %lld %lld\n", static_cast<unsigned long long>(histogram.count),
                static_cast<unsigned long long>(histogram.buckets_[5]),
                static_cast<long long>(histogram.percentile(0.5)), static_cast<long long>(histogram.percentile(0.99)));
}
