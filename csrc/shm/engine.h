// One rank of one group: everything that works on its segment.
#pragma once

#include "shm/collectives.h"
#include "shm/messages.h"
#include "shm/progress.h"

namespace ringway::shm {

struct Engine {
    Engine(std::shared_ptr<Mapping> mapping, int rank, Peers peers, int cpus)
        : members(std::move(mapping), rank, std::move(peers), cpus),
          collectives(members),
          messages(members),
          progress(members, collectives) {}

    // Idempotent. Calls in flight end with Outcome::Closed, or with the group's fault.
    void close() {
        if (members.forked()) return;
        members.leave();
        progress.stop();
        messages.stop();
        progress.join();
        messages.join();
    }

    // A forked child does not have its parent's threads, which may have held the locks. So it leaks an inherited engine.
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
