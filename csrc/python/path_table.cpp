#include "python/path_table.h"

#include <algorithm>
#include <iterator>

namespace ringway {
namespace {

constexpr Py_ssize_t kLeast = 3;

// The arguments with the usual values for those that are missing, for a path that is written in Python.
std::array<PyObject*, FastCall::kArguments> filled(PyObject* const* given, Py_ssize_t count) {
    static PyObject* const usual[] = {PyLong_FromLong(-1), Py_False, PyLong_FromLong(0),
                                      PyLong_FromLong(static_cast<int>(Reduce::Sum))};
    static_assert(kLeast + std::size(usual) == FastCall::kArguments);
    std::array<PyObject*, FastCall::kArguments> all;
    for (Py_ssize_t i = 0; i < FastCall::kArguments; ++i)
        all[static_cast<size_t>(i)] = i < count ? given[i] : usual[i - kLeast];
    return all;
}

}  // namespace

PathTable::Ways PathTable::ways_of(const nb::tuple& by_op) {
    Ways ways;
    for (size_t op = 0; op < std::min(ways.size(), by_op.size()); ++op)
        for (nb::handle run : nb::cast<nb::tuple>(by_op[op]))
            ways[op].push_back({nb::borrow(run), FastPath::behind(run.ptr())});
    return ways;
}

void PathTable::set(const nb::tuple& sync, const nb::tuple& async) {
    Ways now = ways_of(sync), now_async = ways_of(async);
    sync_.swap(now);
    async_.swap(now_async);
}

// What was in the table goes last: a finalizer may run Python, and look at it.
void PathTable::clear() {
    Ways before, before_async;
    sync_.swap(before);
    async_.swap(before_async);
}

PyObject* PathTable::run(PyObject* const* given, Py_ssize_t count) {
    if (count < kLeast || count > FastCall::kArguments) {
        PyErr_SetString(PyExc_TypeError, "a fast path takes op, outputs, inputs, and up to four more arguments");
        return nullptr;
    }
    FastCall call;
    const FastCall::Read read = call.read(given, count);
    if (read == FastCall::Read::Error) return nullptr;
    if (read == FastCall::Read::TooLarge) Py_RETURN_FALSE;
    if (call.op < 0 || call.op >= kFastOps) {
        PyErr_SetString(PyExc_IndexError, "there is no such op with a fast path");
        return nullptr;
    }
    const std::vector<Way>& ways = (call.async ? async_ : sync_)[static_cast<size_t>(call.op)];
    for (size_t i = 0; i < ways.size(); ++i) {
        const Way way = ways[i];  // a call may close the group, and clear the table
        PyObject* const done =
            way.path != nullptr
                ? or_raise([&] { return way.path->run(call).release().ptr(); })
                : PyObject_Vectorcall(way.run.ptr(), filled(given, count).data(), FastCall::kArguments, nullptr);
        if (done != Py_False) return done;
        Py_DECREF(done);
    }
    Py_RETURN_FALSE;
}

int PathTable::traverse(visitproc visit, void* argument) const {
    for (const Ways* table : {&sync_, &async_})
        for (const std::vector<Way>& ways : *table)
            for (const Way& way : ways)
                if (const int stop = visit(way.run.ptr(), argument)) return stop;
    return 0;
}

}  // namespace ringway
