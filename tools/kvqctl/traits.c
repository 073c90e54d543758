// SPDX-License-Identifier: Apache-2.0
// What commands take besides what their rows say, by the functions that do them.
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

struct list {
    int (*run)(struct kvq__ctl *ctl, char **args);
    const struct kvq__ctl_table *table;
};

static const struct list lists[] = {
    {kvq__ctl_session_list, &kvq__ctl_sessions},
    {kvq__ctl_client_list, &kvq__ctl_clients},
    {kvq__ctl_prefix_status, &kvq__ctl_prefixes},
    {kvq__ctl_quota_list, &kvq__ctl_quotas},
    {kvq__ctl_storage_list, &kvq__ctl_saved_sessions},
    {kvq__ctl_remote_list, &kvq__ctl_remote_sessions},
    {kvq__ctl_format_list, &kvq__ctl_formats},
};

struct named {
    int (*run)(struct kvq__ctl *ctl, char **args);
    unsigned places;
};

static const struct named named[] = {
    {kvq__ctl_session_show, KVQ__CTL_MEMORY},
    {kvq__ctl_session_drop, KVQ__CTL_MEMORY | KVQ__CTL_SAVED},
    {kvq__ctl_session_move, KVQ__CTL_MEMORY},
    {kvq__ctl_session_park, KVQ__CTL_MEMORY},
    {kvq__ctl_session_prefetch, KVQ__CTL_MEMORY},
    {kvq__ctl_session_pin, KVQ__CTL_MEMORY},
    {kvq__ctl_session_unpin, KVQ__CTL_MEMORY},
    {kvq__ctl_session_save, KVQ__CTL_MEMORY},
    {kvq__ctl_session_restore, KVQ__CTL_SAVED},
    {kvq__ctl_session_export, KVQ__CTL_SAVED},
    {kvq__ctl_session_push, KVQ__CTL_MEMORY | KVQ__CTL_SAVED},
    {kvq__ctl_session_pull, KVQ__CTL_REMOTE},
    {kvq__ctl_remote_remove, KVQ__CTL_REMOTE},
};

unsigned kvq__ctl_places_of(const struct kvq__ctl_command *command)
{
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (named[i].run == command->run)
            return named[i].places;
    return 0;
}

const struct kvq__ctl_table *kvq__ctl_table_of(const struct kvq__ctl_command *command)
{
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (lists[i].run == command->run)
            return lists[i].table;
    return NULL;
}
