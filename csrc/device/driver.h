// The CUDA driver, loaded at run time: ringway's core is built without CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace ringway::device {

using Status = int;  // CUresult
using Context = void*;
using Event = void*;
using Stream = void*;

inline constexpr Status kSuccess = 0;
inline constexpr Status kNotReady = 600;

struct Driver {
    // Throws std::runtime_error if the library or one of its functions is missing.
    explicit Driver(const std::string& library);

    // The names are the driver's.
    Status (*init)(unsigned flags);
    Status (*device_get)(int* device, int ordinal);
    Status (*primary_context)(Context* context, int device);
    Status (*get_current)(Context* context);
    Status (*set_current)(Context context);
    Status (*event_create)(Event* event, unsigned flags);
    Status (*event_record)(Event event, Stream stream);
    Status (*event_query)(Event event);
    Status (*event_destroy)(Event event);
    Status (*event_elapsed)(float* milliseconds, Event from, Event to);
    Status (*stream_create)(Stream* stream, unsigned flags);
    Status (*is_capturing)(Stream stream, int* status);
    Status (*exchange_capture_mode)(int* mode);
    Status (*error_name)(Status status, const char** name);

    std::string name_of(Status status) const;
};

}  // namespace ringway::device
