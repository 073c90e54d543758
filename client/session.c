// SPDX-License-Identifier: Apache-2.0
//
// Sessions: opening, closing, dropping, moving, asking.
#include "client/internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOVE_ASK_NS = 1000000, MOVE_ASK_MOST_NS = 20000000 }; // between two questions about a move

// What is told of a move.
struct move_answer {
    uint64_t id;
    bool finished;
    int status;
    char text[KVQ_TEXT_BYTES];
};

// Texts that could not travel are refused here: the daemon would take them for an attack.
static int check_text(const char *name, const char *text, size_t size)
{
    if (!text)
        return KVQ_OK;
    size_t length = strnlen(text, size);
    if (length >= size)
        return kvq__set_error(KVQ_E_LIMIT, "opening a session: its %s has more than %zu bytes",
                              name, size - 1);
    if (!kvq_text_valid(text, length))
        return kvq__set_error(KVQ_E_INVALID,
                              "opening a session: its %s is not UTF-8 without control characters",
                              name);
    return KVQ_OK;
}

static int check_session_options(const struct kvq_session_options *o)
{
    int rc = check_text("namespace", o->ns, KVQ_NAME_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("name", o->name, KVQ_NAME_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("model", o->model, KVQ_FINGERPRINT_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("format", o->format, KVQ_NAME_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("place", o->place, KVQ__PLACE_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("salt", o->salt, KVQ_NAME_BYTES);
    if (rc == KVQ_OK)
        rc = check_text("adapter", o->adapter, KVQ_NAME_BYTES);
    if (rc)
        return rc;
    if (o->n_layers > KVQ_MAX_LAYERS || (o->n_layers && !o->layers))
        return kvq__set_error(o->layers ? KVQ_E_LIMIT : KVQ_E_INVALID,
                              "opening a session: %u rows of layers%s, at most %d are allowed",
                              o->n_layers, o->layers ? "" : " at NULL", KVQ_MAX_LAYERS);
    for (uint32_t i = 0; i < o->n_layers; i++) {
        rc = check_text("layer's format", o->layers[i].format, KVQ_NAME_BYTES);
        if (rc)
            return rc;
    }
    const uint32_t known = KVQ_OPEN_READ_ONLY | KVQ_OPEN_TAKE_OVER | KVQ_OPEN_MUST_EXIST |
                           KVQ_OPEN_MUST_CREATE | KVQ_OPEN_EXACT_PROMPT | KVQ_OPEN_PACKED_PROMPT;
    if (o->flags & ~known)
        return kvq__set_error(KVQ_E_INVALID,
                              "opening a session: flags %#x are unknown, %#x are known", o->flags,
                              known);
    return KVQ_OK;
}

static int take_session_options(struct kvq_session_options *to,
                                const struct kvq_session_options *from)
{
    int rc = KVQ__SIZED_TAKE(to, from, "kvq_session_options");
    return rc ? rc : check_session_options(to);
}

// The generated structures do not know const, but nothing writes through them.
static char *text_of(const char *text)
{
    return (char *)(uintptr_t)(text ? text : "");
}

static void put_layer(const struct kvq_layer *row, Kvq__Layer *layer)
{
    kvq__layer__init(layer);
    layer->q_heads = row->q_heads;
    layer->kv_heads = row->kv_heads;
    layer->k_dim = row->k_dim;
    layer->v_dim = row->v_dim;
    layer->window = row->window;
    layer->softcap = row->softcap;
    layer->scale = row->scale;
    layer->format = text_of(row->format);
    layer->kv_from_plus1 = row->kv_from;
    layer->repeat = row->repeat;
}

static void put_options(const struct kvq_session_options *o, Kvq__OpenSession *m)
{
    kvq__open_session__init(m);
    m->namespace_ = text_of(o->ns);
    m->name = text_of(o->name);
    m->model = text_of(o->model);
    m->format = text_of(o->format);
    m->shard = o->shard;
    m->shards = o->shards;
    m->dtype = o->dtype;
    m->v_rotation = o->v_rotation;
    m->attention = o->attention;
    m->prompt_tokens = o->prompt_tokens;
    m->max_rollback = o->max_rollback;
    m->on_detach = (Kvq__OnDetach)o->on_detach;
    m->keep_seconds = o->keep_seconds;
    m->read_only = o->flags & KVQ_OPEN_READ_ONLY;
    m->take_over = o->flags & KVQ_OPEN_TAKE_OVER;
    m->must_exist = o->flags & KVQ_OPEN_MUST_EXIST;
    m->must_create = o->flags & KVQ_OPEN_MUST_CREATE;
    m->exact_prompt = o->flags & KVQ_OPEN_EXACT_PROMPT;
    m->packed_prompt = o->flags & KVQ_OPEN_PACKED_PROMPT;
    m->place = text_of(o->place);
    m->salt = text_of(o->salt);
    m->adapter = text_of(o->adapter);
}

static void copy_reply_text(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
}

static void give_info(const Kvq__Session *s, bool read_only, struct kvq_session_info *info)
{
    struct kvq_session_info i = {.id = s->id,
                                 .tokens = s->tokens,
                                 .packed_bytes = s->packed_bytes,
                                 .window_bytes = s->window_bytes,
                                 .table_bytes = s->table_bytes,
                                 .full_precision_tokens = s->full_precision_tokens,
                                 .saturated_values = s->saturated_values,
                                 .bits_per_value = s->bits_per_value,
                                 .bytes_per_token_head = s->bytes_per_token_head,
                                 .bytes_per_token_head_total = s->bytes_per_token_head_total,
                                 .compression = s->compression,
                                 .layers = s->layers,
                                 .created = s->created,
                                 .read_only = read_only,
                                 .shard = s->shard,
                                 .shards = s->shards,
                                 .group_tokens = s->group_tokens,
                                 .prefix_tokens = s->prefix_tokens,
                                 .exact_tokens = s->exact_tokens,
                                 .shared_bytes = s->shared_bytes,
                                 .pinned = s->pinned,
                                 .max_rollback = s->max_rollback};
    copy_reply_text(i.ns, sizeof i.ns, s->namespace_);
    copy_reply_text(i.name, sizeof i.name, s->name);
    copy_reply_text(i.format, sizeof i.format, s->format);
    copy_reply_text(i.attention, sizeof i.attention, s->path);
    copy_reply_text(i.isa, sizeof i.isa, s->isa);
    copy_reply_text(i.place, sizeof i.place, s->place);
    copy_reply_text(i.tier, sizeof i.tier, s->tier);
    copy_reply_text(i.v_rotation, sizeof i.v_rotation, s->v_rotation);
    kvq__sized_give(info, &i, sizeof i);
}

// Of a session that was opened as it is the daemon tells what it has.
static struct kvq__shape *shape_of(const struct kvq_session_options *o, const Kvq__Session *reply)
{
    struct kvq_layer rows[KVQ_MAX_LAYERS];
    uint32_t n = 0;
    if (o->n_layers)
        return kvq__shape_make(o->layers, o->n_layers);
    for (; n < reply->n_layer_rows && n < KVQ_MAX_LAYERS; n++) {
        const Kvq__Layer *from = reply->layer_rows[n];
        rows[n] = (struct kvq_layer){.q_heads = (uint16_t)from->q_heads,
                                     .kv_heads = (uint16_t)from->kv_heads,
                                     .k_dim = (uint16_t)from->k_dim,
                                     .v_dim = (uint16_t)from->v_dim,
                                     .window = from->window,
                                     .softcap = from->softcap,
                                     .scale = from->scale,
                                     .kv_from = from->kv_from_plus1,
                                     .repeat = from->repeat};
    }
    return kvq__shape_make(rows, n);
}

// What the reply to an open goes to.
struct opened {
    kvq_client *client;
    const struct kvq_session_options *options;
    kvq_session *session;
    struct kvq_session_info *info; // or NULL
};

// As kvqctl shows it: of those without a name their number.
static void show_session(const Kvq__Session *reply, char text[KVQ__SHOWN_BYTES])
{
    int n = reply->name[0] ? snprintf(text, KVQ_NAME_BYTES + 2, "\"%s\"", reply->name)
                           : snprintf(text, KVQ_NAME_BYTES, "#%" PRIu64, reply->id);
    if (reply->shards > 1 && n > 0 && n < KVQ_NAME_BYTES + 2)
        snprintf(text + n, KVQ__SHOWN_BYTES - (size_t)n, ", shard %u", reply->shard);
}

static int take_session(void *to, struct kvq__call *call)
{
    struct opened *o = to;
    const Kvq__Session *reply = call->reply->session;
    bool read_only = o->options->flags & KVQ_OPEN_READ_ONLY;
    char shown[KVQ__SHOWN_BYTES];
    assert(*o->session == 0);
    show_session(reply, shown);
    int rc =
        kvq__handle_add(o->client, reply->handle, read_only, shape_of(o->options, reply), shown);
    if (rc)
        return rc;
    *o->session = reply->handle;
    if (o->info)
        give_info(reply, read_only, o->info);
    return KVQ_OK;
}

// All that an open says, with the memory that the message points to.
struct opening {
    Kvq__OpenSession message;
    Kvq__Layer rows[KVQ_MAX_LAYERS], *pointers[KVQ_MAX_LAYERS];
    Kvq__Prefix prefix;
    struct kvq__spans spans;
};

static int put_prefix(kvq_client *client, const struct kvq_prefix *p, struct opening *o)
{
    if (!p->buffer && !p->n_spans)
        return KVQ_OK;
    kvq__prefix__init(&o->prefix);
    o->message.prefix = &o->prefix;
    if (p->buffer && p->buffer->client != client)
        return kvq__set_error(KVQ_E_BUFFER, "a prefix in a buffer of another connection");
    if (p->buffer) {
        o->prefix.buffer = p->buffer->id;
        o->prefix.offset = p->offset;
        o->prefix.tokens = p->tokens;
    }
    int rc = kvq__spans_put(&o->spans, p->spans, p->n_spans);
    o->prefix.n_spans = p->n_spans;
    o->prefix.spans = o->spans.pointers;
    return rc;
}

static int opening_make(kvq_client *client, const struct kvq_session_options *options,
                        struct opening **out)
{
    assert(options->n_layers <= KVQ_MAX_LAYERS);
    struct opening *o = calloc(1, sizeof *o);
    if (!o)
        return kvq__set_error(KVQ_E_NO_MEMORY, "no memory for a message");
    put_options(options, &o->message);
    for (uint32_t i = 0; i < options->n_layers; i++) {
        put_layer(&options->layers[i], &o->rows[i]);
        o->pointers[i] = &o->rows[i];
    }
    o->message.n_layers = options->n_layers;
    o->message.layers = o->pointers;
    int rc = put_prefix(client, &options->prefix, o);
    if (rc) {
        kvq__spans_free(&o->spans);
        free(o);
        return rc;
    }
    *out = o;
    return KVQ_OK;
}

static void opening_free(struct opening *o)
{
    kvq__spans_free(&o->spans);
    free(o);
}

static int open_with_options(kvq_client *client, const struct kvq_session_options *o,
                             kvq_session *session, struct kvq_session_info *info)
{
    struct opening *opening = NULL;
    struct opened opened = {client, o, session, info};
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want = KVQ__REPLY__RESULT_SESSION,
                             .what = "opening a session",
                             .take = take_session,
                             .to = &opened};
    int rc = opening_make(client, o, &opening);
    if (rc)
        return rc;
    assert(opening);
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_SESSION;
    call.request.open_session = &opening->message;
    rc = kvq__ask(client, &call);
    opening_free(opening);
    return rc;
}

static int take_found(void *to, struct kvq__call *call)
{
    *(uint64_t *)to = call->reply->lookup_prefix->tokens;
    return KVQ_OK;
}

static int lookup_prefix_of(kvq_client *client, const struct kvq_session_options *o,
                            uint64_t *tokens)
{
    struct opening *opening = NULL;
    uint64_t found = 0;
    Kvq__LookupPrefix message = KVQ__LOOKUP_PREFIX__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want = KVQ__REPLY__RESULT_LOOKUP_PREFIX,
                             .what = "looking up a prefix",
                             .take = take_found,
                             .to = &found};
    int rc = opening_make(client, o, &opening);
    if (rc)
        return rc;
    assert(opening);
    message.session = &opening->message;
    call.request.command_case = KVQ__REQUEST__COMMAND_LOOKUP_PREFIX;
    call.request.lookup_prefix = &message;
    rc = kvq__ask(client, &call);
    if (found <= o->prefix.tokens)
        *tokens = found;
    else
        rc = kvq__set_error(KVQ_E_PROTOCOL, "the daemon found %llu tokens of a prefix of %llu",
                            (unsigned long long)found, (unsigned long long)o->prefix.tokens);
    opening_free(opening);
    return rc;
}

int kvq_lookup(kvq_client *client, const struct kvq_session_options *options, uint64_t *tokens)
{
    if (!client || !options || !tokens)
        return kvq__set_error(KVQ_E_INVALID, "kvq_lookup: an argument is NULL");
    *tokens = 0;
    struct kvq_session_options o;
    int rc = take_session_options(&o, options);
    if (rc)
        return rc;
    if (!o.prefix.buffer)
        return kvq__set_error(KVQ_E_BUFFER,
                              "kvq_lookup: no token ids to look up: options->prefix.buffer "
                              "is NULL");
    return lookup_prefix_of(client, &o, tokens);
}

int kvq_session_open(kvq_client *client, const struct kvq_session_options *options,
                     kvq_session *session, struct kvq_session_info *info)
{
    if (!client || !options || !session)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_open: an argument is NULL");
    *session = 0;
    struct kvq_session_options o;
    int rc = take_session_options(&o, options);
    if (rc == KVQ_OK && info)
        rc = kvq__sized_check(info, "kvq_session_info");
    return rc ? rc : open_with_options(client, &o, session, info);
}

int kvq_session_layers(kvq_client *client, kvq_session session, struct kvq_layer *rows,
                       uint32_t max, uint32_t *n)
{
    if (!client || !n || (max && !rows))
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_layers: an argument is NULL");
    *n = 0;
    pthread_mutex_lock(&client->table);
    const struct kvq__handle *h = kvq__handle_find(client, session);
    const struct kvq__shape *shape = h ? h->shape : NULL;
    for (uint32_t i = 0; shape && i < shape->layers; i++, (*n)++)
        if (i < max)
            rows[i] = (struct kvq_layer){
                .q_heads = shape->layer[i].q_heads,
                .kv_heads = shape->layer[i].kv_heads,
                .k_dim = shape->layer[i].k_dim,
                .v_dim = shape->layer[i].v_dim,
                .window = shape->layer[i].window,
                .softcap = shape->layer[i].softcap,
                .scale = shape->layer[i].scale,
                .kv_from = shape->layer[i].source == i ? 0 : shape->layer[i].source + 1,
                .repeat = 1};
    int rc = shape ? KVQ_OK
             : h   ? kvq__set_error(KVQ_E_UNSUPPORTED,
                                    "session %#llx was opened as it is, and this daemon is of an "
                                      "earlier version, which does not say what layers it has",
                                    (unsigned long long)session)
                   : kvq__set_error(KVQ_E_STALE, "session %#llx is not open here",
                                    (unsigned long long)session);
    pthread_mutex_unlock(&client->table);
    return rc;
}

// The handle is removed in the call's turn: the next session that is opened may have its index.
static int ask_to_end(kvq_client *client, struct kvq__call *call, kvq_session session)
{
    uint64_t deadline = kvq__deadline(client);
    int rc = kvq__turn_take(client, call->what, deadline);
    if (rc)
        return rc;
    rc = kvq__exchange(client, call, deadline);
    if (rc == KVQ_OK || rc == KVQ_E_STALE)
        kvq__handle_remove(client, session);
    kvq__turn_pass(client);
    return rc;
}

int kvq_session_close(kvq_client *client, kvq_session session)
{
    Kvq__CloseSession message = KVQ__CLOSE_SESSION__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "closing a session"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_close: client is NULL");
    message.handle = session;
    call.request.command_case = KVQ__REQUEST__COMMAND_CLOSE_SESSION;
    call.request.close_session = &message;
    return ask_to_end(client, &call, session);
}

int kvq_session_drop(kvq_client *client, kvq_session session)
{
    Kvq__DropSession message = KVQ__DROP_SESSION__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "dropping a session"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_drop: client is NULL");
    message.which_case = KVQ__DROP_SESSION__WHICH_HANDLE;
    message.handle = session;
    call.request.command_case = KVQ__REQUEST__COMMAND_DROP_SESSION;
    call.request.drop_session = &message;
    return ask_to_end(client, &call, session);
}

static int take_move(void *to, struct kvq__call *call)
{
    struct move_answer *answer = to;
    const Kvq__Move *m = call->reply->move;
    *answer = (struct move_answer){.id = m->id, .finished = m->finished, .status = m->status};
    copy_reply_text(answer->text, sizeof answer->text, m->text);
    return KVQ_OK;
}

// One question about a move.
static int ask_move(kvq_client *client, struct kvq__call *call, struct move_answer *answer)
{
    call->send_fd = -1;
    call->want = KVQ__REPLY__RESULT_MOVE;
    call->take = take_move;
    call->to = answer;
    return kvq__ask(client, call);
}

// Asks until the move that the call has begun is over. 0 or what it ended with.
static int follow_move(kvq_client *client, struct kvq__call *call)
{
    Kvq__AskMove ask = KVQ__ASK_MOVE__INIT;
    struct timespec pause = {.tv_nsec = MOVE_ASK_NS};
    struct move_answer answer;
    const char *what = call->what;
    int rc = ask_move(client, call, &answer);
    while (rc == KVQ_OK && !answer.finished) {
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < MOVE_ASK_MOST_NS)
            pause.tv_nsec *= 2;
        ask.id = answer.id;
        *call = (struct kvq__call){.request = KVQ__REQUEST__INIT, .what = what};
        call->request.command_case = KVQ__REQUEST__COMMAND_ASK_MOVE;
        call->request.ask_move = &ask;
        rc = ask_move(client, call, &answer);
    }
    return rc || answer.status == KVQ_OK ? rc : kvq__set_error(answer.status, "%s", answer.text);
}

int kvq_session_move(kvq_client *client, kvq_session session, const char *place)
{
    Kvq__MoveSession message = KVQ__MOVE_SESSION__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT, .what = "moving a session"};
    if (!client || !place)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_move: an argument is NULL");
    if (strlen(place) >= KVQ_NAME_BYTES || !kvq_text_valid(place, strlen(place)))
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_move: the place is no short text");
    message.which_case = KVQ__MOVE_SESSION__WHICH_HANDLE;
    message.handle = session;
    message.place = text_of(place);
    call.request.command_case = KVQ__REQUEST__COMMAND_MOVE_SESSION;
    call.request.move_session = &message;
    return follow_move(client, &call);
}

int kvq_session_park(kvq_client *client, kvq_session session)
{
    Kvq__ParkSession message = KVQ__PARK_SESSION__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT, .what = "parking a session"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_park: client is NULL");
    message.which_case = KVQ__PARK_SESSION__WHICH_HANDLE;
    message.handle = session;
    call.request.command_case = KVQ__REQUEST__COMMAND_PARK_SESSION;
    call.request.park_session = &message;
    return follow_move(client, &call);
}

int kvq_session_prefetch(kvq_client *client, kvq_session session)
{
    Kvq__PrefetchSession message = KVQ__PREFETCH_SESSION__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT, .what = "bringing a session back"};
    struct move_answer answer;
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_prefetch: client is NULL");
    message.which_case = KVQ__PREFETCH_SESSION__WHICH_HANDLE;
    message.handle = session;
    call.request.command_case = KVQ__REQUEST__COMMAND_PREFETCH_SESSION;
    call.request.prefetch_session = &message;
    return ask_move(client, &call, &answer);
}

