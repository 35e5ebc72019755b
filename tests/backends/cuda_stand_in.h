// What the stand-ins for the CUDA driver have in common: devices and contexts.
#pragma once

#include <cstdint>

constexpr int kNotReady = 600;
inline thread_local void* current_context = nullptr;

inline void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1000); }

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return 0;
}
int cuCtxSetCurrent(void* context) {
    current_context = context;
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
}
