// One rank of one group: everything that works over its segment.
#pragma once

#include "shm/collectives.h"
#include "shm/messages.h"
#include "shm/progress.h"

namespace ringway::shm {

struct Engine {
    Engine(std::shared_ptr<Mapping> mapping, int rank, std::vector<Peer> peers, int cpus)
        : members(std::move(mapping), rank, std::move(peers), cpus),
          collectives(members),
          messages(members),
          progress(members, collectives) {}

    // Idempotent. What is under way here ends with Outcome::Closed, or with the group's fault.
    void close() {
        if (members.forked()) return;
        members.leave();
        progress.stop();
        messages.stop();
        progress.join();
        messages.join();
    }

    // In a forked child the threads of the parent do not exist, and its locks may be held by them: an engine that
    // was inherited is left as it is.
    static void destroy(Engine* engine) {
        if (engine->members.forked()) return;
        engine->close();
        delete engine;
    }

    Membership members;
    Collectives collectives;
    PointToPoint messages;
    Progress progress;
};

}  // namespace ringway::shm
