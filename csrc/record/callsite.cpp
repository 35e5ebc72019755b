#define Py_BUILD_CORE 1  // for the layout of frames, below

#include <Python.h>

#include "record/callsite.h"

#include <frameobject.h>

#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030e0000
#include <internal/pycore_frame.h>
#endif

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

// The lines of a program are the same for all groups, so there is one set of tables per process, guarded by the GIL. They
// keep their code objects alive, so that no address is used twice. A small direct-mapped cache comes before each map,
// because most calls come from few lines.
constexpr size_t kRecent = 256;

struct RecentCode {
    PyCodeObject* code = nullptr;
    bool machinery = false;
};
struct RecentSite {
    Key key{nullptr, 0};
    uint32_t id = 0;
};

struct Tables {
    RecentCode recent_codes[kRecent];
    RecentSite recent_sites[kRecent];
    std::vector<std::string> inside;
    std::vector<std::string> outside;
    std::unordered_map<PyCodeObject*, bool> machinery;
    std::unordered_map<Key, uint32_t, KeyHash> ids;
    uint32_t count = 1;
};

// Threads without the GIL read these: each entry is written once and never changes.
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
    RecentCode& recent = t.recent_codes[(reinterpret_cast<size_t>(code) >> 6) % kRecent];
    if (recent.code == code) return recent.machinery;
    const auto found = t.machinery.find(code);
    if (found != t.machinery.end()) {
        recent = {code, found->second};
        return found->second;
    }
    const std::string file = utf8(code->co_filename);
    const bool inside = starts_with_any(file, t.inside) && !starts_with_any(file, t.outside);
    if (t.machinery.size() < kMaxCodes) {
        Py_INCREF(code);
        t.machinery.emplace(code, inside);
    }
    return inside;
}

uint32_t site_id(PyCodeObject* code, int instruction) {
    Tables& t = tables();
    const Key key{code, instruction};
    RecentSite& recent = t.recent_sites[KeyHash()(key) % kRecent];
    if (recent.key == key) return recent.id;
    const auto found = t.ids.find(key);
    if (found != t.ids.end()) {
        recent = {key, found->second};
        return found->second;
    }
    if (t.count >= kMaxSites) return 0;
    const uint32_t id = t.count++;
    const int line = PyCode_Addr2Line(code, instruction);
    auto* made = new CallSite{utf8(code->co_filename), utf8(code->co_name), line};
    made->place = made->file + ":" + std::to_string(line) + " in " + made->function;
    const size_t length = made->place.size();
    if (length >= kPlaceBytes) made->place = "..." + made->place.substr(length - (kPlaceBytes - 4));
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
    for (RecentCode& recent : t.recent_codes) recent = {};
}

#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030e0000

// Reads the interpreter's own frames in place: the public functions create an object for each frame they visit, which
// takes longer than the rest of a record.
uint32_t current_site() {
    PyThreadState* thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030d0000
    _PyInterpreterFrame* frame = thread->current_frame;
#else
    _PyInterpreterFrame* frame = thread->cframe->current_frame;
#endif
    for (int depth = 0; frame != nullptr && depth < kMaxDepth; ++depth, frame = frame->previous) {
        if (_PyFrame_IsIncomplete(frame)) continue;
#if PY_VERSION_HEX >= 0x030d0000
        PyCodeObject* code = _PyFrame_GetCode(frame);
#else
        PyCodeObject* code = frame->f_code;
#endif
        if (!is_machinery(code)) return site_id(code, _PyInterpreterFrame_LASTI(frame) * sizeof(_Py_CODEUNIT));
    }
    return 0;
}

#else

uint32_t current_site() {
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    uint32_t id = 0;
    for (int depth = 0; frame != nullptr && depth < kMaxDepth; ++depth) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        const bool found = !is_machinery(code);
#if PY_VERSION_HEX >= 0x030b0000
        if (found) id = site_id(code, PyFrame_GetLasti(frame));
#else
        if (found) id = site_id(code, frame->f_lasti * static_cast<int>(sizeof(_Py_CODEUNIT)));
#endif
        Py_DECREF(code);
        if (found) break;
        PyFrameObject* caller = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    Py_XDECREF(frame);
    return id;
}

#endif

const CallSite* site(uint32_t id) {
    return id < kMaxSites ? known_sites[id].load(std::memory_order_acquire) : nullptr;
}

}  // namespace ringway
