// SPDX-License-Identifier: Apache-2.0
//
// See server.h.
#include "daemon/runtime/server.h"

#include <assert.h>
#include <unistd.h>

enum kvq__role kvq__server_role(const struct kvq__server *server, const struct kvq__peer *peer)
{
    assert(peer->n_gids <= KVQ_MAX_GROUPS);
    if (peer->uid == KVQ__NO_UID)
        return KVQ__ROLE_NONE;
    if (peer->uid == 0 || peer->uid == geteuid())
        return KVQ__ROLE_ADMIN;
    return kvq__config_role(&server->config, peer->uid, peer->gids, peer->n_gids);
}
