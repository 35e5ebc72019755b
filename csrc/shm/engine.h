// One rank of one group: everything that works on its segment.
#pragma once

#include "shm/collectives.h"
#include "shm/messages.h"
#include "shm/progress.h"

namespace ringway::shm {

struct Engine : Shared {
    Engine(std::shared_ptr<Mapping> mapping, int rank, Peers peers, int cpus)
        : members(std::move(mapping), rank, std::move(peers), cpus),
          collectives(members),
          messages(*this, members),
          progress(*this, members, collectives) {}

    // Idempotent. Calls in flight end with Outcome::Closed, or with the group's fault.
    void stop() {
        if (members.forked()) return;
        messages.end_offers();
        members.leave();
        progress.stop();
        messages.stop();
    }
    // Also waits until the engine's threads have ended, see Worker::join. Several threads may call it at a time.
    void close() {
        if (members.forked()) return;
        stop();
        progress.join();
        messages.join();
    }

    Membership members;
    Collectives collectives;
    PointToPoint messages;
    Progress progress;
};

}  // namespace ringway::shm
