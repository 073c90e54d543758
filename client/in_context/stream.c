// SPDX-License-Identifier: Apache-2.0
//
// In-context mode in the order of a stream. What changes from step to step lies in the bucket's
// device memory, so launches that were captured into a graph replay for any entries that the bucket
// was set up for.
#include "client/in_context/in_context.h"

#include <assert.h>

static int check_bucket_call(const struct kvq_local *local, const struct kvq_bucket *bucket,
                             const char *what, const struct kvq_entry *entries, uint32_t n)
{
    int rc = kvq__local_check_call(local, what, entries, n);
    if (rc == KVQ_OK)
        rc = kvq__local_check_place(local, true);
    if (rc)
        return rc;
    if (!bucket || bucket->local != local)
        return kvq__set_error(KVQ_E_INVALID, "%s: the bucket is %s", what,
                              bucket ? "of another kvq_local" : "NULL");
    if (n > bucket->max_sessions)
        return kvq__set_error(KVQ_E_LIMIT, "%s of %u sessions: the bucket is for at most %u", what,
                              n, bucket->max_sessions);
    return KVQ_OK;
}

// ---- Streams that are being captured ----

static int is_capturing(const struct kvq_local *local, struct kvq_gpu_stream *stream, bool *yes)
{
    int status, result = local->here.driver->stream_capturing(stream, &status);
    *yes = result == KVQ_GPU_OK && status != KVQ_GPU_CAPTURE_NONE;
    return result ? kvq__local_fault(local, result, "looking at the stream that was given")
                  : KVQ_OK;
}

// Steps begin and end outside of graphs: on `stream`, and behind what the bucket's last one has.
static int refuse_captured(const struct kvq_local *local, const struct kvq_bucket *b,
                           struct kvq_gpu_stream *stream, const char *what)
{
    bool capturing = false, other = false;
    int rc = is_capturing(local, stream, &capturing);
    if (rc == KVQ_OK && b->used && b->stream != stream)
        rc = is_capturing(local, b->stream, &other);
    if (rc == KVQ_OK && (capturing || other))
        rc = kvq__set_error(KVQ_E_UNSUPPORTED,
                            "step %s: %s is being captured into a graph, and what a step hands "
                            "over cannot be in one; make the call between graphs",
                            what, capturing ? "the stream" : "the bucket's last stream");
    return rc;
}

// ---- Begin ----

// Whether an entry can be attended to with the tensors that were noted: KVQ_OK or a code, with
// *work those of the layer that it cannot be with.
static int judge_noted(const struct kvq_local *local, const struct kvq_bucket *b,
                       const struct kvq_entry *e, const struct kvq_work **work)
{
    int rc = KVQ_OK;
    for (uint32_t l = 0; l < b->n_layers && rc == KVQ_OK; l++) {
        if (!b->noted[l])
            continue;
        *work = &b->works[l];
        rc = kvq__local_check_part(local, *work, e);
    }
    return rc;
}

// Entries that cannot be are not in the step. Explains the first one, unless begin has already
// refused one before it.
static void refuse_noted(struct kvq_local *local, const struct kvq_bucket *b,
                         struct kvq_entry *entries, uint32_t n)
{
    const struct kvq_work *work = NULL, *first = NULL;
    uint64_t from = UINT64_MAX, to = 0;
    bool failed = false;
    for (uint32_t i = 0; i < n; i++) {
        bool joined = entries[i].status == KVQ_OK;
        if (joined)
            entries[i].status = judge_noted(local, b, &entries[i], &work);
        if (entries[i].status == KVQ_OK && work && kvq__local_row_taken(entries, i, &from, &to))
            entries[i].status = KVQ_E_INVALID;
        if (joined && entries[i].status) {
            kvq__local_leave(local, &entries[i]);
            first = failed ? first : work;
        }
        failed |= entries[i].status != KVQ_OK;
    }
    if (first)
        kvq__local_explain(local, first->k.buffer ? KVQ_OP_APPEND_ATTEND : KVQ_OP_ATTEND, first,
                           entries, n);
}

