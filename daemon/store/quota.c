// SPDX-License-Identifier: Apache-2.0
//
// Limits that are set at run time: on the poller's thread it is checked what they come to, one of
// libuv's writes the file that makes them outlive the daemon, the poller puts them in effect, and
// the store is told of that on disk. One after the other, and beside whoever writes to the store:
// a limit can be raised while a save takes minutes. What was not written changes nothing.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/log/log.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"
#include "daemon/store/quota_file.h"

// ---- What each namespace has on disk ----

static void note_used(struct kvq__core *core, const struct kvq_store_space *spaces, size_t n)
{
    for (size_t i = 0; i < n; i++)
        kvq__disk_used(core, spaces[i].space, spaces[i].bytes);
}

// Poller's thread.
static void tell_counted(struct kvq__task *t)
{
    struct kvq__core *core = t->jobs->server->core;
    note_used(core, t->spaces, t->n_spaces);
    free(t->spaces);
    t->spaces = NULL;
    if (t->rc == KVQ_E_QUOTA && t->ns[0])
        kvq__disk_refused(core, t->ns, t->text);
}

static void count_spaces(struct kvq__task *t)
{
    kvq_store_spaces(t->jobs->store, &t->spaces, &t->n_spaces, NULL, 0);
}

void kvq__jobs_count(struct kvq__task *t)
{
    kvq__task_at_work(t, count_spaces);
    kvq__task_at_poller(t, tell_counted);
}

// ---- The table ----

static struct kvq__override *find_override(struct kvq__limits *limits, const char *ns)
{
    for (uint32_t i = 0; i < limits->n; i++)
        if (strcmp(limits->at[i].ns, ns) == 0)
            return &limits->at[i];
    return NULL;
}

// What is to be written: the table with the task's limits in it. False if there is no room.
static bool note(struct kvq__limits *limits, const struct kvq__override *change)
{
    struct kvq__override *o = find_override(limits, change->ns);
    if (!o && limits->n == KVQ_MAX_OVERRIDES)
        return false;
    if (!o)
        o = &limits->at[limits->n++];
    *o = *change;
    return true;
}

static void forget_empty(struct kvq__limits *limits)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < limits->n; i++)
        if (limits->at[i].set)
            limits->at[n++] = limits->at[i];
    limits->n = n;
}

// ---- The store ----

// What holds on disk: the limit that was set, else the one of the configuration's section, else the
// default, which may change while the daemon runs.
static int tell_limit(struct kvq__jobs *jobs, const char *ns, char *text)
{
    const struct kvq_config *c = &jobs->server->config;
    const struct kvq__override *o = find_override(&jobs->limits, ns);
    assert(jobs->store && *ns);
    if (o && o->set >> KVQ__DISK_BYTES & 1)
        return kvq_store_limit(jobs->store, ns, o->quota.limit[KVQ__DISK_BYTES], text,
                               KVQ_TEXT_BYTES);
    for (uint32_t i = 0; i < c->n_namespaces; i++)
        if (strcmp(c->namespaces[i].name, ns) == 0)
            return kvq_store_limit(jobs->store, ns, c->namespaces[i].disk_bytes, text,
                                   KVQ_TEXT_BYTES);
    kvq_store_limit_forget(jobs->store, ns);
    return 0;
}

int kvq__jobs_tell_limits(struct kvq__jobs *jobs, char *text)
{
    const struct kvq_config *c = &jobs->server->config;
    const struct kvq__limits *limits = &jobs->limits;
    if (!jobs->store)
        return 0;
    int rc = kvq_store_limit(jobs->store, NULL, c->disk_bytes, text, KVQ_TEXT_BYTES);
    for (uint32_t i = 0; i < c->n_namespaces && rc == 0; i++)
        rc = tell_limit(jobs, c->namespaces[i].name, text);
    for (uint32_t i = 0; i < limits->n && rc == 0; i++)
        rc = tell_limit(jobs, limits->at[i].ns, text);
    return rc;
}

// ---- A command ----

static void log_change(const struct kvq__task *t)
{
    char ns[160];
    const uint64_t *limit = t->limits.quota.limit;
    kvq__log(KVQ_LOG_INFO, "quota",
             "namespace=%s host=%llu device=%llu disk=%llu sessions=%llu table=%llu kept=%s",
             kvq__log_quote(ns, sizeof ns, t->limits.ns),
             (unsigned long long)limit[KVQ__HOST_BYTES],
             (unsigned long long)limit[KVQ__DEVICE_BYTES],
             (unsigned long long)limit[KVQ__DISK_BYTES], (unsigned long long)limit[KVQ__SESSIONS],
             (unsigned long long)limit[KVQ__TABLE_BYTES], t->jobs->store ? "yes" : "no");
}

// Poller's thread. The task's limits are from here on all that are in effect.
static void apply(struct kvq__task *t)
{
    struct kvq__server *server = t->jobs->server;
    struct kvq__namespace_info info;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .now_ns = kvq_now_ns()};
    t->rc = kvq__quota_apply(server->core, &t->limits, t->text);
    if (t->rc == 0)
        t->rc = kvq__core_namespace_info(server->core, t->peer, t->limits.ns, &info, t->text);
    if (t->rc == 0)
        t->limits.quota = info.quota;
    if (t->rc == 0)
        t->rc = kvq__dispatch_quota(&d, t->limits.ns, t->arena, t->reply, t->text);
}

