// SPDX-License-Identifier: Apache-2.0
//
// Questions to the core. One at a time is at the poller, for one page or piece; what came back is
// written out on the loop's thread, and the next page is asked for, so that a scrape or a long list
// holds up nobody's attention.
//
//   WAITING --front of the queue--> AT_POLLER --last page is back--> ANSWERED
//                                      ^    |
//                                      `----' next page
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/http/internal.h"
#include "proto/clock.h"
#include "proto/json.h"

static const char type_json[] = "application/json";

// How a list is asked for.
struct list {
    Kvq__Request__CommandCase command;
    const ProtobufCMessageDescriptor *request;
};
static const struct list lists[] = {
    [KVQ__HTTP_STATUS] = {KVQ__REQUEST__COMMAND_STATUS, NULL},
    [KVQ__HTTP_SESSIONS] = {KVQ__REQUEST__COMMAND_LIST_SESSIONS, &kvq__list_sessions__descriptor},
    [KVQ__HTTP_CLIENTS] = {KVQ__REQUEST__COMMAND_LIST_CLIENTS, &kvq__list_clients__descriptor},
    [KVQ__HTTP_PREFIXES] = {KVQ__REQUEST__COMMAND_LIST_PREFIXES, &kvq__list_prefixes__descriptor},
    [KVQ__HTTP_QUOTAS] = {KVQ__REQUEST__COMMAND_LIST_QUOTAS, &kvq__list_quotas__descriptor},
};

// What is gathered for an answer, piece by piece.
struct gathering {
    FILE *out;
    Kvq__Reply reply;
    Kvq__Cursor cursor; // where the next page begins
    bool more;
    uint32_t elements;
    struct kvq__snapshot snapshot;
    uint64_t namespaces_after, prefixes_after;
};

// ---- On the poller's thread ----

static void set_field(ProtobufCMessage *message, const char *name, void *value)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(message->descriptor, name);
    assert(field && field->type == PROTOBUF_C_TYPE_MESSAGE);
    memcpy((char *)message + field->offset, &value, sizeof value);
}

static void run_list(struct kvq__http_ask *ask)
{
    struct gathering *g = ask->part;
    struct kvq__server *server = ask->http->server;
    struct kvq_arena *arena = &ask->http->asking.arena;
    const struct list *list = &lists[ask->topic];
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = &ask->peer,
                              .now_ns = kvq_now_ns()};
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Status status = KVQ__STATUS__INIT;
    arena->used = 0;
    arena->full = false;
    kvq__reply__init(&g->reply);
    request.command_case = list->command;
    request.status = &status;
    if (list->request) {
        ProtobufCMessage *message = kvq_arena_alloc(arena, list->request->sizeof_message);
        assert(message); // the arena is empty
        list->request->message_init(message);
        if (g->more)
            set_field(message, "cursor", &g->cursor);
        request.list_sessions = (Kvq__ListSessions *)message; // a union of pointers
    }
    kvq__dispatch_run(&d, &request, arena, &g->reply);
}

// Room for KVQ__HTTP_NAMESPACES more elements. False: there is no memory.
static bool make_room_in(void **array, uint32_t n, uint32_t *room, size_t bytes)
{
    if (n + KVQ__HTTP_NAMESPACES <= *room)
        return true;
    uint32_t more = 2 * *room + KVQ__HTTP_NAMESPACES;
    void *grown = realloc(*array, more * bytes);
    if (!grown)
        return false;
    *array = grown;
    *room = more;
    return true;
}

// Metrics are of all namespaces, whoever asks: their names are not secret, sessions' names are.
static const struct kvq__peer everybody = {.admin = true};

static void take_namespaces(struct kvq__core *core, struct gathering *g)
{
    struct kvq__snapshot *s = &g->snapshot;
    uint32_t got = kvq__core_namespaces(core, &everybody, g->namespaces_after,
                                        s->namespaces + s->n_namespaces, KVQ__HTTP_NAMESPACES);
    s->n_namespaces += got;
    g->more = got == KVQ__HTTP_NAMESPACES;
    if (got)
        g->namespaces_after = s->namespaces[s->n_namespaces - 1].number;
    got = kvq__core_prefixes(core, &everybody, g->prefixes_after, s->prefixes + s->n_prefixes,
                             KVQ__HTTP_NAMESPACES);
    s->n_prefixes += got;
    g->more |= got == KVQ__HTTP_NAMESPACES;
    if (got)
        g->prefixes_after = s->prefixes[s->n_prefixes - 1].ns_number;
}

