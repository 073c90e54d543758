// SPDX-License-Identifier: Apache-2.0
//
// The store as the page shows it: what is on disk, what has failed, and whether there is a remote
// store. The loop's thread has all of it (server->storage), so nobody is asked.
#include <string.h>

#include "daemon/http/internal.h"
#include "proto/clock.h"
#include "proto/json.h"
#include "proto/status.h"

static void add_whole(cJSON *to, const char *name, uint64_t value)
{
    cJSON_AddItemToObject(to, name, kvq_json_of_whole(value));
}

static void add_disk(cJSON *to, const struct kvq__server *server)
{
    const struct kvq__storage_state *s = &server->storage;
    cJSON_AddStringToObject(to, "folder", server->config.storage_dir);
    cJSON_AddBoolToObject(to, "known", s->known);
    cJSON_AddBoolToObject(to, "read_only", s->read_only);
    add_whole(to, "sessions", s->sessions);
    add_whole(to, "used_bytes", s->used_bytes);
    add_whole(to, "limit_bytes", s->limit_bytes);
    add_whole(to, "free_bytes", s->free_bytes);
    add_whole(to, "room_bytes", s->room_bytes);
}

static uint64_t count_done(const struct kvq__histogram *h)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < KVQ__BUCKETS; i++)
        n += h->count[i];
    return n;
}

static void add_jobs(cJSON *to, const struct kvq__server *server)
{
    const struct kvq__store_times *times = kvq__jobs_times(server->jobs);
    uint64_t now = kvq_now_ns();
    for (int i = 0; i < KVQ__TIMES; i++) {
        const struct kvq__store_failures *f = &server->storage.failed[i];
        cJSON *job = cJSON_AddObjectToObject(to, kvq__http_tasks[i]);
        add_whole(job, "done", count_done(&times->of[i]));
        add_whole(job, "failed", f->count);
        cJSON_AddBoolToObject(job, "fails", kvq__store_fails(f, now));
        if (f->count == 0)
            continue;
        cJSON_AddStringToObject(job, "status", kvq_status_name(f->status));
        cJSON_AddStringToObject(job, "text", kvq_status_text(f->status));
        add_whole(job, "last_ms", (now - f->at_ns) / 1000000);
    }
}

// An address has no user and no password: the configuration refuses one with an @.
static void add_remote(cJSON *to, const struct kvq_config *config)
{
    if (!config->remote_endpoint[0])
        return;
    cJSON *remote = cJSON_AddObjectToObject(to, "remote");
    cJSON_AddStringToObject(remote, "endpoint", config->remote_endpoint);
    cJSON_AddStringToObject(remote, "bucket", config->remote_bucket);
    cJSON_AddStringToObject(remote, "prefix", config->remote_prefix);
}

struct kvq__http_text kvq__http_storage(const struct kvq__server *server)
{
    struct kvq__http_text text = {0};
    cJSON *json = cJSON_CreateObject();
    if (server->config.storage_dir[0])
        add_disk(cJSON_AddObjectToObject(json, "store"), server);
    add_jobs(cJSON_AddObjectToObject(json, "jobs"), server);
    add_remote(json, &server->config);
    text.at = cJSON_PrintUnformatted(json);
    text.n = text.at ? strlen(text.at) : 0;
    cJSON_Delete(json);
    return text;
}
