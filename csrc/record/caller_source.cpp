#include "record/caller_source.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace ringway {
namespace {

constexpr size_t kNetworkBytes = 8;  // one host of IPv6 has all addresses of a network

struct Place {
    sockaddr_storage address{};
    socklen_t length = sizeof(address);

    bool is_v6() const { return address.ss_family == AF_INET6; }
    const in6_addr& v6() const { return reinterpret_cast<const sockaddr_in6&>(address).sin6_addr; }
    const in_addr& v4() const { return reinterpret_cast<const sockaddr_in&>(address).sin_addr; }
    in_port_t port() const {
        return is_v6() ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                       : reinterpret_cast<const sockaddr_in&>(address).sin_port;
    }
    std::string bytes() const {
        if (!is_v6()) return {reinterpret_cast<const char*>(&v4()), sizeof(in_addr)};
        return {reinterpret_cast<const char*>(&v6()), sizeof(in6_addr)};
    }
};

// What the kernel knows about the socket of this network namespace that has the far end's address. False if there is
// none, because the far end is elsewhere, or if the kernel does not say.
bool far_socket(const Place& far, const Place& near, inet_diag_msg& found) {
    struct {
        nlmsghdr header;
        inet_diag_req_v2 body;
    } question{};
    question.header.nlmsg_len = sizeof(question);
    question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
    question.header.nlmsg_flags = NLM_F_REQUEST;
    question.body.sdiag_family = static_cast<uint8_t>(far.address.ss_family);
    question.body.sdiag_protocol = IPPROTO_TCP;
    question.body.idiag_states = ~0U;
    question.body.id.idiag_sport = far.port();
    question.body.id.idiag_dport = near.port();
    std::memcpy(question.body.id.idiag_src, far.bytes().data(), far.bytes().size());
    std::memcpy(question.body.id.idiag_dst, near.bytes().data(), near.bytes().size());
    question.body.id.idiag_cookie[0] = question.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

    const int kernel = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (kernel < 0) return false;
    alignas(nlmsghdr) char answer[1024];
    const bool asked = send(kernel, &question, sizeof(question), 0) == sizeof(question);
    const ssize_t got = asked ? recv(kernel, answer, sizeof(answer), MSG_DONTWAIT) : -1;  // it has answered by now
    close(kernel);
    const auto* header = reinterpret_cast<const nlmsghdr*>(answer);
    if (got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(found))) || header->nlmsg_type != SOCK_DIAG_BY_FAMILY)
        return false;
    std::memcpy(&found, NLMSG_DATA(header), sizeof(found));
    return found.id.idiag_dport == near.port();  // not a listener with the far end's port
}

}  // namespace

std::string caller_source(int connection) {
    Place far, near;
    if (getpeername(connection, reinterpret_cast<sockaddr*>(&far.address), &far.length) != 0) return "";
    if (getsockname(connection, reinterpret_cast<sockaddr*>(&near.address), &near.length) != 0) return "";
    inet_diag_msg found{};
    if (far_socket(far, near, found)) {
        if (found.idiag_state != TCP_ESTABLISHED) return "";
        if (found.idiag_uid != geteuid()) return "user " + std::to_string(found.idiag_uid);
        return far.bytes();
    }
    return far.is_v6() && !IN6_IS_ADDR_V4MAPPED(&far.v6()) ? far.bytes().substr(0, kNetworkBytes) : far.bytes();
}

}  // namespace ringway
