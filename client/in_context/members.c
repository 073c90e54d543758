// SPDX-License-Identifier: Apache-2.0
//
// The sessions of a kvq_local and the members of its step: finding them, who may be in a step, and
// what all calls of a step check first.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <string.h>

// ---- Checks of a call ----

int kvq__local_check(const struct kvq_local *local)
{
    if (!local)
        return kvq__set_error(KVQ_E_INVALID, "the kvq_local is NULL");
    if (local->connection != local->client->connection)
        return kvq__set_error(
            KVQ_E_CANCELLED,
            "this kvq_local was opened before kvq_reattach: close it and open another, "
            "and take the sessions in again");
    if (local->queue->dead)
        return kvq__set_error(
            local->queue->dead,
            "the connection was lost; kvq_reattach connects again, then close this "
            "kvq_local and open another");
    return KVQ_OK;
}

int kvq__local_check_call(const struct kvq_local *local, const char *what,
                          const struct kvq_entry *entries, uint32_t n)
{
    int rc = kvq__local_check(local);
    if (rc)
        return rc;
    if (n == 0 || n > KVQ_MAX_BATCH)
        return kvq__set_error(n ? KVQ_E_LIMIT : KVQ_E_INVALID,
                              "%s of %u sessions: it can be 1 to %d", what, n, KVQ_MAX_BATCH);
    return entries
               ? KVQ_OK
               : kvq__set_error(KVQ_E_INVALID, "%s of %u sessions, but entries is NULL", what, n);
}

int kvq__local_check_place(const struct kvq_local *local, bool on_stream)
{
    bool gpu = local->here.driver != NULL;
    if (gpu == on_stream)
        return KVQ_OK;
    return kvq__set_error(KVQ_E_INVALID,
                          gpu ? "this kvq_local is for sessions on a GPU: its calls have a "
                                "stream (kvq_local_begin_on_stream, ..)"
                              : "this kvq_local is for sessions on the host: its calls "
                                "have no stream");
}

int kvq__local_check_attend(const struct kvq_local *local, const struct kvq_work *work,
                            const struct kvq_entry *entries, uint32_t n)
{
    // Without the daemon, too, a step under way may go on to its end.
    bool lost = local && local->connection == local->client->connection && local->queue->dead &&
                local->stepping && !*local->why;
    int rc = lost ? KVQ_OK : kvq__local_check_call(local, "attend", entries, n);
    if (rc)
        return rc;
    if (!work)
        return kvq__set_error(KVQ_E_INVALID, "attend: work is NULL");
    return n && n <= KVQ_MAX_BATCH && entries
               ? KVQ_OK
               : kvq__set_error(KVQ_E_INVALID, "attend of %u sessions: it can be 1 to %d", n,
                                KVQ_MAX_BATCH);
}

// ---- Members ----

struct kvq__local_session *kvq__local_find(const struct kvq_local *local, uint64_t handle)
{
    struct kvq__local_session *s = local->sessions[kvq__handle_index(handle)];
    return s && s->handle == handle ? s : NULL;
}

static bool is_alike(const struct kvq__local_layer *a, const struct kvq__local_layer *b)
{
    return a->format == b->format && kvq_shape_same(&a->shape, &b->shape) &&
           memcmp(&a->book, &b->book, sizeof a->book) == 0 && a->source == b->source;
}

// Whether an entry can be in a bucket's steps: KVQ_OK, KVQ_E_SHAPE or KVQ_E_LIMIT.
static int bucket_takes(const struct kvq_bucket *b, const struct kvq__local_session *s,
                        const struct kvq_entry *e)
{
    if (e->position + e->append > b->max_tokens || e->queries > b->max_queries)
        return KVQ_E_LIMIT;
    if (*b->local->why)
        return KVQ_OK;
    if (s->n_layers != b->n_layers)
        return KVQ_E_SHAPE;
    for (uint32_t i = 0; i < b->n_layers; i++)
        if (!is_alike(&s->layers[i], &b->layers[i]))
            return KVQ_E_SHAPE;
    return KVQ_OK;
}

int kvq__local_judge(const struct kvq_local *local, const struct kvq_entry *e)
{
    const struct kvq__local_session *s = kvq__local_find(local, e->session);
    if (!s)
        return KVQ_E_STALE;
    if (s->in_step)
        return KVQ_E_BUSY; // it stands in two entries
    if (e->append && s->read_only)
        return KVQ_E_READ_ONLY;
    int rc = local->bucket ? bucket_takes(local->bucket, s, e) : KVQ_OK;
    if (rc)
        return rc;
    if (e->append > KVQ_MAX_STEP_TOKENS || e->position > KVQ_MAX_SESSION_TOKENS ||
        e->position + e->append > local->max_tokens)
        return KVQ_E_LIMIT;
    return KVQ_OK;
}

int kvq__local_member(const struct kvq_local *local, const struct kvq_entry *e)
{
    const struct kvq__local_session *s = kvq__local_find(local, e->session);
    if (!s)
        return KVQ_E_STALE;
    if (!s->in_step)
        return KVQ_E_NO_STEP;
    if (e->position != s->past)
        return KVQ_E_POSITION;
    return e->append && e->append != s->append ? KVQ_E_INVALID : KVQ_OK;
}

void kvq__local_join(struct kvq_local *local, const struct kvq_entry *e)
{
    struct kvq__local_session *s = kvq__local_find(local, e->session);
    assert(s && !s->in_step && local->n_members < KVQ_MAX_BATCH);
    s->in_step = true;
    s->past = e->position;
    s->append = e->append;
    s->bucket = local->bucket;
    memset(s->appended, 0, sizeof s->appended);
    memset(s->lacks, 0, sizeof s->lacks);
    local->members[local->n_members++] = s;
    local->stepping = true;
}