int kvq_session_pin(kvq_client *client, kvq_session session, int pin)
{
    Kvq__PinSession message = KVQ__PIN_SESSION__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "pinning a session"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_pin: client is NULL");
    message.which_case = KVQ__PIN_SESSION__WHICH_HANDLE;
    message.handle = session;
    message.pin = pin != 0;
    call.request.command_case = KVQ__REQUEST__COMMAND_PIN_SESSION;
    call.request.pin_session = &message;
    return kvq__ask(client, &call);
}

// ---- Asking ----

static bool is_read_only(kvq_client *client, kvq_session session)
{
    pthread_mutex_lock(&client->table);
    const struct kvq__handle *handle = kvq__handle_find(client, session);
    bool read_only = handle && handle->read_only;
    pthread_mutex_unlock(&client->table);
    return read_only;
}

// What the reply about a session goes to.
struct asked {
    kvq_client *client;
    kvq_session session;
    struct kvq_session_info *info;
};

static int take_info(void *to, struct kvq__call *call)
{
    const struct asked *a = to;
    give_info(call->reply->session, is_read_only(a->client, a->session), a->info);
    return KVQ_OK;
}

int kvq__session_ask(kvq_client *client, kvq_session session, struct kvq_session_info *info,
                     uint32_t patience_ms)
{
    struct asked asked = {client, session, info};
    Kvq__SessionInfo message = KVQ__SESSION_INFO__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want = KVQ__REPLY__RESULT_SESSION,
                             .what = "asking about a session",
                             .patience_ms = patience_ms,
                             .take = take_info,
                             .to = &asked};
    assert(client && info);
    message.which_case = KVQ__SESSION_INFO__WHICH_HANDLE;
    message.handle = session;
    call.request.command_case = KVQ__REQUEST__COMMAND_SESSION_INFO;
    call.request.session_info = &message;
    return kvq__ask(client, &call);
}

int kvq_session_info(kvq_client *client, kvq_session session, struct kvq_session_info *info)
{
    if (!client || !info)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_info: an argument is NULL");
    int rc = kvq__sized_check(info, "kvq_session_info");
    return rc ? rc : kvq__session_ask(client, session, info, 0);
}
