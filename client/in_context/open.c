// SPDX-License-Identifier: Apache-2.0
//
// In-context mode: opening and closing, whether attention can be here, and taking sessions in.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Whether attention can be here ----

static int find_kernels(const kvq_client *client, const struct kvq_kernels **kernels)
{
    const char *isa = client->info.isa;
    for (int i = KVQ_ISA_C; i <= KVQ_ISA_BEST; i++) {
        *kernels = kvq_kernels_get(i);
        if (strcmp(kvq_kernels_isa(*kernels), isa) == 0)
            return KVQ_OK;
    }
    return kvq__set_error(KVQ_E_UNSUPPORTED,
                          "the daemon computes with %s instructions, this process can use %s",
                          *isa ? isa : "unknown", kvq_kernels_isa(*kernels));
}

static int find_context(struct kvq_local *local, const char *place)
{
    const char *wish = getenv("KVQ_LOCAL");
    assert(!local->pool && !*local->why);
    if (wish && strcmp(wish, "daemon") == 0)
        return kvq__set_error(KVQ_E_UNSUPPORTED, "KVQ_LOCAL=daemon in the environment asks for it");
    if (local->here.driver)
        return kvq__pool_get(local->client, place, &local->here, &local->pool);
    int rc = find_kernels(local->client, &local->kernels);
    if (rc == KVQ_OK)
        rc = kvq__pool_get(local->client, place, NULL, &local->pool);
    return rc ? rc : kvq__attend_open(local);
}

// Which GPU it is that the place names: the current context's.
static int find_gpu(struct kvq_local *local)
{
    char place[KVQ__PLACE_BYTES];
    if (strcmp(local->place, "host") == 0)
        return KVQ_OK;
    int rc = kvq__gpu_here(local->client, "kvq_local_open", &local->here);
    if (rc)
        return rc;
    kvq__gpu_place(local->client, local->here.uuid, place);
    return kvq_gpu_place_is(place, local->place)
               ? KVQ_OK
               : kvq__set_error(
                     KVQ_E_INVALID,
                     "kvq_local_open for %s: the current context is of %s; make one of that "
                     "GPU current first",
                     local->place, place);
}

static bool is_refusal(int code)
{
    return code == KVQ_E_UNSUPPORTED || code == KVQ_E_VERSION;
}

// Takes a session out that is a member of no step.
static void forget_session(struct kvq_local *local, struct kvq__local_session *s,
                           uint64_t *patience_ns)
{
    assert(!s->in_step && local->sessions[kvq__handle_index(s->handle)] == s);
    kvq__page_table_close(local, s, patience_ns);
    local->sessions[kvq__handle_index(s->handle)] = NULL;
    free(s->layers);
    free(s);
}

static void forget_one(struct kvq_local *local, struct kvq__local_session *s)
{
    uint64_t patience = kvq__closing_patience(local->client);
    forget_session(local, s, &patience);
}

// Goes through the daemon from now on, with this text. KVQ_E_UNSUPPORTED if it must not.
static int go_through_daemon(struct kvq_local *local, const char *why)
{
    char copy[KVQ__TEXT_BYTES];
    assert(*why && !*local->why && !local->stepping);
    snprintf(copy, sizeof copy, "%s", why);
    if (local->flags & KVQ_LOCAL_REQUIRE)
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "attention cannot be in this process's context, as KVQ_LOCAL_REQUIRE "
                              "asks: %s",
                              copy);
    // The graph has launches of its own, which would read page tables that are gone.
    if (kvq__buckets_captured(local))
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "attention to this session cannot be in this process's context, and "
                              "a captured graph keeps this kvq_local there: put the session into "
                              "another kvq_local, or close the graph's bucket first: %s",
                              copy);
    snprintf(local->why, sizeof local->why, "%s", copy);
    uint64_t patience = kvq__closing_patience(local->client);
    for (uint32_t i = 0; i < KVQ__HANDLES; i++)
        if (local->sessions[i])
            kvq__page_table_close(local, local->sessions[i], &patience);
    return KVQ_OK;
}

// ---- Opening ----

