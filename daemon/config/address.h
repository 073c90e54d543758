// SPDX-License-Identifier: Apache-2.0
//
// Addresses to listen at, as the configuration has them.
#ifndef KVQ_DAEMON_CONFIG_ADDRESS_H
#define KVQ_DAEMON_CONFIG_ADDRESS_H

#include <stdbool.h>
#include <sys/socket.h>

// A numeric address and a port: 127.0.0.1:9647, 0.0.0.0:9648, [::1]:9647.
struct kvq__listen_address {
    struct sockaddr_storage at;
    socklen_t bytes;
    bool loopback;
};
// False: it is none.
bool kvq__listen_address_parse(const char *given, struct kvq__listen_address *address);

#endif