static void run_metrics(struct kvq__http_ask *ask)
{
    struct gathering *g = ask->part;
    struct kvq__server *server = ask->http->server;
    struct kvq__snapshot *s = &g->snapshot;
    kvq__core_status(server->core, &s->status);
    kvq__core_counts(server->core, &s->counts);
    s->refused[KVQ__HTTP_RING] = *kvq__core_refused(server->core);
    s->n_places = kvq__core_places(server->core, s->places);
    s->latencies = *kvq__poller_latencies(server->poller);
    const struct kvq__pack_error *errors;
    s->n_pack_errors = kvq__core_pack_errors(server->core, &errors);
    memcpy(s->pack_errors, errors, s->n_pack_errors * sizeof *errors);
    s->identity = &server->identity;
    s->uptime_ns = kvq_now_ns() - server->identity.start_ns;
    take_namespaces(server->core, g);
}

static void ask_back(struct kvq__mail *mail);

static void run_ask(struct kvq__mail *mail)
{
    struct kvq__http_ask *ask = (struct kvq__http_ask *)mail; // its first member
    if (ask->topic <= KVQ__HTTP_OPEN_METRICS)
        run_metrics(ask);
    else if (ask->topic >= KVQ__HTTP_STATUS)
        run_list(ask);
    kvq__mailbox_post(&ask->http->server->box, mail, ask_back);
}

// ---- On the loop's thread ----

static void free_ask(struct kvq__http_ask *ask)
{
    struct gathering *g = ask->part;
    if (g) {
        if (g->out)
            fclose(g->out);
        free(g->snapshot.namespaces);
        free(g->snapshot.prefixes);
        free(g);
    }
    free(ask->text.at);
    free(ask);
}

static void refuse(struct kvq__http_ask *ask, int status, const char *text)
{
    struct gathering *g = ask->part;
    cJSON *json = cJSON_CreateObject();
    if (g->out)
        fclose(g->out);
    g->out = NULL;
    free(ask->text.at);
    cJSON_AddStringToObject(json, "error", text);
    ask->text.at = cJSON_PrintUnformatted(json);
    ask->text.n = ask->text.at ? strlen(ask->text.at) : 0;
    ask->status = status;
    ask->type = type_json;
    cJSON_Delete(json);
}

static void write_json(FILE *out, const ProtobufCMessage *message)
{
    cJSON *json = kvq_json_of_message(message);
    char *text = json ? cJSON_PrintUnformatted(json) : NULL;
    fputs(text ? text : "null", out);
    cJSON_free(text);
    cJSON_Delete(json);
}

// Writes a page of a list. Whether another one follows.
static bool write_page(struct gathering *g)
{
    // Of the union of results all members are pointers to messages.
    const ProtobufCMessage *page = &g->reply.sessions->base;
    const ProtobufCMessageDescriptor *d = page->descriptor;
    const ProtobufCFieldDescriptor *elements = &d->fields[0];
    const ProtobufCFieldDescriptor *next =
        protobuf_c_message_descriptor_get_field_by_name(d, "next");
    const char *base = (const char *)page;
    assert(elements->label == PROTOBUF_C_LABEL_REPEATED && next);
    size_t n = *(const size_t *)(base + elements->quantifier_offset);
    ProtobufCMessage *const *at = *(ProtobufCMessage * *const *)(base + elements->offset);
    for (size_t i = 0; i < n; i++) {
        fputs(g->elements++ ? ",\n" : "[", g->out);
        write_json(g->out, at[i]);
    }
    const Kvq__Cursor *cursor = *(const Kvq__Cursor *const *)(base + next->offset);
    g->more = cursor != NULL;
    if (cursor) {
        g->cursor = *cursor; // its texts are empty in lists of the core
        g->cursor.remote_namespace = g->cursor.remote_name = (char *)(uintptr_t) "";
    }
    return g->more;
}

// Writes out what has come back. Whether more is to be asked for.
static bool write_answer(struct kvq__http_ask *ask)
{
    struct gathering *g = ask->part;
    const struct kvq__server *server = ask->http->server;
    if (ask->topic >= KVQ__HTTP_STATUS && g->reply.status) {
        refuse(ask, MHD_HTTP_INTERNAL_SERVER_ERROR, g->reply.text);
        return false;
    }
    switch (ask->topic) {
    case KVQ__HTTP_METRICS:
    case KVQ__HTTP_OPEN_METRICS:
        if (g->more)
            return true;
        g->snapshot.store_times = kvq__jobs_times(server->jobs);
        g->snapshot.storage = &server->storage;
        g->snapshot.has_remote = server->config.remote_endpoint[0] != 0;
        g->snapshot.refused[KVQ__HTTP_ATTACH] = server->attach_refused;
        g->snapshot.refused[KVQ__HTTP_CONTROL] = server->control_refused;
        kvq__metrics_write(g->out, &g->snapshot, ask->topic == KVQ__HTTP_OPEN_METRICS);
        break;
    case KVQ__HTTP_HEALTH:
    case KVQ__HTTP_READY:
        ask->status = ask->topic == KVQ__HTTP_READY && server->draining
                          ? MHD_HTTP_SERVICE_UNAVAILABLE
                          : MHD_HTTP_OK;
        fprintf(g->out, "{\"live\":true,\"ready\":%s,\"draining\":%s}\n",
                server->draining ? "false" : "true", server->draining ? "true" : "false");
        break;
    case KVQ__HTTP_STATUS:
        write_json(g->out, &g->reply.status_reply->base);
        fputc('\n', g->out);
        break;
    case KVQ__HTTP_SESSIONS:
    case KVQ__HTTP_CLIENTS:
    case KVQ__HTTP_PREFIXES:
    case KVQ__HTTP_QUOTAS:
        if (write_page(g))
            return true;
        fputs(g->elements ? "]\n" : "[]\n", g->out);
        break;
    }
    return false;
}

