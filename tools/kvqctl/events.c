// SPDX-License-Identifier: Apache-2.0
// kvqctl events: a line for each event of the daemon, over its restarts. The daemon numbers its
// events and keeps the last ones, so looking for new ones now and then misses none, or sees by the
// numbers how many.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "proto/nearest.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/table.h"
#include "tools/kvqctl/transport.h"

const char *const kvq__ctl_event_kinds[] = {
    "session_opened",  "session_closed",   "session_dropped",
    "session_moved",   "session_parked",   "session_fetched",
    "session_saved",   "session_restored", "session_pushed",
    "session_pulled",  "prefix_restored",  "prefix_evicted",
    "client_attached", "client_gone",      "client_stalled",
    "memory_full",     "quota_reached",    "gpu_refused",
    "request_refused", "storage_full",     "storage_failed",
    "storage_damaged", "not_restored",     "not_parked",
    "remote_failed",   "draining",         NULL,
};

enum { N_KINDS = sizeof kvq__ctl_event_kinds / sizeof *kvq__ctl_event_kinds - 1 };

static const double LOOK_SECONDS = 0.25;

// Which are wanted.
struct wanted {
    size_t n; // of kinds; 0: all
    const char *kinds[N_KINDS + 1];
    uint64_t since_ms; // of the epoch
};

static uint64_t wall_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int unknown_kind(const char *given)
{
    const char *best = NULL;
    for (size_t i = 0; i < N_KINDS; i++)
        if (kvq_word_resembles(given, kvq__ctl_event_kinds[i]) &&
            (!best ||
             kvq_word_distance(given, kvq__ctl_event_kinds[i]) < kvq_word_distance(given, best)))
            best = kvq__ctl_event_kinds[i];
    fprintf(stderr, "kvqctl: there are no events of kind '%s'", kvq__ctl_clean(given));
    if (best)
        fprintf(stderr, "; did you mean '%s'?\n", best);
    else
        fprintf(stderr, "; the kinds are:\n");
    for (size_t i = 0; !best && i < N_KINDS; i++)
        fprintf(stderr, "  %s\n", kvq__ctl_event_kinds[i]);
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
        while (i < N_KINDS && strcmp(name, kvq__ctl_event_kinds[i]) != 0)
            i++;
        if (i == N_KINDS)
            return unknown_kind(name);
        if (wanted->n < N_KINDS)
            wanted->kinds[wanted->n++] = kvq__ctl_event_kinds[i];
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

// An exit status: whether it could be printed.
static int print_event(const struct kvq__ctl *ctl, const Kvq__Event *e)
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
    return kvq__ctl_flush() ? KVQ_EXIT_OK : KVQ_EXIT_FAILED;
}

static bool is_wanted(const struct kvq__ctl *ctl, const struct wanted *wanted, const Kvq__Event *e)
{
    size_t i = 0;
    while (i < wanted->n && strcmp(e->kind, wanted->kinds[i]) != 0)
        i++;
    return (wanted->n == 0 || i < wanted->n) && (!ctl->ns || strcmp(ctl->ns, e->namespace_) == 0) &&
           e->unix_ms >= wanted->since_ms;
}

// ---- Looking for new ones ----

// How far this run has come.
struct following {
    uint64_t epoch; // of the daemon that was asked last; 0: none was
    uint64_t after; // number of the last event that was seen of it
    bool whole;     // all behind that are wanted
    unsigned long printed;
    bool gone; // the daemon; that was said
};

static int ask_events(struct kvq__ctl *ctl, uint64_t after, const Kvq__Reply **out)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListEvents command = KVQ__LIST_EVENTS__INIT;
    Kvq__Reply *reply;
    command.after = after;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_EVENTS;
    request.list_events = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_EVENTS, &reply);
    *out = reply;
    return result;
}

static bool is_enough(const struct kvq__ctl *ctl, const struct following *f)
{
    return ctl->count > 0 && f->printed >= ctl->count;
}

