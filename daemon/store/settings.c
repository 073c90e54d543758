// SPDX-License-Identifier: Apache-2.0
//
// Changing the configuration while the daemon runs. One change goes after the other, and none
// beside one of limits that are set at run time (quota.c), whose turns they share: on one of
// libuv's threads the files are read, on the loop's the differences are told, on the poller's the
// core gets its part, and on the loop's all others get theirs. What fails before the core has its
// part has changed nothing.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/commands/dispatch.h"
#include "daemon/config/change.h"
#include "daemon/log/log.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum { LOG_WORDS = 700 };

// Differences in words, for a line of the log; cut where they are too many.
struct words {
    char text[LOG_WORDS];
    size_t used;
};

struct kvq__change {
    struct kvq__task *task;
    struct kvq_config *next;
    struct kvq__core_settings *settings; // of next
    int log_fd;                          // where lines go from then on; -1: none
    struct words changed, restart;
};

// ---- Beginning and ending ----

static struct kvq__change *change_new(struct kvq__task *t)
{
    struct kvq__change *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->task = t;
    c->log_fd = -1;
    c->next = malloc(sizeof *c->next);
    if (!c->next) {
        free(c);
        return NULL;
    }
    *c->next = t->jobs->server->config;
    return c;
}

static void change_free(struct kvq__change *c)
{
    if (c->log_fd >= 0)
        close(c->log_fd);
    free(c->settings);
    free(c->next);
    free(c);
}

// ---- Differences ----

static void add_words(struct words *w, const struct kvq__config_change *change)
{
    const char *none = "\"\"";
    size_t room = sizeof w->text - w->used;
    int n = snprintf(w->text + w->used, room, "%s%s %.100s to %.100s", w->used ? ", " : "",
                     change->name, *change->before ? change->before : none,
                     *change->after ? change->after : none);
    if (n > 0 && (size_t)n < room)
        w->used += (size_t)n;
    else
        w->text[w->used] = 0;
}

static void note_change(void *context, const struct kvq__config_change *change)
{
    struct kvq__change *c = context;
    add_words(change->live ? &c->changed : &c->restart, change);
}

static void log_words(enum kvq_log_level level, const char *event, const char *what,
                      const struct words *w)
{
    char quoted[LOG_WORDS + 64];
    kvq__log(level, event, "%s=%s", what, kvq__log_quote(quoted, sizeof quoted, w->text));
}

// ---- In effect ----

// Poller's thread.
static void change_core(struct kvq__task *t)
{
    const struct kvq__change *c = t->change;
    struct kvq__server *server = t->jobs->server;
    t->rc = kvq__core_reconfigure(server->core, c->settings, t->text);
    if (t->rc == 0)
        kvq__poller_spin(server->poller, c->next->spin_us * 1000);
}

// Loop's thread.
static void change_rest(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    struct kvq_config *config = &t->jobs->server->config;
    char text[KVQ_TEXT_BYTES] = "", quoted[KVQ_TEXT_BYTES + 16];
    kvq__config_adopt(config, c->next);
    kvq__log_use(c->log_fd, (enum kvq_log_level)config->log_level);
    c->log_fd = -1;
    if (kvq__jobs_tell_limits(t->jobs, text) < 0)
        kvq__log(KVQ_LOG_ERROR, "disk_limits", "text=%s",
                 kvq__log_quote(quoted, sizeof quoted, text));
}

static void open_log(struct kvq__task *t)
{
    t->change->log_fd = kvq__log_prepare(t->change->next->log_file, t->text);
    t->rc = t->change->log_fd < 0 ? t->change->log_fd : 0;
}

// Puts task->change->next in effect, or none of it. Waits.
static void put_in_effect(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    const struct kvq_config *running = &t->jobs->server->config;
    kvq__config_compare(running, c->next, note_change, c);
    t->rc = kvq__config_merge(c->next, running, t->text);
    if (t->rc == 0)
        kvq__task_at_work(t, open_log);
    if (t->rc == 0 && !(c->settings = kvq__config_settings(c->next))) {
        snprintf(t->text, sizeof t->text, "no memory for the new settings");
        t->rc = KVQ_E_NO_MEMORY;
    }
    if (t->rc == 0)
        kvq__task_at_poller(t, change_core);
    if (t->rc == 0)
        change_rest(t);
}

// ---- Reading it again ----

static void read_config(struct kvq__task *t)
{
    const struct kvq__server *server = t->jobs->server;
    t->rc =
        kvq__config_load(t->change->next, server->argc, server->argv, server->environment, t->text);
}

static void log_reload(const struct kvq__task *t)
{
    char quoted[KVQ_TEXT_BYTES + 16], path[KVQ_CONFIG_PATH + 16];
    const struct kvq__change *c = t->change;
    const char *file = t->jobs->server->config.file;
    if (t->rc < 0) {
        kvq__log(KVQ_LOG_ERROR, "reload_failed", "error=%s text=\"nothing has changed\"",
                 kvq__log_quote(quoted, sizeof quoted, t->text));
        return;
    }
    kvq__log(KVQ_LOG_INFO, "reloaded", "file=%s",
             kvq__log_quote(path, sizeof path, *file ? file : "none"));
    if (c->changed.used)
        log_words(KVQ_LOG_INFO, "changed", "options", &c->changed);
    if (c->restart.used)
        log_words(KVQ_LOG_WARN, "needs_restart", "options", &c->restart);
}

// Waits.
static void reload(struct kvq__task *t)
{
    kvq__task_take_turn_of(t, &t->jobs->limits.turns, "");
    t->change = change_new(t);
    if (!t->change) {
        snprintf(t->text, sizeof t->text, "no memory to read the configuration again");
        t->rc = KVQ_E_NO_MEMORY;
        kvq__log(KVQ_LOG_ERROR, "reload_failed", "error=\"%s\"", t->text);
        return;
    }
    kvq__task_at_work(t, read_config);
    if (t->rc == 0)
        put_in_effect(t);
    log_reload(t);
    change_free(t->change);
    t->change = NULL;
}

// ---- For a signal ----

static void end_reload(struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    bool again = jobs->reload_again;
    free(t);
    jobs->reloading = jobs->reload_again = false;
    if (again)
        kvq__jobs_reload(jobs);
}

void kvq__jobs_reload(struct kvq__jobs *jobs)
{
    if (jobs->reloading || jobs->ended) {
        jobs->reload_again = !jobs->ended;
        return;
    }
    struct kvq__task *t = calloc(1, sizeof *t);
    if (!t || kvq__task_make(jobs, t) < 0) {
        kvq__log(KVQ_LOG_ERROR, "reload_failed", "error=\"no memory\"");
        free(t);
        return;
    }
    t->done = end_reload;
    t->doing = "reading the configuration again";
    jobs->reloading = true;
    kvq__task_start(t, reload);
}