void kvq__local_leave(struct kvq_local *local, const struct kvq_entry *e)
{
    struct kvq__local_session *s = kvq__local_find(local, e->session);
    uint32_t kept = 0;
    assert(s && s->in_step && local->n_members > 0);
    for (uint32_t i = 0; i < local->n_members; i++)
        if (local->members[i] != s)
            local->members[kept++] = local->members[i];
    assert(kept == local->n_members - 1);
    s->in_step = false;
    local->n_members = kept;
    local->stepping = kept > 0;
}

void kvq__local_gave(struct kvq_local *local, const struct kvq_work *w,
                     const struct kvq_entry *entries, uint32_t n, int rc)
{
    for (uint32_t i = 0; i < n && w->k.buffer; i++) {
        struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        if (s && s->in_step && entries[i].append && w->layer < s->n_layers &&
            s->layers[w->layer].source == w->layer)
            s->lacks[w->layer] = rc || entries[i].status;
    }
}

void kvq__local_over(struct kvq_local *local)
{
    assert(local->n_members <= KVQ_MAX_BATCH && local->n_layers <= KVQ_MAX_LAYERS);
    for (uint32_t i = 0; i < local->n_members; i++)
        local->members[i]->in_step = false;
    memset(local->k, 0, local->n_layers * sizeof local->k[0]);
    memset(local->v, 0, local->n_layers * sizeof local->v[0]);
    local->n_members = local->n_layers = 0;
    local->mixed = local->stepping = false;
    local->bucket = NULL;
    local->step = 0;
}

bool kvq__local_may_retry(int code)
{
    return code == KVQ_E_NO_MEMORY || code == KVQ_E_QUOTA || code == KVQ_E_DEADLINE;
}

void kvq__local_keep(struct kvq_local *local, const struct kvq_entry *entries, uint32_t n)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < local->n_members; i++)
        local->members[i]->in_step = false;
    for (uint32_t i = 0; i < n; i++) {
        struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        if (!s || s->in_step || !kvq__local_may_retry(entries[i].status))
            continue;
        s->in_step = true;
        local->members[kept++] = s;
    }
    assert(kept <= local->n_members);
    local->n_members = kept;
    if (kept == 0)
        kvq__local_over(local);
}

// ---- What failed ----

// As texts have it.
static const char *show(const struct kvq_local *local, const struct kvq_entry *entry, char *text)
{
    pthread_mutex_lock(&local->client->table);
    kvq__handle_shown(local->client, entry->session, text);
    pthread_mutex_unlock(&local->client->table);
    return text;
}

// Of a limit that only this kvq_local or its bucket has.
static bool explain_limit(const struct kvq_local *local, const struct kvq_entry *entries,
                          uint32_t n)
{
    char session[KVQ__SHOWN_BYTES];
    uint32_t i = 0;
    while (i < n && entries[i].status == KVQ_OK)
        i++;
    if (i == n || entries[i].status != KVQ_E_LIMIT)
        return false;
    if (local->bucket && entries[i].queries > local->bucket->max_queries) {
        kvq__set_error(KVQ_E_LIMIT,
                       "attend, entry %u (%s): %u query tokens; the bucket was opened "
                       "for at most %u (max_queries)",
                       i, show(local, &entries[i], session), entries[i].queries,
                       local->bucket->max_queries);
        return true;
    }
    if (entries[i].position + entries[i].append <= local->max_tokens)
        return false;
    kvq__set_error(KVQ_E_LIMIT,
                   "step begin, entry %u (%s): %llu and %u more tokens; this kvq_local was "
                   "opened for at most %llu (max_tokens)",
                   i, show(local, &entries[i], session), (unsigned long long)entries[i].position,
                   entries[i].append, (unsigned long long)local->max_tokens);
    return true;
}

// Of a session that is open, but not in this kvq_local or not in its step.
static bool explain_member(const struct kvq_local *local, unsigned op,
                           const struct kvq_entry *entries, uint32_t n)
{
    char session[KVQ__SHOWN_BYTES];
    const char *more = NULL;
    uint32_t i = 0;
    while (i < n && entries[i].status == KVQ_OK)
        i++;
    if (i == n)
        return false;
    pthread_mutex_lock(&local->client->table);
    bool open = kvq__handle_find(local->client, entries[i].session);
    pthread_mutex_unlock(&local->client->table);
    bool here = kvq__local_find(local, entries[i].session);
    if (entries[i].status == KVQ_E_STALE && open && !here)
        more = "the session is not in this kvq_local; kvq_local_add it first";
    else if (entries[i].status == KVQ_E_NO_STEP && here)
        more = "the session is in no step of this kvq_local; kvq_local_begin begins one";
    if (more)
        kvq__set_error(entries[i].status, "%s, entry %u (%s): %s", kvq__op_name(op), i,
                       show(local, &entries[i], session), more);
    return more != NULL;
}

void kvq__local_explain(struct kvq_local *local, unsigned op, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n)
{
    struct kvq__pending p = {
        .request = {.op = (uint8_t)op, .count = (uint16_t)n}, .n = n, .entries = entries};
    uint32_t first = 0;
    while (first < n && entries[first].status == KVQ_OK)
        first++;
    if (op == KVQ_OP_STEP_BEGIN && local->blamed && local->blamed_entry == first)
        p.shard = local->blamed;
    local->blamed = 0;
    if (work)
        kvq__put_work(local->queue, work, &p.request);
    if (!explain_limit(local, entries, n) && !explain_member(local, op, entries, n))
        kvq__explain(local->queue, &p);
}