// Prints what is wanted of a reply. An exit status.
static int take_events(const struct kvq__ctl *ctl, const struct wanted *wanted, struct following *f,
                       const Kvq__EventList *list)
{
    int result = KVQ_EXIT_OK;
    uint64_t first = list->n_events ? list->events[0]->number : 0;
    if (first > f->after + 1 && f->whole)
        fprintf(stderr,
                "kvqctl: %s missed before the next one: more happened since the last look than the "
                "daemon keeps, or faster than it could note\n",
                kvq__ctl_count(first - f->after - 1, "event"));
    f->whole = true;
    for (size_t i = 0; i < list->n_events && result == KVQ_EXIT_OK && !is_enough(ctl, f); i++) {
        f->after = list->events[i]->number;
        if (is_wanted(ctl, wanted, list->events[i])) {
            result = print_event(ctl, list->events[i]);
            f->printed++;
        }
    }
    return result;
}

// The first answer of a daemon: where to begin.
static void begin(struct kvq__ctl *ctl, struct following *f, const Kvq__Reply *reply)
{
    bool first = f->epoch == 0, only_new = first && !ctl->since && !ctl->no_follow;
    f->epoch = reply->epoch;
    f->after = only_new ? reply->events->last : 0;
    f->whole = !first || only_new;
    if (!ctl->no_follow)
        fprintf(stderr,
                first ? "kvqctl: following the daemon %s\n"
                      : "kvqctl: a daemon is there again %s\n",
                kvq__ctl_where(ctl));
    f->gone = false;
}

// All that is new, until there is no more. An exit status.
static int look(struct kvq__ctl *ctl, const struct wanted *wanted, struct following *f)
{
    const Kvq__Reply *reply;
    int result = ask_events(ctl, f->after, &reply);
    if (result == KVQ_EXIT_OK && reply->epoch != f->epoch) {
        begin(ctl, f, reply);
        result = ask_events(ctl, f->after, &reply);
    }
    while (result == KVQ_EXIT_OK) {
        result = take_events(ctl, wanted, f, reply->events);
        if (result || f->after >= reply->events->last || reply->events->n_events == 0 ||
            is_enough(ctl, f))
            break;
        result = ask_events(ctl, f->after, &reply);
    }
    return result;
}

// Whether a daemon answers; says once that it is gone.
static bool is_there(struct kvq__ctl *ctl, struct following *f)
{
    char path[4096], text[KVQ_TEXT_BYTES] = "";
    struct kvq__transport_at at;
    kvq__ctl_at(ctl, &at, path, sizeof path);
    int result = kvq__transport_try(&at, ctl->timeout_ms, text);
    if (result == 0 || result == -EUSERS || result == -ETIMEDOUT) // it is there, and busy
        return true;
    kvq__transport_close(&ctl->transport);
    if (!f->gone)
        fprintf(stderr, "kvqctl: the daemon %s is gone; waiting until one is there again\n",
                kvq__ctl_where(ctl));
    f->gone = true;
    return false;
}

int kvq__ctl_events(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    struct wanted wanted = {0};
    struct following f = {0};
    uint64_t since_ms;
    int result = take_kinds(ctl->event_kinds, &wanted);
    if (result)
        return result;
    if (ctl->since && !kvq__ctl_parse_duration(ctl->since, &since_ms))
        return kvq__ctl_bad_usage("--since is a duration with its unit, as 90s, 10min or 2h, not",
                                  ctl->since);
    if (ctl->since)
        wanted.since_ms = wall_ms() > since_ms ? wall_ms() - since_ms : 0;
    result = kvq__ctl_catch_stop(ctl);
    result = result ? result : kvq__ctl_check_namespace(ctl);
    if (result == KVQ_EXIT_OK)
        result = look(ctl, &wanted, &f);
    while (result == KVQ_EXIT_OK && !ctl->no_follow && !is_enough(ctl, &f)) {
        if (kvq__ctl_wait(ctl, LOOK_SECONDS))
            break;
        if (is_there(ctl, &f))
            result = look(ctl, &wanted, &f);
        // It may have gone since; then the next look waits for another one.
        result = result == KVQ_EXIT_NO_DAEMON || result == KVQ_EXIT_TIMEOUT ? KVQ_EXIT_OK : result;
    }
    if (result == KVQ_EXIT_OK && ctl->no_follow && f.printed == 0 && !ctl->json)
        printf("no events\n");
    return result == KVQ_EXIT_STOPPED ? KVQ_EXIT_OK : result;
}