static bool make_room(struct gathering *g)
{
    struct kvq__snapshot *s = &g->snapshot;
    return make_room_in((void **)&s->namespaces, s->n_namespaces, &s->room_namespaces,
                        sizeof *s->namespaces) &&
           make_room_in((void **)&s->prefixes, s->n_prefixes, &s->room_prefixes,
                        sizeof *s->prefixes);
}

static void send_next(struct kvq__http *http)
{
    struct kvq__http_asking *a = &http->asking;
    if (a->current || !http->open)
        return;
    struct kvq__http_ask *ask = TAILQ_FIRST(&a->waiting);
    if (!ask)
        return;
    TAILQ_REMOVE(&a->waiting, ask, link);
    a->current = ask;
    ask->at_poller = true;
    kvq__mailbox_post(kvq__poller_box(http->server->poller), &ask->mail, run_ask);
}

static void finish(struct kvq__http_ask *ask)
{
    struct gathering *g = ask->part;
    bool bad = g->out && (fflush(g->out) != 0 || ferror(g->out));
    if (g->out)
        fclose(g->out);
    g->out = NULL;
    if (bad || !ask->text.at)
        refuse(ask, MHD_HTTP_INTERNAL_SERVER_ERROR, "no memory for the answer");
    ask->answered = true;
    kvq__http_answered(ask);
}

static void ask_back(struct kvq__mail *mail)
{
    struct kvq__http_ask *ask = (struct kvq__http_ask *)mail;
    struct kvq__http *http = ask->http;
    assert(ask->at_poller && http->asking.current == ask);
    if (!ask->connection || ask->late || !http->open) { // nobody waits any more
        http->asking.current = NULL;
        ask->at_poller = false;
        ask->answered = true;
        if (!ask->connection)
            free_ask(ask); // else its connection does, which has its refusal
    } else {
        bool more = write_answer(ask);
        if (more && make_room(ask->part)) {
            kvq__mailbox_post(kvq__poller_box(http->server->poller), mail, run_ask);
            return;
        }
        if (more)
            refuse(ask, MHD_HTTP_SERVICE_UNAVAILABLE,
                   "no memory for the rest of the answer; try again when there is some");
        http->asking.current = NULL;
        ask->at_poller = false;
        finish(ask);
    }
    send_next(http);
}

int kvq__http_ask(struct kvq__http *http, struct kvq__http_ask *ask)
{
    struct gathering *g = calloc(1, sizeof *g);
    ask->http = http;
    ask->part = g;
    ask->status = MHD_HTTP_OK;
    ask->type = type_json;
    if (ask->topic == KVQ__HTTP_METRICS)
        ask->type = "text/plain; version=0.0.4; charset=utf-8";
    if (ask->topic == KVQ__HTTP_OPEN_METRICS)
        ask->type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    if (g)
        g->out = open_memstream(&ask->text.at, &ask->text.n);
    if (!g || !g->out || !make_room(g)) {
        free_ask(ask);
        return KVQ_E_NO_MEMORY;
    }
    ask->asked_ns = kvq_now_ns();
    TAILQ_INSERT_TAIL(&http->asking.waiting, ask, link);
    send_next(http);
    return 0;
}

void kvq__http_ask_leave(struct kvq__http_ask *ask)
{
    ask->connection = NULL;
    if (ask->at_poller) // it comes back, and is freed then
        return;
    if (!ask->answered)
        TAILQ_REMOVE(&ask->http->asking.waiting, ask, link);
    free_ask(ask);
}

static void let_wait_no_more(struct kvq__http_ask *ask, uint64_t since)
{
    if (ask->late || !ask->connection || ask->asked_ns > since)
        return;
    ask->late = true;
    kvq__http_answered(ask);
}

// What is at the poller comes back all the same, and is freed then.
void kvq__http_ask_tick(struct kvq__http *http)
{
    const uint64_t since = kvq_now_ns() - KVQ__HTTP_PATIENCE_MS * 1000000ull;
    struct kvq__http_ask *ask, *next;
    if (http->asking.current)
        let_wait_no_more(http->asking.current, since);
    for (ask = TAILQ_FIRST(&http->asking.waiting); ask; ask = next) {
        next = TAILQ_NEXT(ask, link);
        let_wait_no_more(ask, since);
    }
}
