#include "python/tensor_view.h"

#include <array>

namespace ringway {
namespace {

// The part of DLPack's C exchange interface (version 1) that is used here.
struct DLDevice {
    int32_t type;
    int32_t id;
};
struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLExchangeHeader {
    uint32_t major;
    uint32_t minor;
    DLExchangeHeader* previous;
};
struct DLExchange {
    DLExchangeHeader header;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);
    void* current_work_stream;
};

constexpr size_t kMaxTypes = 4;

std::array<PyTypeObject*, kMaxTypes> known_types{};
const DLExchange* dlpack = nullptr;

// By DLPack's code of the type, for 8, 16, 32, 64 and 128 bits.
constexpr DType kNone = DType::Unknown;
constexpr DType kDTypes[7][5] = {
    {DType::I8, DType::I16, DType::I32, DType::I64, kNone},
    {DType::U8, DType::U16, DType::U32, DType::U64, kNone},
    {kNone, DType::F16, DType::F32, DType::F64, kNone},
    {kNone, kNone, kNone, kNone, kNone},
    {kNone, DType::BF16, kNone, kNone, kNone},
    {kNone, kNone, kNone, DType::C64, DType::C128},
    {DType::Bool, kNone, kNone, kNone, kNone},
};

DType dtype_of(DLDataType type) {
    const bool whole_bytes = type.bits >= 8 && (type.bits & (type.bits - 1)) == 0;
    if (type.lanes != 1 || type.code >= 7 || !whole_bytes) return DType::Unknown;
    return kDTypes[type.code][__builtin_ctz(type.bits) - 3];
}

bool is_contiguous(const DLTensor& tensor) {
    if (tensor.strides == nullptr) return true;
    int64_t expected = 1;
    for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
        if (tensor.shape[dim] == 0) return true;
        if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
        expected *= tensor.shape[dim];
    }
    return true;
}

// A real tensor may be negated lazily, which DLPack does not show. It is then the imaginary part of a conjugated tensor,
// so it has every second element of its memory and is not contiguous, unless it has only one element.
bool is_negated(PyObject* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("is_neg");
    PyObject* answer = PyObject_CallMethodNoArgs(tensor, name);
    const bool negated = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return negated;
}

}  // namespace

void set_tensor_types(PyObject* types, PyObject* exchange_capsule) {
    const Py_ssize_t count = PyTuple_Size(types);
    for (Py_ssize_t i = 0; i < count && i < static_cast<Py_ssize_t>(kMaxTypes); ++i) {
        PyObject* type = PyTuple_GetItem(types, i);
        Py_INCREF(type);  // kept until the process ends, like torch itself
        known_types[static_cast<size_t>(i)] = reinterpret_cast<PyTypeObject*>(type);
    }
    if (exchange_capsule != Py_None) {
        auto* exchange =
            static_cast<const DLExchange*>(PyCapsule_GetPointer(exchange_capsule, "dlpack_exchange_api"));
        if (exchange == nullptr) PyErr_Clear();
        else if (exchange->header.major == 1 && exchange->tensor_from_object != nullptr) dlpack = exchange;
    }
}

bool view_tensor(PyObject* object, TensorView& out) {
    if (dlpack == nullptr) return false;
    PyTypeObject* type = Py_TYPE(object);
    bool known = false;
    for (PyTypeObject* candidate : known_types) known = known || candidate == type;
    if (!known) return false;

    DLTensor tensor;
    if (dlpack->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    out.dtype = dtype_of(tensor.dtype);
    // A complex tensor may be conjugated lazily, which DLPack does not show: those take the general path.
    if (out.dtype == DType::Unknown || out.dtype == DType::C64 || out.dtype == DType::C128) return false;
    out.rows = tensor.ndim > 0 ? tensor.shape[0] : 1;
    out.numel = 1;
    for (int32_t dim = 0; dim < tensor.ndim; ++dim) out.numel *= tensor.shape[dim];
    out.nbytes = out.numel * (tensor.dtype.bits / 8);
    out.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    out.device = tensor.device.type;
    out.device_index = tensor.device.id;
    out.contiguous = is_contiguous(tensor);
    return out.numel != 1 || !is_negated(object);
}

}  // namespace ringway
