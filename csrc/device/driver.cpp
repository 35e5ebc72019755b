#include "device/driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ringway::device {

Driver::Driver(const std::string& library) {
    // Never closed: the driver's threads outlive everything here.
    library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    name_ = library;
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

void* Driver::found(const char* name) const {
    void* const function = dlsym(library_, name);
    if (function == nullptr) throw std::runtime_error(name_ + " has no " + name);
    return function;
}

void Driver::require(Status status, const char* what) const {
    if (status != kSuccess) throw std::runtime_error(std::string(what) + ": " + name_of(status));
}

Entered::Entered(const Driver& driver, Context context) : driver_(driver) {
    if (driver_.get_current(&before_) != kSuccess) before_ = nullptr;
    if (before_ == context) return;
    changed_ = true;
    driver_.set_current(context);
}

Entered::~Entered() {
    if (changed_) driver_.set_current(before_);
}

MemoryDriver::MemoryDriver(const std::string& library) : Driver(library) {
    find(allocate, "cuMemAlloc_v2");
    find(free, "cuMemFree_v2");
    find(address_range, "cuMemGetAddressRange_v2");
    find(pointer_attribute, "cuPointerGetAttribute");
    find(device_attribute, "cuDeviceGetAttribute");
    find(device_uuid, "cuDeviceGetUuid_v2");
    find(ipc_get, "cuIpcGetMemHandle");
    find(ipc_open, "cuIpcOpenMemHandle_v2");
    find(ipc_close, "cuIpcCloseMemHandle");
    find(copy_async, "cuMemcpyDtoDAsync_v2");
    find(download_async, "cuMemcpyDtoHAsync_v2");
    find(upload_async, "cuMemcpyHtoDAsync_v2");
    find(synchronize_stream, "cuStreamSynchronize");
    find(synchronize_event, "cuEventSynchronize");
    find(allocate_host, "cuMemHostAlloc");
    find(free_host, "cuMemFreeHost");
    find(register_host, "cuMemHostRegister_v2");
    find(unregister_host, "cuMemHostUnregister");
    find(device_pointer, "cuMemHostGetDevicePointer_v2");
    find(wait_event, "cuStreamWaitEvent");
    find(launch_kernel, "cuLaunchKernel");
    find(operate_on_words, "cuStreamBatchMemOp_v2");
}

}  // namespace ringway::device
