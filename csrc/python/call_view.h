// A `ringway.call.Call` as the native side reads it.
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

    Op op() const { return static_cast<Op>(integer(read("op"), "code")); }
    DType dtype() const { return static_cast<DType>(integer(call_, "dtype_code")); }
    Reduce reduce() const { return static_cast<Reduce>(integer(call_, "reduce")); }
    int32_t peer() const { return static_cast<int32_t>(integer(call_, "peer")); }
    int32_t tag() const { return static_cast<int32_t>(integer(call_, "tag")); }
    int64_t nbytes() const { return integer(call_, "nbytes"); }
    bool async_op() const { return read("async_op").ptr() == Py_True; }
    // PREMUL_SUM's factor: a number, or a tensor of one.
    double factor() const {
        const nb::object factor = read("factor");
        return factor.is_none() ? 1.0 : nb::cast<double>(nb::float_(factor));
    }
    // What `begin` wrote; a call that was never recorded has the number -1.
    uint64_t sequence() const { return static_cast<uint64_t>(std::max<int64_t>(integer(call_, "sequence"), 0)); }
    uint32_t site() const { return static_cast<uint32_t>(integer(call_, "site")); }
    void recorded(uint64_t sequence, uint32_t site) const {
        nb::setattr(call_, "sequence", nb::int_(sequence));
        nb::setattr(call_, "site", nb::int_(site));
    }

    nb::sequence inputs() const { return nb::cast<nb::sequence>(read("inputs")); }
    nb::sequence outputs() const { return nb::cast<nb::sequence>(read("outputs")); }
    using Splits = std::optional<std::vector<int64_t>>;
    Splits input_splits() const { return nb::cast<Splits>(read("input_splits")); }
    Splits output_splits() const { return nb::cast<Splits>(read("output_splits")); }

  private:
    nb::object read(const char* name) const { return nb::getattr(call_, name); }
    static int64_t integer(nb::handle object, const char* name) {
        return nb::cast<int64_t>(nb::getattr(object, name));
    }

    nb::handle call_;
};

}  // namespace ringway
