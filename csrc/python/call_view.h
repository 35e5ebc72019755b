// Reads a `ringway.call.Call` from native code.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "codes.h"

namespace ringway {

namespace nb = nanobind;

class CallView {
  public:
    explicit CallView(nb::handle call) : call_(call) {}

    Op op() const { return static_cast<Op>(integer(read(names().op), names().code)); }
    DType dtype() const { return static_cast<DType>(integer(call_, names().dtype_code)); }
    Reduce reduce() const { return static_cast<Reduce>(integer(call_, names().reduce)); }
    int32_t peer() const { return static_cast<int32_t>(integer(call_, names().peer)); }
    int32_t tag() const { return static_cast<int32_t>(integer(call_, names().tag)); }
    int64_t nbytes() const { return integer(call_, names().nbytes); }
    bool async_op() const { return read(names().async_op).ptr() == Py_True; }
    // PREMUL_SUM's factor: a number, or a tensor with one element.
    double factor() const {
        const nb::object factor = read(names().factor);
        return factor.is_none() ? 1.0 : nb::cast<double>(nb::float_(factor));
    }
    // As `recorded` wrote it. A call that was never recorded has the number -1; its sequence is 0 here.
    uint64_t sequence() const { return static_cast<uint64_t>(std::max<int64_t>(integer(call_, names().sequence), 0)); }
    // The record that counts the call as not started; None if the call is only a part of one.
    nb::object record() const { return read(names().record); }
    uint32_t site() const { return static_cast<uint32_t>(integer(call_, names().site)); }
    void recorded(uint64_t sequence, uint32_t site) const {
        nb::setattr(call_, names().sequence, nb::int_(sequence));
        nb::setattr(call_, names().site, nb::int_(site));
    }

    nb::sequence inputs() const { return nb::cast<nb::sequence>(read(names().inputs)); }
    nb::sequence outputs() const { return nb::cast<nb::sequence>(read(names().outputs)); }
    using Splits = std::optional<std::vector<int64_t>>;
    Splits input_splits() const { return splits(names().input_splits); }
    Splits output_splits() const { return splits(names().output_splits); }

  private:
    // Created once: a lookup by a C string would create a Python string each time.
    struct Names {
        nb::str op = name("op"), code = name("code"), dtype_code = name("dtype_code"), reduce = name("reduce"),
                peer = name("peer"), tag = name("tag"), nbytes = name("nbytes"), async_op = name("async_op"),
                factor = name("factor"), sequence = name("sequence"), site = name("site"), inputs = name("inputs"),
                outputs = name("outputs"), input_splits = name("input_splits"), output_splits = name("output_splits"),
                record = name("record");
        static nb::str name(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
    };
    static const Names& names() {
        static const Names* names = new Names;  // never destroyed: the interpreter may have ended by then
        return *names;
    }

    nb::object read(const nb::str& name) const { return nb::getattr(call_, name); }
    static int64_t integer(nb::handle object, const nb::str& name) {
        return nb::cast<int64_t>(nb::getattr(object, name));
    }
    Splits splits(const nb::str& name) const {
        const nb::object value = read(name);
        return value.is_none() ? Splits() : nb::cast<std::vector<int64_t>>(value);
    }

    nb::handle call_;
};

}  // namespace ringway
