// SPDX-License-Identifier: Apache-2.0
// kvqctl events: a line for each event that the daemon publishes, over restarts of the daemon.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "proto/shm.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/transport.h"

// The kinds of daemon/core/base/event_kinds.h.
static const char *const kinds[] = {
    "session_opened",  "session_closed", "session_dropped",  "session_moved",  "session_parked",
    "session_fetched", "session_saved",  "session_restored", "session_pushed", "session_pulled",
    "prefix_restored", "prefix_evicted", "client_attached",  "client_gone",    "client_stalled",
    "memory_full",     "quota_reached",  "gpu_refused",      "storage_full",   "storage_failed",
    "storage_damaged", "remote_failed",  "draining",
};

enum { N_KINDS = sizeof kinds / sizeof *kinds };

// Which kinds are wanted.
struct wanted {
    size_t n;
    const char *kinds[N_KINDS + 1];
};

static int unknown_kind(const char *given)
{
    const char *best = NULL;
    for (size_t i = 0; i < N_KINDS; i++)
        if (kvq__ctl_resembles(given, kinds[i]) &&
            (!best || kvq__ctl_distance(given, kinds[i]) < kvq__ctl_distance(given, best)))
            best = kinds[i];
    fprintf(stderr, "kvqctl: there are no events of kind '%s'", kvq__ctl_clean(given));
    if (best)
        fprintf(stderr, "; did you mean '%s'?\n", best);
    else
        fprintf(stderr, "; the kinds are:\n");
    for (size_t i = 0; !best && i < N_KINDS; i++)
        fprintf(stderr, "  %s\n", kinds[i]);
    return KVQ_EXIT_USAGE;
}

// Takes "K,K". None given: all.
static int take_kinds(const char *text, struct wanted *wanted)
{
    wanted->n = 0;
    while (text && *text) {
        char name[64];
        size_t length = strcspn(text, ","), i = 0;
        snprintf(name, sizeof name, "%.*s", (int)length, text);
        while (i < N_KINDS && strcmp(name, kinds[i]) != 0)
            i++;
        if (i == N_KINDS)
            return unknown_kind(name);
        if (wanted->n < N_KINDS)
            wanted->kinds[wanted->n++] = kinds[i];
        text += length + (text[length] == ',');
    }
    return KVQ_EXIT_OK;
}

// As the shell's user reads clocks, to the millisecond.
static void format_time(uint64_t unix_ms, char out[32])
{
    time_t at = (time_t)(unix_ms / 1000);
    struct tm tm;
    size_t used = strftime(out, 32, "%Y-%m-%d %H:%M:%S", localtime_r(&at, &tm));
    snprintf(out + used, 32 - used, ".%03u", (unsigned)(unix_ms % 1000));
}

static void print_event(const struct kvq__ctl *ctl, const Kvq__Event *e)
{
    char time[32], client[32] = "";
    if (ctl->json) {
        kvq__ctl_print_json_message(&e->base);
    } else {
        format_time(e->unix_ms, time);
        if (e->client)
            snprintf(client, sizeof client, "client %" PRIu64 "%s", e->client,
                     *e->text ? ": " : "");
        printf("%s  %-16s %-12s %-20s %s%s\n", time, kvq__ctl_clean(e->kind),
               *e->namespace_ ? kvq__ctl_clean(e->namespace_) : "-",
               *e->session ? kvq__ctl_clean(e->session) : "-", client, kvq__ctl_clean(e->text));
    }
    fflush(stdout);
}

// A subscription's topic is the beginning of a kind, and says nothing of namespaces.
static bool is_wanted(const struct kvq__ctl *ctl, const struct wanted *wanted, const Kvq__Event *e)
{
    size_t i = 0;
    while (i < wanted->n && strcmp(e->kind, wanted->kinds[i]) != 0)
        i++;
    return (wanted->n == 0 || i < wanted->n) && (!ctl->ns || strcmp(ctl->ns, e->namespace_) == 0);
}

// Prints one message, if it is wanted. Whether it was.
static bool take(const struct kvq__ctl *ctl, const struct wanted *wanted, const uint8_t *data,
                 size_t size)
{
    static uint8_t memory[KVQ_WIRE_ARENA];
    char text[KVQ_TEXT_BYTES];
    struct kvq_arena arena;
    Kvq__Event *event;
    kvq_arena_init(&arena, memory, sizeof memory);
    if (kvq_event_unpack(data, size, &arena, &event, text) != 0) {
        fprintf(stderr, "kvqctl: an event cannot be read: %s\n", kvq__ctl_clean(text));
        return false;
    }
    if (!is_wanted(ctl, wanted, event))
        return false;
    print_event(ctl, event);
    return true;
}

static int follow(const struct kvq__ctl *ctl, const struct wanted *wanted,
                  struct kvq__subscription *s)
{
    static uint8_t data[KVQ_MAX_MESSAGE];
    unsigned long seen = 0;
    bool gone = false;
    while (ctl->count == 0 || seen < ctl->count) {
        int size = kvq__subscription_next(s, data, sizeof data, ctl->stop_fd);
        if (size == -ECANCELED)
            break;
        if (size == -EISCONN) {
            fprintf(stderr,
                    gone ? "kvqctl: a daemon is there again; events of meanwhile are not\n"
                         : "kvqctl: following the daemon in %s\n",
                    ctl->runtime_dir);
            gone = false;
        } else if (size == -ENOTCONN) {
            fprintf(stderr, "kvqctl: the daemon in %s is gone; waiting until one is there again\n",
                    ctl->runtime_dir);
            gone = true;
        } else if (size < 0) {
            fprintf(stderr, "kvqctl: events cannot be received: %s\n", strerror(-size));
            return KVQ_EXIT_FAILED;
        } else if (take(ctl, wanted, data, (size_t)size)) {
            seen++;
        }
    }
    return KVQ_EXIT_OK;
}

int kvq__ctl_events(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    char path[4096], text[KVQ_TEXT_BYTES] = "";
    struct wanted wanted;
    struct kvq__subscription *s = NULL;
    int result = take_kinds(ctl->event_kinds, &wanted);
    if (result)
        return result;
    snprintf(path, sizeof path, "%s/" KVQ_EVENTS_SOCKET, ctl->runtime_dir);
    const struct kvq__transport_at at = {.path = path};
    int error = kvq__transport_try(&at, ctl->timeout_ms, text);
    if (error == -EACCES || error == -EPERM) {
        fprintf(stderr,
                "kvqctl: %s: only root and the user that kvqd runs as may follow events, since "
                "events name sessions of every user\n",
                path);
        return KVQ_EXIT_PERMISSION;
    }
    if (error)
        return kvq__ctl_explain_connection(ctl, path, error, text);
    result = kvq__ctl_catch_stop(ctl);
    error = result ? 0 : kvq__subscription_open(&s, path, wanted.kinds, wanted.n);
    if (result || error) {
        fprintf(stderr, "kvqctl: events cannot be followed: %s\n",
                strerror(error ? -error : errno));
        return KVQ_EXIT_FAILED;
    }
    result = follow(ctl, &wanted, s);
    kvq__subscription_close(&s);
    return result;
}
