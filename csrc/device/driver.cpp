#include "device/driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ringway::device {

Driver::Driver(const std::string& library) {
    // Never closed: the driver's threads outlive everything here.
    void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) throw std::runtime_error(dlerror());
    const auto find = [loaded, &library](auto& function, const char* name) {
        void* const found = dlsym(loaded, name);
        if (found == nullptr) throw std::runtime_error(library + " has no " + name);
        function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    };
    find(init, "cuInit");
    find(device_get, "cuDeviceGet");
    find(primary_context, "cuDevicePrimaryCtxRetain");
    find(get_current, "cuCtxGetCurrent");
    find(set_current, "cuCtxSetCurrent");
    find(event_create, "cuEventCreate");
    find(event_record, "cuEventRecord");
    find(event_query, "cuEventQuery");
    find(event_destroy, "cuEventDestroy_v2");
    find(event_elapsed, "cuEventElapsedTime");
    find(stream_create, "cuStreamCreate");
    find(is_capturing, "cuStreamIsCapturing");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(error_name, "cuGetErrorName");
    const Status status = init(0);
    if (status != kSuccess) throw std::runtime_error("cuInit: " + name_of(status));
}

std::string Driver::name_of(Status status) const {
    const char* name = nullptr;
    error_name(status, &name);
    return name == nullptr ? "CUDA error " + std::to_string(status) : name;
}

}  // namespace ringway::device
