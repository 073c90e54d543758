// SPDX-License-Identifier: Apache-2.0
// Commands about the daemon as a whole: status, formats, ping, version.
#include <cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "proto/json.h"
#include "tools/kvqctl/table.h"

static void print_namespaces(const Kvq__StatusReply *s)
{
    printf("\n%-20s %13s %20s %20s %20s\n", "NAMESPACE", "SESSIONS", "HOST", "GPUS", "DISK");
    for (size_t i = 0; i < s->n_namespaces; i++) {
        const Kvq__NamespaceStatus *n = s->namespaces[i];
        const Kvq__Quota *used = n->used, *limit = n->limit;
        if (used && limit)
            printf("%-20s %13s %20s %20s %20s\n", kvq__ctl_clean(n->name),
                   kvq__ctl_of(used->sessions, limit->sessions),
                   kvq__ctl_of_bytes(used->host_bytes, limit->host_bytes),
                   kvq__ctl_of_bytes(used->device_bytes, limit->device_bytes),
                   kvq__ctl_of_bytes(used->disk_bytes, limit->disk_bytes));
    }
}

static void print_gpu(const Kvq__PlaceStatus *g)
{
    printf("gpu        %s, %s: %s of %s in use, %s taken as extents, %s\n",
           kvq__ctl_clean(g->place), kvq__ctl_clean(g->name), kvq__ctl_bytes(g->used_bytes),
           kvq__ctl_bytes(g->pool_bytes), kvq__ctl_bytes(g->extent_bytes),
           kvq__ctl_count(g->sessions, "session"));
}

// Only what there was of it.
static void print_parked(const Kvq__StatusReply *s)
{
    uint64_t room = kvq__ctl_counter(s, "parked_room"), quota = kvq__ctl_counter(s, "parked_quota");
    uint64_t idle = kvq__ctl_counter(s, "parked_idle"), asked = kvq__ctl_counter(s, "parked_asked");
    uint64_t fetched = kvq__ctl_counter(s, "fetched"), failed = kvq__ctl_counter(s, "fetch_failed");
    double ms = (double)kvq__ctl_counter(s, "fetch_ns") / 1e6;
    if (room + quota + idle + asked + failed == 0)
        return;
    printf("to disk    %" PRIu64 " for room (%s), %" PRIu64 " at limits (%s), %" PRIu64
           " idle (%s), %" PRIu64 " as asked; %" PRIu64 " came back, in %.1f ms on average and "
           "%" PRIu64 " at most, %" PRIu64 " failed to; %s there now\n",
           room, kvq__ctl_bytes(kvq__ctl_counter(s, "parked_room_bytes")), quota,
           kvq__ctl_bytes(kvq__ctl_counter(s, "parked_quota_bytes")), idle,
           kvq__ctl_bytes(kvq__ctl_counter(s, "parked_idle_bytes")), asked, fetched,
           fetched ? ms / (double)fetched : 0.0, kvq__ctl_counter(s, "fetch_longest_ms"), failed,
           kvq__ctl_count(kvq__ctl_counter(s, "offloaded_now"), "session"));
}

static void print_evictions(const Kvq__StatusReply *s)
{
    uint64_t demoted = kvq__ctl_counter(s, "demoted");
    uint64_t prompts = kvq__ctl_counter(s, "prompts_packed");
    uint64_t waited = kvq__ctl_counter(s, "waited_for_room");
    uint64_t refused = kvq__ctl_counter(s, "refused_for_room");
    uint64_t failed = kvq__ctl_counter(s, "evictions_failed");
    if (demoted)
        printf("from GPUs  %" PRIu64 " to the host's memory (%s), %" PRIu64 " came back; %s there "
               "now\n",
               demoted, kvq__ctl_bytes(kvq__ctl_counter(s, "demoted_bytes")),
               kvq__ctl_counter(s, "promoted"),
               kvq__ctl_count(kvq__ctl_counter(s, "demoted_now"), "session"));
    if (prompts)
        printf("prompts    %" PRIu64 " packed before %s, for room (%s)\n", prompts,
               prompts == 1 ? "its end" : "their ends",
               kvq__ctl_bytes(kvq__ctl_counter(s, "prompts_packed_bytes")));
    if (waited + refused + failed)
        printf("for room   %s waited, %" PRIu64 " waiting now, %" PRIu64
               " refused; %s could not go\n",
               kvq__ctl_count(waited, "request"), kvq__ctl_counter(s, "waiting_for_room_now"),
               refused, kvq__ctl_count(failed, "session"));
}