static int check_noted(struct kvq_local *local, const struct kvq_bucket *b,
                       struct kvq_entry *entries, uint32_t n)
{
    int rc = KVQ_OK;
    refuse_noted(local, b, entries, n);
    for (uint32_t l = 0; l < b->n_layers && rc == KVQ_OK; l++)
        if (b->noted[l])
            rc = kvq__local_check_outputs(local, &b->works[l], entries, n, true);
    return rc;
}

static int fill_noted(struct kvq_bucket *b, const struct kvq_entry *entries, uint32_t n)
{
    uint32_t from = b->n_layers, to = 0;
    int rc = KVQ_OK;
    for (uint32_t l = 0; l < b->n_layers && rc == KVQ_OK; l++) {
        if (!b->noted[l])
            continue;
        rc = kvq__bucket_fill(b, &b->works[l], entries, n, true);
        from = from < l ? from : l;
        to = l + 1;
    }
    return rc || from >= to ? rc : kvq__bucket_copy(b, from, to);
}

static bool gives(const struct kvq_bucket *b, uint32_t layer)
{
    return b->noted[layer] && b->works[layer].k.buffer;
}

// Layers look for K and V of others, which are noted first; whose rows they are is known once it is
// known who stays in the step.
static int set_up_noted(struct kvq_local *local, struct kvq_bucket *b, struct kvq_entry *entries,
                        uint32_t n)
{
    for (uint32_t l = 0; l < b->n_layers; l++)
        if (gives(b, l))
            kvq__local_note(local, &b->works[l]);
    int rc = check_noted(local, b, entries, n);
    for (uint32_t l = 0; l < b->n_layers && rc == KVQ_OK; l++)
        if (gives(b, l))
            kvq__local_note_rows(local, &b->works[l], entries, n);
    return rc ? rc : fill_noted(b, entries, n);
}

// Behind the last steps of its sessions, also where these were on other buckets' streams: what they
// left is read now.
static int follow_other_buckets(const struct kvq_local *local, const struct kvq_bucket *b,
                                const struct kvq_entry *entries, uint32_t n,
                                struct kvq_gpu_stream *stream)
{
    const struct kvq_bucket *last = b;
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < n && rc == KVQ_OK; i++) {
        const struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        if (!s || !s->bucket || s->bucket == b || s->bucket == last)
            continue;
        last = s->bucket;
        rc = refuse_captured(local, last, stream, "begin");
        rc = rc ? rc : kvq__bucket_follow(last, stream);
    }
    return rc;
}

static int begin_in_bucket(struct kvq_local *local, struct kvq_bucket *b, struct kvq_entry *entries,
                           uint32_t n, struct kvq_gpu_stream *stream)
{
    assert(!local->stepping && local->n_members == 0);
    local->bucket = b;
    local->stream = stream;
    if (*local->why)
        return kvq__through_begin(local, entries, n);
    int rc = refuse_captured(local, b, stream, "begin");
    if (rc == KVQ_OK)
        rc = kvq__bucket_check_noted(b);
    if (rc == KVQ_OK)
        rc = follow_other_buckets(local, b, entries, n, stream);
    if (rc == KVQ_OK)
        rc = kvq__local_begin(local, entries, n);
    if (rc == KVQ_OK)
        rc = kvq__bucket_turn(b, stream);
    return rc ? rc : set_up_noted(local, b, entries, n);
}

int kvq_local_begin_on_stream(kvq_local *local, kvq_bucket *bucket, struct kvq_entry *entries,
                              uint32_t n, void *stream)
{
    int rc = check_bucket_call(local, bucket, "step begin", entries, n);
    if (rc)
        return rc;
    if (local->stepping)
        return kvq__set_error(KVQ_E_BUSY, "step begin: this kvq_local's step is still open; "
                                          "kvq_local_end_on_stream or kvq_local_abort ends it");
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    rc = begin_in_bucket(local, bucket, entries, n, stream);
    kvq__context_leave(&local->here, before);
    if (rc || !local->stepping)
        kvq__local_over(local);
    for (uint32_t i = 0; rc && i < n; i++)
        entries[i].status = rc;
    return rc;
}

