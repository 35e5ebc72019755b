#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "pack/keyed_hash.h"
#include "pack/pack.h"
#include "python/gil.h"

namespace nb = nanobind;
using namespace ringway;

namespace {

// Python hands over (pointer, dtype code), (kind, block, bits), (numel, shard, start, stop) and (pointer, stride, rows).
using ArrayArgs = std::tuple<uintptr_t, int>;
using FormatArgs = std::tuple<int, int64_t, int>;
using WindowArgs = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using FramesArgs = std::tuple<uintptr_t, int64_t, int64_t>;

pack::Array array(ArrayArgs args) {
    const auto [pointer, code] = args;
    const DType dtype = static_cast<DType>(code);
    if (dtype != DType::F32 && dtype != DType::F16 && dtype != DType::BF16)
        throw std::invalid_argument("the compression kernels take float32, float16 and bfloat16");
    return {reinterpret_cast<void*>(pointer), dtype};
}

pack::Format format(FormatArgs args) {
    const auto [kind, block, bits] = args;
    const bool largest = kind == static_cast<int>(pack::Kind::TopK);
    const bool known = largest ? block >= 1 && block <= 2048 && bits >= 2 && bits <= 8
                               : kind >= 0 && kind <= 3 && block >= 0 && block % 8 == 0;
    if (!known) throw std::invalid_argument("there is no such compression format");
    return {static_cast<pack::Kind>(kind), block, bits};
}

pack::Window window(WindowArgs args) {
    return {std::get<0>(args), std::get<1>(args), std::get<2>(args), std::get<3>(args)};
}

pack::Frames frames(FramesArgs args) {
    return {reinterpret_cast<uint8_t*>(std::get<0>(args)), std::get<1>(args), std::get<2>(args)};
}

nb::bytes hash_buffer(nb::bytes key, nb::handle buffer) {
    if (key.size() != kHashKeyBytes) throw std::invalid_argument("the key of the hash has the wrong length");
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const auto size = static_cast<size_t>(view.len);
    const size_t blocks = (size + kHashBlock - 1) / kHashBlock;
    PyObject* hashes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * kHashBytes));
    if (hashes != nullptr) {
        const auto* secret = reinterpret_cast<const uint8_t*>(key.c_str());
        auto* into = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(hashes));
        GilRelease release;
        keyed_hash(secret, static_cast<const uint8_t*>(view.buf), size, into);
    }
    PyBuffer_Release(&view);
    if (hashes == nullptr) throw nb::python_error();
    return nb::steal<nb::bytes>(hashes);
}

using Release = nb::call_guard<GilRelease>;

}  // namespace

void bind_pack(nb::module_& m) {
    m.def("keyed_hash", &hash_buffer, nb::arg("key"), nb::arg("data"));
    m.attr("HASH_KEY_BYTES") = kHashKeyBytes;
    m.def("pack_instructions", [] { return pack::steps().instructions; });
    m.def("pack_measure", [](FormatArgs f, ArrayArgs values, ArrayArgs residual, int64_t numel, int threads) {
        return pack::steps().measure(format(f), array(values), array(residual), numel, threads);
    }, Release());
    m.def("pack_encode", [](FormatArgs f, ArrayArgs values, ArrayArgs residual, WindowArgs w, FramesArgs to,
                            float scale, int threads) {
        pack::steps().encode(format(f), array(values), array(residual), window(w), frames(to), scale, threads);
    }, Release());
    m.def("pack_measure_mean", [](FormatArgs f, FramesArgs from, ArrayArgs residual, int64_t count, int threads) {
        return pack::steps().measure_mean(format(f), frames(from), array(residual), count, threads);
    }, Release());
    m.def("pack_encode_mean", [](FormatArgs f, FramesArgs from, ArrayArgs residual, int64_t count, uintptr_t to,
                                 float scale, int threads) {
        pack::steps().encode_mean(format(f), frames(from), array(residual), count, reinterpret_cast<uint8_t*>(to),
                                  scale, threads);
    }, Release());
    m.def("pack_decode", [](FormatArgs f, FramesArgs from, WindowArgs w, ArrayArgs values, int threads) {
        pack::steps().decode(format(f), frames(from), window(w), array(values), threads);
    }, Release());
    m.def("pack_decode_mean", [](FormatArgs f, FramesArgs from, int64_t count, ArrayArgs values, int threads) {
        pack::steps().decode_mean(format(f), frames(from), count, array(values), threads);
    }, Release());
}