static void print_status(const Kvq__StatusReply *s)
{
    double share = s->pool_bytes ? 100.0 * (double)s->pool_used_bytes / (double)s->pool_bytes : 0;
    printf("kvqd %s, pid %" PRIu64 ", up %s%s\n", kvq__ctl_clean(s->version), s->pid,
           kvq__ctl_duration(s->uptime_ms), s->draining ? ", shutting down" : "");
    printf("runs in    %s\n", kvq__ctl_clean(s->runtime_dir));
    printf("backend    %s (%s), %s\n", kvq__ctl_clean(s->backend), kvq__ctl_clean(s->isa),
           kvq__ctl_count(s->workers, "worker"));
    printf("memory     %s of %s in use (%.1f%%), %s taken as extents, largest free piece %s\n",
           kvq__ctl_bytes(s->pool_used_bytes), kvq__ctl_bytes(s->pool_bytes), share,
           kvq__ctl_bytes(s->pool_extent_bytes), kvq__ctl_bytes(s->pool_largest_free));
    if (s->pool_huge_bytes)
        printf("           %s of the extents are in huge pages that were set aside\n",
               kvq__ctl_bytes(s->pool_huge_bytes));
    for (size_t i = 0; i < s->n_gpus; i++)
        print_gpu(s->gpus[i]);
    printf("holds      %s with %s, for %s\n", kvq__ctl_count(s->sessions, "session"),
           kvq__ctl_count(s->tokens, "token"), kvq__ctl_count(s->clients, "client"));
    printf("so far     %s, %s, %s appended, %s refused, %s kicked\n",
           kvq__ctl_count(kvq__ctl_counter(s, "steps"), "step"),
           kvq__ctl_count(kvq__ctl_counter(s, "attends"), "attention"),
           kvq__ctl_count(kvq__ctl_counter(s, "appended_tokens"), "token"),
           kvq__ctl_count(kvq__ctl_counter(s, "refused_requests"), "request"),
           kvq__ctl_count(kvq__ctl_counter(s, "kicked_clients"), "client"));
    print_parked(s);
    print_evictions(s);
    if (s->n_namespaces)
        print_namespaces(s);
}

static const struct kvq__ctl_kind namespaces =
    KVQ__CTL_KIND(STATUS_REPLY, Kvq__StatusReply, namespaces, "namespaces", "");

int kvq__ctl_ask_status(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Status command = KVQ__STATUS__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_STATUS;
    request.status = &command;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &namespaces, list);
}

Kvq__StatusReply *kvq__ctl_status_of(const struct kvq__ctl_list *list)
{
    Kvq__StatusReply *s = list->reply->status_reply;
    s->namespaces = (Kvq__NamespaceStatus **)list->elements;
    s->n_namespaces = list->n;
    s->truncated = list->truncated;
    s->next = NULL;
    return s;
}

int kvq__ctl_status(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    struct kvq__ctl_list list;
    int result = kvq__ctl_ask_status(ctl, &list);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&kvq__ctl_status_of(&list)->base);
    else
        print_status(kvq__ctl_status_of(&list));
    return kvq__ctl_list_end(&list, &namespaces);
}

static const char *row_text(const ProtobufCMessage *message)
{
    const Kvq__Format *f = (const Kvq__Format *)message;
    return strcmp(f->name, f->row) == 0 ? "" : f->row;
}

static const char *marked_name(const ProtobufCMessage *message)
{
    const Kvq__Format *f = (const Kvq__Format *)message;
    return kvq__ctl_text("%s%s", kvq__ctl_clean(f->name), f->recommended ? " *" : "");
}

static void explain_mark(ProtobufCMessage *const *elements, size_t n)
{
    bool any = false;
    for (size_t i = 0; i < n; i++)
        any = any || ((const Kvq__Format *)elements[i])->recommended;
    if (any)
        printf("* begin with these; quality.md in share/doc/kvqd says which is for what\n");
}

#define COLUMN(NAME, HEADING, FIELD, SHOW, WIDTH)                                                  \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH)                                                                           \
    }
#define FADING(NAME, HEADING, FIELD, SHOW, WIDTH)                                                  \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH), .fades = true                                                            \
    }