static int check_local_options(const kvq_queue *queue, const struct kvq_local_options *o,
                               kvq_local *const *local)
{
    if (!queue || !local)
        return kvq__set_error(KVQ_E_INVALID, "kvq_local_open: an argument is NULL");
    if (queue->dead)
        return kvq__set_error(queue->dead, "kvq_local_open: the connection was lost; kvq_reattach "
                                           "connects again");
    if (o->flags & ~(uint32_t)KVQ_LOCAL_REQUIRE)
        return kvq__set_error(
            KVQ_E_INVALID, "kvq_local_open: flags %#x are unknown; KVQ_LOCAL_REQUIRE (1) is known",
            o->flags);
    if (o->max_tokens > KVQ_MAX_SESSION_TOKENS)
        return kvq__set_error(KVQ_E_LIMIT,
                              "kvq_local_open: max_tokens %llu; a session holds at most %d",
                              (unsigned long long)o->max_tokens, KVQ_MAX_SESSION_TOKENS);
    if (o->threads > KVQ__LOCAL_THREADS)
        return kvq__set_error(KVQ_E_INVALID, "kvq_local_open: %u threads; there can be %d at most",
                              o->threads, KVQ__LOCAL_THREADS);
    if (o->place && strlen(o->place) >= KVQ__PLACE_BYTES)
        return kvq__set_error(KVQ_E_INVALID,
                              "kvq_local_open: the place is \"host\", or \"GPU-\" or \"MIG-\" "
                              "and a UUID");
    return KVQ_OK;
}

static struct kvq_local *make_local(kvq_queue *queue, const struct kvq_local_options *o)
{
    struct kvq_local *local = calloc(1, sizeof *local);
    if (!local) {
        kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
        return NULL;
    }
    local->client = queue->client;
    local->queue = queue;
    local->connection = queue->client->connection;
    local->max_tokens = o->max_tokens ? o->max_tokens : KVQ__LOCAL_TOKENS;
    local->flags = o->flags;
    local->threads = o->threads ? o->threads : 1;
    local->parallel = o->parallel;
    local->parallel_context = o->parallel_context;
    snprintf(local->place, sizeof local->place, "%s", o->place ? o->place : "host");
    pthread_mutex_lock(&local->client->table);
    LIST_INSERT_HEAD(&local->client->locals, local, link);
    pthread_mutex_unlock(&local->client->table);
    return local;
}

int kvq_local_open(kvq_queue *queue, const struct kvq_local_options *options, kvq_local **local)
{
    struct kvq_local_options o = {0};
    if (local)
        *local = NULL;
    int rc = options ? KVQ__SIZED_TAKE(&o, options, "kvq_local_options") : KVQ_OK;
    if (rc == KVQ_OK)
        rc = check_local_options(queue, &o, local);
    if (rc)
        return rc;
    assert(local);
    struct kvq_local *made = make_local(queue, &o);
    if (!made)
        return KVQ_E_SYSTEM;
    rc = find_gpu(made);
    if (rc) {
        kvq_local_close(&made);
        return rc;
    }
    rc = find_context(made, made->place);
    if (is_refusal(rc))
        rc = go_through_daemon(made, kvq_error_text());
    if (rc)
        kvq_local_close(&made);
    *local = made;
    return rc;
}

void kvq_local_close(kvq_local **local)
{
    struct kvq_local *l = local ? *local : NULL;
    if (!l)
        return;
    kvq_local_abort(l);
    uint64_t patience = kvq__closing_patience(l->client);
    for (uint32_t i = 0; i < KVQ__HANDLES; i++)
        if (l->sessions[i])
            forget_session(l, l->sessions[i], &patience);
    pthread_mutex_lock(&l->client->table);
    LIST_REMOVE(l, link);
    pthread_mutex_unlock(&l->client->table);
    kvq__attend_close(l);
    if (l->pool)
        kvq__pool_put(l->client, l->pool);
    free(l);
    *local = NULL;
}

const char *kvq_local_why(const kvq_local *local)
{
    return !local ? "there is no kvq_local" : *local->why ? local->why : NULL;
}

// ---- Sessions ----

// 0 or the code; KVQ_E_STALE if it is not open here.
static int look_up(kvq_client *client, uint64_t handle, bool *read_only)
{
    pthread_mutex_lock(&client->table);
    const struct kvq__handle *h = kvq__handle_find(client, handle);
    *read_only = h && h->read_only;
    pthread_mutex_unlock(&client->table);
    return h ? KVQ_OK
             : kvq__set_error(KVQ_E_STALE, "session %#llx is not open here",
                              (unsigned long long)handle);
}

