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
#include "daemon/runtime/service.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum {
    LOG_WORDS = 700,
    MOST_CHANGES = 256,     // in a reply,
    MOST_BYTES = 48 * 1024, // and their texts
};

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
    Kvq__ConfigChanges *told; // the reply's; NULL: nobody is told
    size_t told_bytes;
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

// A value for a reply, whose texts have KVQ_TEXT_BYTES; ".." at its end says that it was cut.
static char *value_text(struct kvq_arena *arena, const char *value)
{
    char cut[KVQ_TEXT_BYTES];
    int room = (int)sizeof cut - (int)strlen(" ..") - 1;
    if (strlen(value) < sizeof cut)
        return kvq_arena_text(arena, value);
    snprintf(cut, sizeof cut, "%.*s ..", room, value);
    return kvq_arena_text(arena, cut);
}

static void tell_change(struct kvq__change *c, const struct kvq__config_change *change)
{
    Kvq__ConfigChanges *told = c->told;
    struct kvq_arena *arena = c->task->arena;
    Kvq__ConfigChange *m = NULL;
    size_t bytes = strlen(change->name) + strlen(change->before) + strlen(change->after) + 16;
    bool fits = told->n_changed + told->n_needs_restart < MOST_CHANGES &&
                c->told_bytes + bytes <= MOST_BYTES;
    if (fits)
        m = kvq_arena_alloc(arena, sizeof *m);
    if (!m) {
        told->left_out++;
        return;
    }
    c->told_bytes += bytes;
    kvq__config_change__init(m);
    m->name = kvq_arena_text(arena, change->name);
    m->before = value_text(arena, change->before);
    m->after = value_text(arena, change->after);
    if (change->live)
        told->changed[told->n_changed++] = m;
    else
        told->needs_restart[told->n_needs_restart++] = m;
}

static void note_change(void *context, const struct kvq__config_change *change)
{
    struct kvq__change *c = context;
    add_words(change->live ? &c->changed : &c->restart, change);
    if (c->told)
        tell_change(c, change);
}

// Makes the task's reply, if it has one, ready to be told of changes.
static int open_reply(struct kvq__task *t)
{
    if (!t->reply)
        return 0;
    Kvq__ConfigChanges *told = kvq_arena_alloc(t->arena, sizeof *told);
    Kvq__ConfigChange **lists = kvq_arena_alloc(t->arena, 2 * MOST_CHANGES * sizeof *lists);
    if (!told || !lists)
        return KVQ_E_NO_MEMORY;
    kvq__config_changes__init(told);
    told->changed = lists;
    told->needs_restart = lists + MOST_CHANGES;
    t->change->told = told;
    return 0;
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
    char text[KVQ_TEXT_BYTES] = "", quoted[KVQ_TEXT_BYTES + 16], path[KVQ_CONFIG_PATH + 16];
    if (strcmp(config->log_file, c->next->log_file) != 0)
        kvq__log(
            KVQ_LOG_ALWAYS, "log_moved", "to=%s",
            kvq__log_quote(path, sizeof path, *c->next->log_file ? c->next->log_file : "(stderr)"));
    kvq__config_adopt(config, c->next);
    kvq__log_use(c->log_fd, (enum kvq_log_level)config->log_level);
    c->log_fd = -1;
    if (kvq__jobs_tell_limits(t->jobs, text) < 0)
        kvq__log(KVQ_LOG_ERROR, "disk_limits", "text=%s",
                 kvq__log_quote(quoted, sizeof quoted, text));
}

static void check_log(struct kvq__task *t)
{
    t->rc = kvq__log_check(t->change->next->log_file, t->text);
}

static void open_log(struct kvq__task *t)
{
    t->change->log_fd = kvq__log_prepare(t->change->next->log_file, t->text);
    t->rc = t->change->log_fd < 0 ? t->change->log_fd : 0;
}

// Notes in what the two differ, and makes of task->change->next what can be in effect of it.
static int merge_settings(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    const struct kvq_config *running = &t->jobs->server->config;
    kvq__config_compare(running, c->next, note_change, c);
    int rc = kvq__config_merge(c->next, running, t->text);
    return rc ? rc : kvq__config_check_memory(c->next, t->text);
}

// Puts task->change->next in effect, or none of it. Waits.
static void apply_settings(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    t->rc = merge_settings(t);
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
    if (t->rc == 0)
        t->rc = kvq__config_check_files(t->change->next, t->text);
}

static void open_old_log(struct kvq__task *t)
{
    char text[KVQ_TEXT_BYTES]; // t->text says already why nothing changes
    t->change->log_fd = kvq__log_prepare(t->jobs->server->config.log_file, text);
}

// Nothing changes, but a log that was renamed goes on under its name. Waits.
static void keep_log(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    int why = t->rc;
    if (!c)
        return;
    if (c->log_fd >= 0)
        close(c->log_fd);
    kvq__task_at_work(t, open_old_log);
    t->rc = why;
    if (c->log_fd < 0)
        return;
    kvq__log_use(c->log_fd, (enum kvq_log_level)t->jobs->server->config.log_level);
    c->log_fd = -1;
}

