// What native code needs to know about a torch tensor, without torch's headers.
#pragma once

#include <Python.h>

#include <cstddef>

#include "codes.h"

namespace ringway {

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

struct TensorView {
    std::byte* data = nullptr;
    int64_t numel = 0;
    int64_t nbytes = 0;
    int64_t rows = 1;  // of the first dimension
    DType dtype = DType::Unknown;
    int32_t device = 0;  // the kind of device, by DLPack's codes, and its number
    int32_t device_index = 0;
    bool contiguous = false;

    bool on(int32_t kind) const { return device == kind && contiguous; }
};

// Remembers the types whose layout is known (torch.Tensor, Parameter) and torch's DLPack exchange table.
// Called once, with the GIL, when ringway is imported.
void set_tensor_types(PyObject* types, PyObject* exchange_capsule);

// Fills `out` and returns true for a plain, dense tensor of a known type. Returns false, with no Python error set, for
// anything else (a subclass, a sparse or conjugated tensor, not a tensor): the caller takes the general path, which
// reports what is wrong. Needs the GIL; takes some tens of nanoseconds.
bool view_tensor(PyObject* object, TensorView& out);

}  // namespace ringway
