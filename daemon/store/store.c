// SPDX-License-Identifier: Apache-2.0
//
// See store.h: opening and closing the store, and when sessions are saved that nobody asks for.
#include "daemon/store/store.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/log/log.h"
#include "daemon/runtime/events.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"
#include "proto/sync.h"

enum { TICK_MS = 500 };

void kvq__jobs_tell(struct kvq__jobs *jobs, enum kvq__event_kind kind, const char *ns,
                    const char *name, const char *text)
{
    struct kvq__event event = {kind, ns, name, 0, text};
    kvq__event_tell(jobs->server, &event);
}

// ---- Saves that nobody asks for ----

static const struct kvq__peer self = {.admin = true};

static void end_own(struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    jobs->n_own--;
    free(t);
    kvq__jobs_drain_on(jobs);
}

static void save_one(struct kvq__jobs *jobs, const struct kvq__unsaved *u)
{
    struct kvq__task *t = calloc(1, sizeof *t);
    if (!t)
        return;
    t->peer = &self;
    t->own = true;
    t->done = end_own;
    snprintf(t->ns, sizeof t->ns, "%s", u->ns);
    snprintf(t->name, sizeof t->name, "%s", u->name);
    if (kvq__task_make(jobs, t) < 0) { // it is looked for again
        free(t);
        return;
    }
    jobs->n_own++;
    kvq__task_start(t, kvq__jobs_save);
}

static struct kvq__jobs *of_unsaved(struct kvq__mail *mail)
{
    return (struct kvq__jobs *)((char *)mail - offsetof(struct kvq__jobs, unsaved_mail));
}

static void told_of_unsaved(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_unsaved(mail);
    uint32_t n = jobs->n_unsaved;
    jobs->asking = false;
    if (jobs->ended || jobs->draining)
        n = 0;
    for (uint32_t i = 0; i < n && i < KVQ__UNSAVED_BATCH; i++)
        save_one(jobs, &jobs->unsaved[i]);
    kvq__jobs_drain_on(jobs);
}

// Poller's thread.
static void ask_for_unsaved(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_unsaved(mail);
    jobs->n_unsaved = kvq__core_unsaved(jobs->server->core, jobs->which, jobs->idle_ns,
                                        jobs->unsaved, KVQ__UNSAVED_BATCH);
    kvq__mailbox_post(&jobs->server->box, mail, told_of_unsaved);
}

static void look_for_unsaved(struct kvq__jobs *jobs, uint32_t which)
{
    if (jobs->asking)
        return;
    jobs->which = which;
    jobs->idle_ns = jobs->server->config.save_idle_seconds * 1000000000;
    jobs->asking = true;
    kvq__mailbox_post(kvq__poller_box(jobs->server->poller), &jobs->unsaved_mail, ask_for_unsaved);
}

static void on_tick(uv_timer_t *timer)
{
    struct kvq__jobs *jobs = timer->data;
    bool idle = jobs->server->config.save_idle_seconds > 0;
    if (jobs->n_own == 0 && !jobs->draining)
        look_for_unsaved(jobs, KVQ__UNSAVED_LEFT | (idle ? KVQ__UNSAVED_IDLE : 0));
    kvq__jobs_sweep(jobs);
    kvq__jobs_tidy(jobs);
    kvq__jobs_watch(jobs);
}

// ---- Opening and closing ----

static int open_store(struct kvq__jobs *jobs, char *text)
{
    const struct kvq_config *c = &jobs->server->config;
    struct kvq_store_options options = {.cap_bytes = c->storage_bytes};
    struct kvq_store_report report;
    char why[KVQ_TEXT_BYTES], quoted[KVQ_TEXT_BYTES + 16], dir[KVQ_CONFIG_PATH + 16];
    int rc = kvq_store_open(c->storage_dir, &options, &jobs->store, &report, why, sizeof why);
    if (rc < 0) {
        snprintf(text, KVQ_TEXT_BYTES, "storage_dir: %.460s", why);
        return rc;
    }
    kvq__log_quote(dir, sizeof dir, c->storage_dir);
    if (report.text[0])
        kvq__log(KVQ_LOG_WARN, "storage", "dir=%s text=%s", dir,
                 kvq__log_quote(quoted, sizeof quoted, report.text));
    else
        kvq__log(KVQ_LOG_INFO, "storage", "dir=%s created=%s checked=%s", dir,
                 report.created ? "yes" : "no", report.checked ? "yes" : "no");
    jobs->unswept = true;
    return 0;
}