// ---- Attend ----

// Tensors in the host's memory are pinned when they are first given, which would spoil a capture.
static int reach_tensor(const struct kvq_local *local, const struct kvq_tensor *t, uint32_t layer,
                        bool capturing)
{
    const kvq_buffer *b = t->buffer;
    bool known = !b || b->kind != KVQ__BUFFER_HOST || b->client != local->client ||
                 kvq__gpu_buffer_reached(b);
    if (known)
        return KVQ_OK;
    if (!capturing)
        return kvq__gpu_buffer_reach(b, &local->here);
    return kvq__set_error(
        KVQ_E_UNSUPPORTED,
        "attend, layer %u: the stream is being captured into a graph, and a buffer of "
        "%zu bytes in the host's memory is not pinned yet; give it to a "
        "kvq_local_attend_on_stream before the capture begins",
        layer, b->bytes);
}

static int reach_tensors(const struct kvq_local *local, const struct kvq_work *w, bool capturing)
{
    const struct kvq__tensors tensors = kvq__tensors_of(w);
    int rc = KVQ_OK;
    for (int i = 0; i < KVQ__TENSORS && rc == KVQ_OK; i++)
        rc = reach_tensor(local, tensors.at[i], w->layer, capturing);
    return rc;
}

static int capture_layer(struct kvq_local *local, struct kvq_bucket *b, const struct kvq_work *work,
                         struct kvq_entry *entries, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        entries[i].status = KVQ_OK;
    if (*local->why)
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "attend: the stream is being captured into a graph, but "
                              "attention goes through the daemon (%s)",
                              local->why);
    kvq__bucket_note(b, work);
    return KVQ_OK;
}

// Writes the batch where the stream may not have copied an earlier one of this layer yet.
static int fill_now(struct kvq_bucket *b, const struct kvq_work *work,
                    const struct kvq_entry *entries, uint32_t n)
{
    int rc = b->filled[work->layer] ? kvq__bucket_turn(b, b->stream) : KVQ_OK;
    if (rc == KVQ_OK)
        rc = kvq__bucket_fill(b, work, entries, n, false);
    return rc ? rc : kvq__bucket_copy(b, work->layer, work->layer + 1);
}

static int attend_now(struct kvq_local *local, struct kvq_bucket *b, const struct kvq_work *work,
                      struct kvq_entry *entries, uint32_t n)
{
    uint64_t from = UINT64_MAX, to = 0;
    bool failed = false;
    assert(local->stepping && local->bucket == b);
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_entry *e = &entries[i];
        e->status = kvq__local_check_part(local, work, e);
        if (e->status == KVQ_OK && kvq__local_row_taken(entries, i, &from, &to))
            e->status = KVQ_E_INVALID;
        if (e->status == KVQ_OK && e->queries > b->max_queries)
            e->status = KVQ_E_LIMIT;
        e->value = e->position;
        failed |= e->status != KVQ_OK;
    }
    int rc = kvq__local_check_outputs(local, work, entries, n, false);
    if (rc == KVQ_OK)
        rc = fill_now(b, work, entries, n);
    if (rc == KVQ_OK && work->k.buffer) {
        kvq__local_note(local, work);
        kvq__local_note_rows(local, work, entries, n);
    }
    if (rc == KVQ_OK && failed)
        kvq__local_explain(local, work->k.buffer ? KVQ_OP_APPEND_ATTEND : KVQ_OP_ATTEND, work,
                           entries, n);
    return rc;
}

