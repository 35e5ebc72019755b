#include "record/json.h"

#include <cstdio>

#include "record/row.h"

namespace ringway {
namespace {

void append(std::string& out, int64_t number) { out += std::to_string(number); }
void append(std::string& out, const std::string& text) { out += json_text(text); }
void append(std::string& out, const CallSite* where) {
    if (where == nullptr)
        out += "null";
    else
        out += '[' + json_text(where->file) + ',' + std::to_string(where->line) + ',' + json_text(where->function) + ']';
}

void append_row(std::string& out, const Recorder& recorder, const Entry& entry) {
    const auto append_all = [&out](const auto&... fields) {
        out += '[';
        ((append(out, fields), out += ','), ...);
        out.back() = ']';
    };
    with_row(entry, recorder.text(entry.group), recorder.text(entry.label), site(entry.site), append_all);
}

}  // namespace

std::string json_text(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            char escaped[8];
            std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
            out += escaped;
        } else {
            out += c;
        }
    }
    return out + '"';
}

std::string calls_json(const Recorder& recorder, const std::string& group, size_t of_group, size_t of_all) {
    const std::vector<Entry> entries = recorder.recent(recorder.capacity());
    std::vector<const Entry*> chosen;
    size_t others = 0, members = 0;
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
        const bool member = members < of_group && recorder.text(entry->group) == group;
        if (entry->state != State::Issued && !member && others >= of_all) continue;
        members += member ? 1 : 0;
        others += 1;
        chosen.push_back(&*entry);
    }
    std::string out = "[";
    for (auto entry = chosen.rbegin(); entry != chosen.rend(); ++entry) {
        if (out.size() > 1) out += ',';
        append_row(out, recorder, **entry);
    }
    return out + ']';
}

}  // namespace ringway
