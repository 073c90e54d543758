// SPDX-License-Identifier: Apache-2.0
// The table of exit statuses, as kvqctl(1) has it, and which of them a refusal is.
#include "proto/status.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"

const struct kvq__ctl_exit kvq__ctl_exits[] = {
    {KVQ_EXIT_OK, "done"},
    {KVQ_EXIT_FAILED, "refused or failed, or the list is not whole"},
    {KVQ_EXIT_USAGE, "the command line is wrong"},
    {KVQ_EXIT_NO_DAEMON, "no daemon there, or it ended before it answered"},
    {KVQ_EXIT_TIMEOUT, "the daemon did not answer in time"},
    {KVQ_EXIT_NOT_FOUND, "no such session, client or namespace"},
    {KVQ_EXIT_PERMISSION, "this user may not do that"},
    {KVQ_EXIT_PROBLEM, "doctor or storage verify found a problem"},
};

const size_t kvq__ctl_n_exits = sizeof kvq__ctl_exits / sizeof *kvq__ctl_exits;

// Of the daemon's refusals; all others are KVQ_EXIT_FAILED.
static const struct refusal {
    int status, exit;
} refusals[] = {
    {KVQ_E_NO_SESSION, KVQ_EXIT_NOT_FOUND},
    {KVQ_E_NO_CLIENT, KVQ_EXIT_NOT_FOUND},
    {KVQ_E_NO_NAMESPACE, KVQ_EXIT_NOT_FOUND},
    {KVQ_E_PERMISSION, KVQ_EXIT_PERMISSION},
};

int kvq__ctl_exit_of(int status)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (refusals[i].status == status)
            return refusals[i].exit;
    return KVQ_EXIT_FAILED;
}