static const struct kvq__ctl_column columns[] = {
    {.name = "format", .heading = "FORMAT", .field = "name", .width = -18, .people = marked_name},
    FADING("layers", "LAYERS", "layers", TEXT, -7),
    {.name = "is", .heading = "IS", .text = row_text, .width = -16, .fades = true},
    COLUMN("bits", "BITS", "bits_per_value", 3_PLACES, 6),
    FADING("fast", "FAST", "fast", YES_NO, 4),
    FADING("gpu", "GPU", "gpu_loop", YES_NO, 3),
    FADING("prefix", "PREFIX", "shares_prefix", YES_NO, 6),
    {.name = "needs",
     .heading = "NEEDS",
     .field = "needs",
     .width = -8,
     .apart = true,
     .fades = true},
    COLUMN("unit", "UNIT", "unit_tokens", NUMBER, 5),
    COLUMN("recent", "RECENT", "recent_tokens", NUMBER, 7),
    COLUMN("sink", "SINK", "sink_tokens", NUMBER, 5),
    {.name = "source", .heading = "SOURCE", .field = "source", .width = -6, .apart = true},
    {.name = "own",
     .heading = "OWN",
     .field = "own",
     .show = KVQ__CTL_AS_YES_NO,
     .width = 3,
     .extra = true},
    {.name = "recommended",
     .heading = "RECOMMENDED",
     .field = "recommended",
     .show = KVQ__CTL_AS_YES_NO,
     .width = 11,
     .extra = true},
};

const struct kvq__ctl_table kvq__ctl_formats = {KVQ__CTL_TABLE(columns, "formats", NULL, NULL),
                                                .note = explain_mark};

int kvq__ctl_format_list(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    static const struct kvq__ctl_kind formats =
        KVQ__CTL_KIND(FORMATS, Kvq__FormatList, formats, "formats", "");
    Kvq__ListFormats command = KVQ__LIST_FORMATS__INIT;
    struct kvq__ctl_list list;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_FORMATS;
    request.list_formats = &command;
    int result = kvq__ctl_ask_list(ctl, &request, &command.cursor, &formats, &list);
    if (result)
        return result;
    return kvq__ctl_show_list(ctl, &list, &formats, &kvq__ctl_formats);
}

// Sends a ping. On success *microseconds is the round trip.
static int ask_pong(struct kvq__ctl *ctl, Kvq__Reply **reply, double *microseconds)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Ping command = KVQ__PING__INIT;
    struct timespec before, after;
    request.command_case = KVQ__REQUEST__COMMAND_PING;
    request.ping = &command;
    clock_gettime(CLOCK_MONOTONIC, &before);
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_PONG, reply);
    clock_gettime(CLOCK_MONOTONIC, &after);
    *microseconds = (double)(after.tv_sec - before.tv_sec) * 1e6 +
                    (double)(after.tv_nsec - before.tv_nsec) / 1e3;
    return result;
}

static void print_pong_json(const Kvq__Pong *pong, double us)
{
    cJSON *json = kvq_json_of_message(&pong->base);
    cJSON_AddNumberToObject(json, "round_trip_us", us); // which no message has
    kvq__ctl_print_and_free(json);
}

int kvq__ctl_ping(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Reply *reply;
    double us;
    // The first round trip pays for connecting; the second one is what is reported.
    int result = ask_pong(ctl, &reply, &us);
    if (result == 0)
        result = ask_pong(ctl, &reply, &us);
    if (result)
        return result;
    if (ctl->json)
        print_pong_json(reply->pong, us);
    else
        printf("kvqd %s, pid %" PRIu64 ", up %s, answered in %.0f us\n",
               kvq__ctl_clean(reply->pong->version), reply->pong->pid,
               kvq__ctl_duration(reply->pong->uptime_ms), us);
    return KVQ_EXIT_OK;
}

int kvq__ctl_version(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Reply *reply;
    double us;
    int result = ask_pong(ctl, &reply, &us);
    const char *theirs = result ? NULL : reply->pong->version;
    if (ctl->json)
        kvq__ctl_print_versions(KVQ_VERSION, theirs);
    else
        printf("kvqctl %s\nkvqd   %s\n", KVQ_VERSION,
               theirs ? kvq__ctl_clean(theirs) : "not reached");
    return result;
}
