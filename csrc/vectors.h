// Which vector instructions may be used: those that the CPU has and whose registers the kernel saves. The compiler's
// __builtin_cpu_supports needs a part of libgcc that zig, which builds the wheels, does not have.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace ringway {

class Vectors {
  public:
    Vectors() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kSavesRegisters) == 0) return;
        unsigned saved, high;
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = (saved & kYmm) == kYmm && (b & kAvx2) != 0;
        avx512 = avx2 && (saved & kZmm) == kZmm && (b & kAvx512) == kAvx512;
    }
    bool avx2 = false;
    bool avx512 = false;  // F, BW, DQ and VL

  private:
    static constexpr unsigned kSavesRegisters = 1u << 27, kYmm = 0x06, kZmm = 0xe6, kAvx2 = 1u << 5;
    static constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
};

}  // namespace ringway
#endif
