// Who opened a connection. The responder limits strangers by this, so that they compete with each other only.
#pragma once

#include <string>

namespace ringway {

// For an accepted TCP connection: the user, if it is another one of this host; otherwise the address it comes from, of
// IPv6 only the network. Another user of the host cannot hide behind the host's many addresses, nor behind this user's.
// Empty if a process of this host opened the connection and has closed it already.
std::string caller_source(int connection);

}  // namespace ringway
