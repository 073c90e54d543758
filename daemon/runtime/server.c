// SPDX-License-Identifier: Apache-2.0
//
// See server.h.
#include "daemon/runtime/server.h"

#include <assert.h>
#include <unistd.h>

bool kvq__server_is_admin(const struct kvq__server *server, uint32_t uid)
{
    const struct kvq_config_ids *admins = &server->config.admin_uids;
    assert(admins->n <= sizeof admins->id / sizeof *admins->id);
    for (uint32_t i = 0; i < admins->n; i++)
        if (admins->id[i] == uid)
            return true;
    return uid == 0 || uid == geteuid();
}