static void log_changes(const struct kvq__change *c)
{
    if (c->changed.used)
        log_words(KVQ_LOG_ALWAYS, "changed", "options", &c->changed);
    if (c->restart.used)
        log_words(KVQ_LOG_WARN, "needs_restart", "options", &c->restart);
}

static void log_reload(const struct kvq__task *t)
{
    char quoted[KVQ_TEXT_BYTES + 16], path[KVQ_CONFIG_PATH + 16];
    const char *file = t->jobs->server->config.file;
    if (t->rc < 0) {
        kvq__log(KVQ_LOG_ERROR, "reload_failed", "error=%s text=\"nothing has changed\"",
                 kvq__log_quote(quoted, sizeof quoted, t->text));
        return;
    }
    kvq__log(KVQ_LOG_INFO, "reloaded", "file=%s more_files=%u",
             kvq__log_quote(path, sizeof path, *file ? file : "none"),
             t->jobs->server->config.n_more_files);
    log_changes(t->change);
}

// Takes its turn, and is ready to change something; or task->rc < 0. Waits.
static void begin_change(struct kvq__task *t)
{
    kvq__task_take_turn_of(t, &t->jobs->limits.turns, "");
    t->change = change_new(t);
    t->rc = t->change ? open_reply(t) : KVQ_E_NO_MEMORY;
    if (t->rc < 0)
        snprintf(t->text, sizeof t->text, "no memory to change the configuration");
}

static void end_settings(struct kvq__task *t)
{
    struct kvq__change *c = t->change;
    if (t->rc == 0 && c->told) {
        c->told->file = kvq_arena_text(t->arena, t->jobs->server->config.file);
        t->reply->config_changes = c->told;
        t->reply->result_case = KVQ__REPLY__RESULT_CONFIG_CHANGES;
    }
    if (c)
        change_free(c);
    t->change = NULL;
}

void kvq__jobs_reload_config(struct kvq__task *t)
{
    struct kvq__service *service = t->jobs->server->service;
    begin_change(t);
    kvq__service_reloading(service);
    if (t->rc == 0)
        kvq__task_at_work(t, read_config);
    if (t->rc == 0)
        apply_settings(t);
    if (t->rc < 0)
        keep_log(t);
    log_reload(t);
    kvq__service_reloaded(service);
    end_settings(t);
}

// The same up to where something would change.
void kvq__jobs_look_at_reload(struct kvq__task *t)
{
    begin_change(t);
    if (t->rc == 0)
        kvq__task_at_work(t, read_config);
    if (t->rc == 0)
        t->rc = merge_settings(t);
    if (t->rc == 0)
        kvq__task_at_work(t, check_log);
    end_settings(t);
}

// ---- One option ----

void kvq__jobs_set_config(struct kvq__task *t)
{
    const Kvq__SetConfig *set = t->request->set_config;
    begin_change(t);
    if (t->rc == 0)
        t->rc = kvq__config_set(t->change->next, set->name, set->value, t->text);
    if (t->rc == 0)
        t->rc = kvq__config_resolve(t->change->next, t->text);
    if (t->rc == 0)
        apply_settings(t);
    if (t->rc == 0)
        log_changes(t->change);
    end_settings(t);
}

static Kvq__ConfigOption *option_message(struct kvq_arena *arena,
                                         const struct kvq__option_text *option)
{
    Kvq__ConfigOption *m = kvq_arena_alloc(arena, sizeof *m);
    if (!m)
        return NULL;
    kvq__config_option__init(m);
    m->name = kvq_arena_text(arena, option->name);
    m->value = value_text(arena, option->value);
    m->initial = value_text(arena, option->initial);
    m->source = kvq_arena_text(arena, option->source);
    m->live = option->live;
    return m;
}

void kvq__jobs_get_config(struct kvq__task *t)
{
    const struct kvq_config *config = &t->jobs->server->config;
    const char *name = t->request->get_config->name;
    struct kvq__option_text option;
    int only = *name ? kvq__config_find(name, t->text) : -1;
    Kvq__ConfigReply *reply = kvq_arena_alloc(t->arena, sizeof *reply);
    t->rc = *name && only < 0 ? only : 0;
    Kvq__ConfigOption **list = kvq_arena_alloc(t->arena, KVQ_CONFIG_OPTIONS * sizeof *list);
    if (t->rc < 0)
        return;
    t->rc = reply && list ? 0 : KVQ_E_NO_MEMORY;
    if (t->rc < 0)
        return;
    kvq__config_reply__init(reply);
    reply->options = list;
    reply->file = kvq_arena_text(t->arena, config->file);
    for (uint32_t i = only < 0 ? 0 : (uint32_t)only; kvq__config_option(config, i, &option); i++) {
        Kvq__ConfigOption *m = option_message(t->arena, &option);
        if (m)
            list[reply->n_options++] = m;
        if (only >= 0)
            break;
    }
    t->reply->config = reply;
    t->reply->result_case = KVQ__REPLY__RESULT_CONFIG;
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
    kvq__task_start(t, kvq__jobs_reload_config);
}