static int attend_in_bucket(struct kvq_local *local, struct kvq_bucket *b,
                            const struct kvq_work *work, struct kvq_entry *entries, uint32_t n,
                            struct kvq_gpu_stream *stream)
{
    bool capturing;
    int rc = is_capturing(local, stream, &capturing);
    if (rc)
        return rc;
    if (!capturing && (!local->stepping || local->bucket != b))
        return kvq__set_error(KVQ_E_NO_STEP, "attend: no step was begun with this bucket; "
                                             "kvq_local_begin_on_stream begins one");
    if (!capturing && stream != local->stream)
        return kvq__set_error(KVQ_E_INVALID,
                              "attend, layer %u: the stream is not the one that "
                              "kvq_local_begin_on_stream began the step on",
                              work->layer);
    if (*local->why && !capturing)
        return kvq__through_attend(local, work, entries, n);
    if (!*local->why && work->layer >= b->n_layers)
        return kvq__set_error(KVQ_E_SHAPE, "attend, layer %u: the bucket's sessions have %u",
                              work->layer, b->n_layers);
    rc = *local->why ? KVQ_OK : reach_tensors(local, work, capturing);
    if (rc == KVQ_OK)
        rc = kvq__local_check_work(local, work);
    if (rc == KVQ_OK)
        rc = capturing ? capture_layer(local, b, work, entries, n)
                       : attend_now(local, b, work, entries, n);
    if (rc == KVQ_OK)
        rc = kvq__bucket_launch(b, work->layer, capturing, stream);
    if (!capturing)
        kvq__local_gave(local, work, entries, n, rc);
    return rc;
}

int kvq_local_attend_on_stream(kvq_local *local, kvq_bucket *bucket, const struct kvq_work *work,
                               struct kvq_entry *entries, uint32_t n, void *stream)
{
    int rc = check_bucket_call(local, bucket, "attend", entries, n);
    if (rc)
        return rc;
    if (!work)
        return kvq__set_error(KVQ_E_INVALID, "attend: work is NULL");
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    rc = attend_in_bucket(local, bucket, work, entries, n, stream);
    kvq__context_leave(&local->here, before);
    return rc;
}

// ---- End ----

// The end is behind the step's attention, since the daemon writes table and blocks anew; and what
// comes next in the bucket is behind the end, whichever stream that was on.
static int end_in_bucket(struct kvq_local *local, const struct kvq_step_work *work,
                         struct kvq_entry *entries, uint32_t n, struct kvq_gpu_stream *stream)
{
    struct kvq_bucket *b = local->bucket;
    struct kvq_gpu_stream *begun_on = local->stream;
    int rc = refuse_captured(local, b, stream, "end");
    rc = rc ? rc : kvq__bucket_follow(b, stream);
    if (rc)
        return rc;
    local->stream = stream;
    rc = kvq__local_end(local, work, entries, n);
    local->stream = begun_on;
    if (b->used)
        b->stream = stream;
    // Those who stay in the step go on there where it was begun.
    int followed = local->stepping ? kvq__bucket_follow(b, begun_on) : KVQ_OK;
    return rc ? rc : followed;
}

int kvq_local_end_on_stream(kvq_local *local, const struct kvq_step_work *work,
                            struct kvq_entry *entries, uint32_t n, void *stream)
{
    int rc = kvq__local_check_call(local, "step end", entries, n);
    if (rc == KVQ_OK)
        rc = kvq__local_check_place(local, true);
    if (rc)
        return rc;
    if (!local->stepping)
        return kvq__set_error(KVQ_E_NO_STEP,
                              "step end: no step was begun; kvq_local_begin_on_stream begins one");
    assert(local->bucket);
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    struct kvq_gpu_stream *begun_on = local->stream;
    if (*local->why) {
        local->stream = stream;
        rc = kvq__through_end(local, work, entries, n);
        local->stream = begun_on; // of those who stay in the step
    } else {
        rc = end_in_bucket(local, work, entries, n, stream);
    }
    kvq__context_leave(&local->here, before);
    return rc;
}