// Without one that lasts a random one does, until the daemon ends.
static void use_key(struct kvq__jobs *jobs)
{
    const char *folder = jobs->server->config.storage_dir;
    char text[KVQ_TEXT_BYTES] = "", quoted[KVQ_TEXT_BYTES + 16], dir[KVQ_CONFIG_PATH + 16];
    uint8_t key[KVQ_PREFIX_BYTES];
    if (kvq__prefix_key(kvq_io_posix(), folder, key, text) == 0)
        kvq__core_prefix_key(jobs->server->core, key);
    else
        kvq__log(KVQ_LOG_WARN, "prefix_key",
                 "dir=%s text=%s effect=\"prefixes that are stored are not found\"",
                 kvq__log_quote(dir, sizeof dir, folder),
                 kvq__log_quote(quoted, sizeof quoted, text));
}

int kvq__jobs_open(struct kvq__server *server, struct kvq__jobs **out, char *text)
{
    struct kvq__jobs *jobs = calloc(1, sizeof *jobs);
    *out = jobs;
    if (!jobs) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    jobs->server = server;
    kvq__names_init(&jobs->names);
    kvq__turns_init(&jobs->turns, 1, 1);
    kvq__turns_init(&jobs->scans, KVQ__SCANS_AT_ONCE, 1);
    kvq__turns_init(&jobs->reads, KVQ__READ_AT_ONCE, KVQ__READ_AT_ONCE_OF);
    TAILQ_INIT(&jobs->sleepers);
    TAILQ_INIT(&jobs->beginning);
    TAILQ_INIT(&jobs->waiting);
    bool stores = server->config.storage_dir[0] != 0;
    int rc = kvq__fibers_open(&jobs->fibers);
    if (rc < 0)
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
    rc = rc || !stores ? rc : open_store(jobs, text);
    rc = rc ? rc : kvq__jobs_quotas_open(jobs, text);
    rc = rc || !stores ? rc : kvq__jobs_remote_open(jobs, text);
    if (rc < 0 || !stores)
        return rc;
    use_key(jobs);
    uv_timer_init(&server->loop, &jobs->alarm);
    uv_timer_init(&server->loop, &jobs->tick);
    jobs->alarm.data = jobs->tick.data = jobs;
    uv_timer_start(&jobs->tick, on_tick, TICK_MS, TICK_MS);
    jobs->timers = jobs->untidy = true;
    kvq__jobs_watch(jobs);
    return 0;
}

const struct kvq__store_times *kvq__jobs_times(const struct kvq__jobs *jobs)
{
    return &jobs->times;
}

bool kvq__jobs_idle(const struct kvq__jobs *jobs)
{
    return !jobs || (jobs->n_tasks == 0 && !jobs->asking);
}

void kvq__jobs_end(struct kvq__jobs *jobs)
{
    if (!jobs || jobs->ended)
        return;
    kvq_word_store(&jobs->leaving, 1);
    kvq_word_store(&jobs->ended, 1);
    kvq__jobs_stop_orders(jobs);
    kvq__transfers_stop(jobs);
    if (jobs->timers)
        uv_timer_stop(&jobs->tick);
}

void kvq__jobs_close(struct kvq__jobs **pointer)
{
    struct kvq__jobs *jobs = *pointer;
    *pointer = NULL;
    if (!jobs)
        return;
    assert(kvq__jobs_idle(jobs));
    kvq__jobs_remote_close(jobs);
    kvq__jobs_note_used(jobs);
    kvq__jobs_quotas_close(jobs);
    kvq_store_close(&jobs->store);
    kvq__fibers_close(&jobs->fibers);
    free(jobs->used);
    free(jobs->named);
    free(jobs);
}