static int check_info(const struct kvq_local *local, const struct kvq_session_info *info)
{
    if (strcmp(info->place, local->place) != 0)
        return kvq__set_error(KVQ_E_INVALID,
                              "the session is on %s, this kvq_local is for sessions on %s; open "
                              "the session with options.place = \"%s\", or another kvq_local for "
                              "it",
                              info->place, local->place, local->place);
    if (info->layers > KVQ_MAX_LAYERS)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon says that the session has %u layers, at most %d are "
                              "agreed",
                              info->layers, KVQ_MAX_LAYERS);
    if (info->tokens > local->max_tokens)
        return kvq__set_error(
            KVQ_E_LIMIT,
            "the session has %llu tokens, this kvq_local was opened for at most %llu "
            "(max_tokens)",
            (unsigned long long)info->tokens, (unsigned long long)local->max_tokens);
    return KVQ_OK;
}

// Its pages, in our addresses.
static int bring_in(struct kvq_local *local, struct kvq__local_session *s)
{
    assert(local->pool && !s->table);
    int rc = kvq__page_table_open(local, s);
    if (rc == KVQ_OK)
        rc = kvq__reading_books(local->client, local->pool, s);
    if (rc == KVQ_OK)
        rc = kvq__pool_extend(local->client, local->pool, s->handle, &s->known);
    return rc;
}

static int take_in(struct kvq_local *local, struct kvq__local_session *s)
{
    int rc = *local->why ? KVQ_OK : bring_in(local, s);
    if (!is_refusal(rc))
        return rc;
    if (local->stepping)
        return kvq__set_error(KVQ_E_BUSY,
                              "this session would take the step under way to the daemon; "
                              "take it in between steps");
    return go_through_daemon(local, kvq_error_text());
}

int kvq_local_add(kvq_local *local, kvq_session session)
{
    struct kvq_session_info info = {.size = sizeof info};
    bool read_only;
    int rc = kvq__local_check(local);
    if (rc == KVQ_OK)
        rc = look_up(local->client, session, &read_only);
    if (rc)
        return rc;
    struct kvq__local_session *s = local->sessions[kvq__handle_index(session)];
    if (s && s->handle == session)
        return KVQ_OK;
    if (s && s->in_step)
        return kvq__set_error(KVQ_E_BUSY,
                              "the step under way has session %#llx, whose handle was closed "
                              "meanwhile: end or abort it first",
                              (unsigned long long)s->handle);
    if (s) // of a handle that was closed
        forget_one(local, s);
    rc = kvq_session_info(local->client, session, &info);
    if (rc == KVQ_OK)
        rc = check_info(local, &info);
    if (rc)
        return rc;
    s = calloc(1, sizeof *s);
    if (!s)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    s->handle = session;
    s->read_only = read_only;
    s->n_layers = info.layers;
    s->published = UINT64_MAX;
    s->changes =
        kvq_word_load(&local->client->changes[kvq__handle_index(session)]) - 1; // look at it first
    local->sessions[kvq__handle_index(session)] = s;
    rc = take_in(local, s);
    if (rc)
        forget_one(local, s);
    if (rc == KVQ_E_EXISTS) // the daemon knows of page tables, not of who opened them
        return kvq__set_error(rc,
                              "another kvq_local of this client has session %#llx; "
                              "kvq_local_remove it there first",
                              (unsigned long long)session);
    return rc;
}

int kvq_local_remove(kvq_local *local, kvq_session session)
{
    if (!local)
        return kvq__set_error(KVQ_E_INVALID, "the kvq_local is NULL");
    struct kvq__local_session *s = kvq__local_find(local, session);
    if (!s)
        return kvq__set_error(KVQ_E_STALE, "session %#llx is not in this kvq_local",
                              (unsigned long long)session);
    if (s->in_step)
        return kvq__set_error(KVQ_E_BUSY, "session %#llx is in the step under way: end or abort it",
                              (unsigned long long)session);
    forget_one(local, s);
    return KVQ_OK;
}
