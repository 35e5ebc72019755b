// The CUDA driver, loaded at run time: ringway's core is built without CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace ringway::device {

using Status = int;  // CUresult
using Context = void*;
using Event = void*;
using Stream = void*;
using Address = uint64_t;  // CUdeviceptr

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
    // Throws std::runtime_error unless the status is kSuccess.
    void require(Status status, const char* what) const;

  protected:
    void* library_ = nullptr;
    std::string name_;
    template <class Function>
    void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(found(name));
    }

  private:
    void* found(const char* name) const;
};

// A context, current on this thread for as long as this exists.
class Entered {
  public:
    Entered(const Driver& driver, Context context);
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

  private:
    const Driver& driver_;
    Context before_ = nullptr;
    bool changed_ = false;
};

// A handle by which another process opens an allocation.
struct IpcHandle {
    unsigned char bytes[64];
};

// One operation of a stream on a word of memory (CUstreamBatchMemOpParams).
struct WordOperation {
    int operation;
    Address address;
    uint64_t value;
    unsigned flags;
    Address alias;
    uint64_t unused;
};
static_assert(sizeof(WordOperation) == 48);

inline constexpr int kWaitForWord = 1, kWriteWord = 2;  // of 32 bits
inline constexpr unsigned kUntilReached = 0, kUntilEqual = 1;  // a wait's flags
inline constexpr int kBufferId = 7;                     // CU_POINTER_ATTRIBUTE_BUFFER_ID
inline constexpr int kMpsEnabled = 133;                 // CU_DEVICE_ATTRIBUTE_MPS_ENABLED

// What memory shared between processes needs, besides streams and events.
struct MemoryDriver : Driver {
    explicit MemoryDriver(const std::string& library);

    Status (*allocate)(Address* address, size_t bytes);
    Status (*free)(Address address);
    Status (*address_range)(Address* base, size_t* bytes, Address address);
    Status (*pointer_attribute)(void* value, int attribute, Address address);
    Status (*device_attribute)(int* value, int attribute, int device);
    Status (*device_uuid)(unsigned char* uuid, int device);
    Status (*ipc_get)(IpcHandle* handle, Address address);
    Status (*ipc_open)(Address* address, IpcHandle handle, unsigned flags);
    Status (*ipc_close)(Address address);
    Status (*copy_async)(Address target, Address source, size_t bytes, Stream stream);
    Status (*download_async)(void* target, Address source, size_t bytes, Stream stream);
    Status (*upload_async)(Address target, const void* source, size_t bytes, Stream stream);
    Status (*synchronize_stream)(Stream stream);
    Status (*synchronize_event)(Event event);
    Status (*allocate_host)(void** memory, size_t bytes, unsigned flags);
    Status (*free_host)(void* memory);
    Status (*register_host)(void* memory, size_t bytes, unsigned flags);
    Status (*unregister_host)(void* memory);
    Status (*device_pointer)(Address* address, void* memory, unsigned flags);
    Status (*wait_event)(Stream stream, Event event, unsigned flags);
    Status (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,
                            void** extra);
    Status (*operate_on_words)(Stream stream, unsigned count, WordOperation* operations, unsigned flags);
};

}  // namespace ringway::device
