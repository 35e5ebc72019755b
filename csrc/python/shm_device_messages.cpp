// Messages of CUDA tensors, on the fast path.
#include <optional>

#include "python/shm_call.h"
#include "python/shm_device_path.h"

namespace ringway::shm {

bool DeviceFastPath::send(DeviceLink& link, const DeviceManner& manner, uintptr_t stream, PlainCall& call, int tag) {
    const auto from = reinterpret_cast<uint64_t>(call.in.at(0));
    auto message = std::make_shared<PythonMessage>();
    {
        GilRelease gil;
        if (call.bytes >= manner.direct_from.at(static_cast<size_t>(call.op)))
            message->by_reference = link.stage(stream, {from, call.bytes}, call.root, message->reference);
    }
    std::optional<Bounce> bounce;
    if (!message->by_reference) {
        bounce.emplace(link);
        if (!bounce->is_ours || call.bytes > DeviceLink::kBounceBytes) return false;
    }
    message->attachment.keep(link_);  // its memory
    locate(call);
    call.number = record().messages();
    call.in.base = link.bounce_in();
    describe(*message, call, call.bytes, tag);
    const uint64_t token = begin(call, call.site).token;
    try {
        bool sent = false;
        {
            GilRelease gil;
            if (!message->by_reference) link.download(stream, from, call.bytes);
            sent = group_.engine().messages.send_now(*message);
        }
        if (!sent) group_.run(message);
    } catch (...) {
        const bool sent = message->done() && message->outcome() == Outcome::Done;
        if (message->by_reference && !sent) link.unstage(message->reference);
        record().end(token, State::Failed);
        throw;
    }
    record().end(token, State::Completed);
    return true;
}

bool DeviceFastPath::receive(DeviceLink& link, uintptr_t stream, PlainCall& call, int tag) {
    const auto to = reinterpret_cast<uint64_t>(call.out.at(0));
    const Bounce bounce(link);
    if (!bounce.is_ours) return false;
    auto message = std::make_shared<PythonMessage>();
    message->attachment.keep(link_);  // its memory
    locate(call);
    call.number = record().messages();
    call.in.base = link.bounce_out();
    describe(*message, call, call.bytes, tag);
    message->room = DeviceLink::kBounceBytes;
    const uint64_t token = begin(call, call.site).token;
    try {
        {
            GilRelease gil;
            link.wait_for_upload();
        }
        group_.run(message);
        GilRelease gil;
        if (message->by_reference) {
            link.fetch(stream, message->source, message->reference, {to, call.bytes}, message->facts, call.timeout_s, token);
            return true;
        }
        if (message->owned != nullptr)
            link.upload_from(stream, to, message->owned.get(), call.bytes);
        else
            link.upload(stream, to, call.bytes);
    } catch (...) {
        record().end(token, State::Failed);
        throw;
    }
    record().end(token, State::Completed);
    return true;
}

}  // namespace ringway::shm
