// SPDX-License-Identifier: Apache-2.0
//
// See address.h.
#include "daemon/config/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool kvq__listen_address_parse(const char *given, struct kvq__listen_address *address)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)&address->at;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&address->at;
    char host[64], *end = "";
    const char *colon = strrchr(given, ':');
    size_t n = colon ? (size_t)(colon - given) : 0;
    bool six = n > 2 && given[0] == '[' && given[n - 1] == ']';
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    memset(address, 0, sizeof *address);
    if (!colon || colon[1] < '0' || colon[1] > '9' || *end || port > 65535)
        return false;
    snprintf(host, sizeof host, "%.*s", (int)(six ? n - 2 : n), six ? given + 1 : given);
    if (six) {
        *v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
        address->bytes = sizeof *v6;
        bool good = inet_pton(AF_INET6, host, &v6->sin6_addr) == 1;
        address->loopback = good && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
        return good;
    }
    *v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address->bytes = sizeof *v4;
    bool good = inet_pton(AF_INET, host, &v4->sin_addr) == 1;
    address->loopback = good && ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    return good;
}
