#include "callsite.h"

#include <frameobject.h>

#include <atomic>
#include <unordered_map>

namespace ringway {
namespace {

constexpr size_t kMaxSites = 16384;
constexpr size_t kMaxCodes = 65536;
constexpr int kMaxDepth = 64;

struct Key {
    PyCodeObject* code;
    int instruction;
    bool operator==(const Key& other) const { return code == other.code && instruction == other.instruction; }
};
struct KeyHash {
    size_t operator()(const Key& key) const {
        return (reinterpret_cast<size_t>(key.code) >> 4) * 31 + static_cast<size_t>(key.instruction);
    }
};

// One program has one set of lines, so these are the process's; the GIL guards them. Code objects in them are
// kept alive, so that their addresses stay theirs.
struct Tables {
    std::vector<std::string> inside;
    std::vector<std::string> outside;
    std::unordered_map<PyCodeObject*, bool> machinery;
    std::unordered_map<Key, uint32_t, KeyHash> ids;
    uint32_t count = 1;
};

// Read by threads that cannot have the GIL: an entry is written once, and never again.
std::atomic<const CallSite*> known_sites[kMaxSites];

Tables& tables() {
    static Tables* tables = new Tables;  // never destroyed: threads may record until the very end
    return *tables;
}

std::string utf8(PyObject* text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) {
        PyErr_Clear();
        return "?";
    }
    return std::string(data, static_cast<size_t>(size));
}

bool starts_with_any(const std::string& text, const std::vector<std::string>& prefixes) {
    for (const std::string& prefix : prefixes)
        if (text.compare(0, prefix.size(), prefix) == 0) return true;
    return false;
}

bool is_machinery(PyCodeObject* code) {
    Tables& t = tables();
    const auto found = t.machinery.find(code);
    if (found != t.machinery.end()) return found->second;
    const std::string file = utf8(code->co_filename);
    const bool inside = starts_with_any(file, t.inside) && !starts_with_any(file, t.outside);
    if (t.machinery.size() < kMaxCodes) {
        Py_INCREF(code);
        t.machinery.emplace(code, inside);
    }
    return inside;
}

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
    return PyFrame_GetLasti(frame);
#else
    return frame->f_lasti;
#endif
}

uint32_t site_id(PyFrameObject* frame, PyCodeObject* code) {
    Tables& t = tables();
    const Key key{code, instruction_of(frame)};
    const auto found = t.ids.find(key);
    if (found != t.ids.end()) return found->second;
    if (t.count >= kMaxSites) return 0;
    const uint32_t id = t.count++;
    const auto* made = new CallSite{utf8(code->co_filename), utf8(code->co_name), PyFrame_GetLineNumber(frame)};
    known_sites[id].store(made, std::memory_order_release);
    Py_INCREF(code);
    t.ids.emplace(key, id);
    return id;
}

}  // namespace

void set_machinery(std::vector<std::string> inside, std::vector<std::string> outside) {
    Tables& t = tables();
    t.inside = std::move(inside);
    t.outside = std::move(outside);
    t.machinery.clear();
}

uint32_t current_site() {
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    uint32_t id = 0;
    for (int depth = 0; frame != nullptr && depth < kMaxDepth; ++depth) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        const bool found = !is_machinery(code);
        if (found) id = site_id(frame, code);
        Py_DECREF(code);
        if (found) break;
        PyFrameObject* caller = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    Py_XDECREF(frame);
    return id;
}

CallSite site(uint32_t id) {
    const CallSite* known = id < kMaxSites ? known_sites[id].load(std::memory_order_acquire) : nullptr;
    return known == nullptr ? CallSite{} : *known;
}

}  // namespace ringway