static void write_limits(struct kvq__task *t)
{
    const struct kvq__limits *limits = &t->jobs->limits;
    t->rc = kvq__quota_file_write(kvq_io_posix(), t->jobs->server->config.storage_dir, limits->at,
                                  limits->n, t->text);
}

// Puts the task's limits into the table and the file, or into neither. Waits.
static void keep_limits(struct kvq__task *t)
{
    struct kvq__limits *limits = &t->jobs->limits;
    const struct kvq__override *before = find_override(limits, t->limits.ns);
    struct kvq__override old = before ? *before : (struct kvq__override){0};
    memcpy(old.ns, t->limits.ns, sizeof old.ns);
    if (!note(limits, &t->limits)) {
        snprintf(t->text, sizeof t->text,
                 "%d namespaces have limits that were set; delete those of another one first",
                 KVQ_MAX_OVERRIDES);
        t->rc = KVQ_E_LIMIT;
        return;
    }
    if (t->jobs->store)
        kvq__task_at_work(t, write_limits);
    if (t->rc < 0)
        note(limits, &old);
    forget_empty(limits);
}

static uint64_t limits_of(const Kvq__Quota *q, struct kvq__quota *out)
{
    if (!q)
        return 0;
    out->limit[KVQ__HOST_BYTES] = q->host_bytes;
    out->limit[KVQ__DEVICE_BYTES] = q->device_bytes;
    out->limit[KVQ__DISK_BYTES] = q->disk_bytes;
    out->limit[KVQ__SESSIONS] = q->sessions;
    out->limit[KVQ__TABLE_BYTES] = q->table_bytes;
    return 1;
}

// Poller's thread.
static void plan(struct kvq__task *t)
{
    struct kvq__override change = {0};
    const Kvq__Request *r = t->request;
    bool sets = r->command_case == KVQ__REQUEST__COMMAND_SET_QUOTA;
    snprintf(change.ns, sizeof change.ns, "%s",
             sets ? r->set_quota->namespace_ : r->delete_quota->namespace_);
    t->rc = 0;
    if (sets) {
        change.set = r->set_quota->which;
        if (!limits_of(r->set_quota->limit, &change.quota) || change.set == 0) {
            snprintf(t->text, sizeof t->text, "no limit is given that is to be set");
            t->rc = KVQ_E_INVALID;
        }
    }
    if (t->rc == 0)
        t->rc = kvq__quota_change(t->jobs->server->core, t->peer, &change, &t->limits, t->text);
}

void kvq__jobs_set_quota(struct kvq__task *t)
{
    kvq__task_take_turn_of(t, &t->jobs->limits.turns, "");
    kvq__task_at_poller(t, plan);
    if (t->rc == 0)
        keep_limits(t);
    if (t->rc < 0)
        return;
    kvq__task_at_poller(t, apply);
    if (t->rc == 0 && t->jobs->store)
        t->rc = tell_limit(t->jobs, t->limits.ns, t->text);
    if (t->rc == 0)
        log_change(t);
}

// ---- Opening and closing ----

// Those of namespaces that are no more stay in the file: they may come back.
static int put_in_effect(struct kvq__jobs *jobs, const struct kvq__override *o, char *text)
{
    char quoted[KVQ_TEXT_BYTES + 16];
    int rc = kvq__quota_apply(jobs->server->core, o, text);
    if (rc == 0)
        return tell_limit(jobs, o->ns, text);
    if (rc == KVQ_E_INVALID)
        kvq__log(KVQ_LOG_WARN, "quota_unused", "file=" KVQ__QUOTA_FILE " text=%s",
                 kvq__log_quote(quoted, sizeof quoted, text));
    return rc == KVQ_E_INVALID ? 0 : rc;
}

int kvq__jobs_quotas_open(struct kvq__jobs *jobs, char *text)
{
    struct kvq__limits *limits = &jobs->limits;
    struct kvq_store_space *spaces;
    size_t n_spaces;
    kvq__turns_init(&limits->turns, 1, 1);
    limits->at = calloc(KVQ_MAX_OVERRIDES, sizeof *limits->at);
    if (!limits->at) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    if (!jobs->store)
        return 0;
    int rc = kvq__jobs_tell_limits(jobs, text);
    rc = rc ? rc
            : kvq__quota_file_read(kvq_io_posix(), jobs->server->config.storage_dir, limits->at,
                                   &limits->n, text);
    for (uint32_t i = 0; i < limits->n && rc == 0; i++)
        rc = put_in_effect(jobs, &limits->at[i], text);
    if (rc == 0)
        rc = kvq_store_spaces(jobs->store, &spaces, &n_spaces, text, KVQ_TEXT_BYTES);
    if (rc < 0)
        return rc;
    note_used(jobs->server->core, spaces, n_spaces);
    free(spaces);
    return 0;
}

void kvq__jobs_quotas_close(struct kvq__jobs *jobs)
{
    free(jobs->limits.at);
}
