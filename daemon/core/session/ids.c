// SPDX-License-Identifier: Apache-2.0
//
// The token ids of a session, as far as its writer tells them: at a step's beginning or end, of the
// tokens that the step appends. They are only of use without a gap from the first token on.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/session/prefix.h"
#include "daemon/core/state.h"

enum { FIRST_PARTS = 2 };

// ---- Parts ----

static uint32_t parts_in(uint64_t tokens)
{
    return (uint32_t)((tokens + KVQ__IDS_PART - 1) / KVQ__IDS_PART);
}

static void part_drop(struct kvq__namespace *ns, struct kvq__ids_part *part)
{
    assert(part->refs > 0);
    if (--part->refs == 0)
        kvq__ns_deallocate(ns, part, sizeof *part);
}

static int grow_id_directory(struct kvq__session *s, uint32_t parts)
{
    struct kvq__ids *ids = &s->ids;
    uint32_t room = ids->room ? ids->room : FIRST_PARTS;
    assert(ids->n_parts <= ids->room);
    if (parts <= ids->room)
        return 0;
    while (room < parts)
        room *= 2;
    int rc = 0;
    struct kvq__ids_part **all = kvq__ns_allocate(s->ns, room * sizeof *all, &rc);
    if (!all)
        return rc;
    if (ids->parts)
        memcpy(all, ids->parts, ids->n_parts * sizeof *all);
    kvq__ns_deallocate(s->ns, ids->parts, ids->room * sizeof *all);
    ids->parts = all;
    ids->room = room;
    return 0;
}

int kvq__ids_grow(struct kvq__session *s, uint64_t tokens)
{
    struct kvq__ids *ids = &s->ids;
    uint32_t want = parts_in(tokens);
    int rc = grow_id_directory(s, want);
    while (rc == 0 && ids->n_parts < want) {
        struct kvq__ids_part *part = kvq__ns_allocate(s->ns, sizeof *part, &rc);
        if (!part)
            return rc;
        part->refs = 1;
        assert(ids->n_parts < ids->room);
        ids->parts[ids->n_parts++] = part;
    }
    return rc;
}

void kvq__ids_read(const struct kvq__ids *ids, int32_t *out)
{
    assert(parts_in(ids->known) <= ids->n_parts);
    for (uint64_t t = 0; t < ids->known; t += KVQ__IDS_PART) {
        uint64_t n = kvq__min(ids->known - t, KVQ__IDS_PART);
        memcpy(out + t, kvq__ids_at(ids, t), n * sizeof *out);
    }
}

// The place of an id that is about to be written; no other session shares its part.
static int32_t *own_at(const struct kvq__ids *ids, uint64_t token)
{
    assert(token / KVQ__IDS_PART < ids->n_parts);
    assert(ids->parts[token / KVQ__IDS_PART]->refs == 1);
    return kvq__ids_at(ids, token);
}

// ---- Tokens that come and go ----

int kvq__ids_take(struct kvq__session *s, const volatile int32_t *from, uint32_t tokens)
{
    assert(s->ids.known <= s->tokens);
    s->ids.pending = false;
    if (!from || s->ids.known < s->tokens) // behind a gap they are of no use
        return 0;
    int rc = kvq__ids_grow(s, s->tokens + tokens);
    if (rc < 0)
        return rc;
    for (uint32_t t = 0; t < tokens; t++)
        *own_at(&s->ids, s->tokens + t) = from[t];
    s->ids.pending = true;
    return 0;
}

int kvq__ids_set(struct kvq__session *s, const int32_t *ids, uint64_t known)
{
    assert(s->ids.known == 0 && !s->ids.pending);
    int rc = kvq__ids_grow(s, known);
    for (uint64_t t = 0; t < known && rc == 0; t++)
        *own_at(&s->ids, t) = ids[t];
    s->ids.known = rc == 0 ? known : 0;
    s->ids.again = (uint32_t)(s->ids.known / KVQ_BLOCK_TOKENS);
    return rc;
}

void kvq__ids_commit(struct kvq__session *s, uint64_t had, uint64_t tokens)
{
    if (s->ids.pending && s->ids.known == had)
        s->ids.known += tokens;
    assert(parts_in(s->ids.known) <= s->ids.n_parts);
    s->ids.pending = false;
}

void kvq__ids_restart(struct kvq__ids *ids)
{
    ids->again = kvq__max(ids->again, ids->sealed);
    ids->sealed = 0;
}

void kvq__ids_cut(struct kvq__session *s, uint64_t tokens)
{
    struct kvq__ids *ids = &s->ids;
    if (ids->known > tokens)
        ids->known = tokens;
    if ((uint64_t)ids->sealed * KVQ_BLOCK_TOKENS > ids->known)
        kvq__ids_restart(ids);
}

void kvq__ids_accept(struct kvq__session *s, uint32_t append, const int32_t *list, uint32_t n)
{
    uint64_t start = s->tokens - append;
    assert(n <= append && append <= s->tokens);
    s->ids.pending = s->ids.known >= s->tokens; // else some of those that move are not known
    kvq__ids_cut(s, start);
    for (uint32_t j = 0; s->ids.pending && j < n; j++)
        *own_at(&s->ids, start + j) = *kvq__ids_at(&s->ids, start + (uint64_t)list[j]);
}

// The first `known` ids of another session: parts below both floors are shared, the rest is copied.
static int fork_parts(struct kvq__session *to, const struct kvq__ids *a, uint64_t known)
{
    struct kvq__ids *b = &to->ids;
    uint64_t final = kvq__min(known, to->floor);
    assert(known <= a->known && b->n_parts == 0);
    int rc = grow_id_directory(to, parts_in(known));
    for (; rc == 0 && b->n_parts < final / KVQ__IDS_PART; b->n_parts++) {
        b->parts[b->n_parts] = a->parts[b->n_parts];
        b->parts[b->n_parts]->refs++;
    }
    rc = rc ? rc : kvq__ids_grow(to, known);
    for (uint64_t t = final / KVQ__IDS_PART * KVQ__IDS_PART; rc == 0 && t < known; t++)
        *own_at(b, t) = *kvq__ids_at(a, t);
    return rc;
}

int kvq__ids_fork(struct kvq__session *to, const struct kvq__session *from, uint64_t at)
{
    const struct kvq__ids *a = &from->ids;
    struct kvq__ids *b = &to->ids;
    uint64_t known = kvq__min(a->known, at);
    assert(at <= from->tokens && b->known == 0);
    assert(to->floor <= from->floor);
    int rc = known ? fork_parts(to, a, known) : 0;
    if (rc == 0 && a->n_spans)
        rc = kvq__ids_spans(to, a->spans, a->n_spans, NULL);
    if (rc < 0)
        return rc;
    b->known = known;
    if ((uint64_t)a->sealed * KVQ_BLOCK_TOKENS <= known) { // else it starts anew
        b->sealed = a->sealed;
        memcpy(b->chain, a->chain, sizeof b->chain);
    }
    b->again = kvq__max(a->again, a->sealed);
    return 0;
}

// ---- Images and audio ----

static int check_spans(const struct kvq__span *spans, uint32_t n, char *text)
{
    for (uint32_t i = 0; i < n; i++)
        if (spans[i].tokens == 0 || spans[i].first >= KVQ_MAX_SESSION_TOKENS ||
            spans[i].tokens > KVQ_MAX_SESSION_TOKENS - spans[i].first)
            return kvq__fail(text, KVQ_E_INVALID,
                             "span %u has %u tokens from token %llu on; it can have 1 or more, "
                             "within the %d that a session holds",
                             i, spans[i].tokens, (unsigned long long)spans[i].first,
                             KVQ_MAX_SESSION_TOKENS);
    return 0;
}

static bool spans_overlap(const struct kvq__span *a, const struct kvq__span *b)
{
    return a->first < b->first + b->tokens && b->first < a->first + a->tokens;
}

static bool is_replaced(const struct kvq__span *old, const struct kvq__span *spans, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (spans_overlap(old, &spans[i]))
            return true;
    return false;
}

// In one order, whatever order they were told in.
static int compare_spans(const void *left, const void *right)
{
    const struct kvq__span *a = left, *b = right;
    return a->first != b->first ? (a->first > b->first) - (a->first < b->first)
                                : (a->tokens > b->tokens) - (a->tokens < b->tokens);
}

int kvq__ids_spans(struct kvq__session *s, const struct kvq__span *spans, uint32_t n, char *text)
{
    struct kvq__ids *ids = &s->ids;
    uint32_t kept = 0;
    int rc = check_spans(spans, n, text);
    if (rc < 0 || n == 0)
        return rc;
    for (uint32_t i = 0; i < ids->n_spans; i++)
        kept += !is_replaced(&ids->spans[i], spans, n);
    if (kept + n > KVQ_MAX_SPANS)
        return kvq__fail(text, KVQ_E_LIMIT, "%u spans of images or audio; a session has %d at most",
                         kept + n, KVQ_MAX_SPANS);
    struct kvq__span *all = kvq__ns_allocate(s->ns, (kept + n) * sizeof *all, &rc);
    if (!all)
        return kvq__ns_refused(s->ns, rc, "spans of images or audio", text);
    uint32_t at = 0;
    for (uint32_t i = 0; i < ids->n_spans; i++)
        if (!is_replaced(&ids->spans[i], spans, n))
            all[at++] = ids->spans[i];
    assert(at == kept);
    memcpy(all + at, spans, n * sizeof *all);
    qsort(all, kept + n, sizeof *all, compare_spans);
    kvq__ns_deallocate(s->ns, ids->spans, ids->n_spans * sizeof *all);
    ids->spans = all;
    ids->n_spans = kept + n;
    return 0;
}

// ---- Memory ----

uint64_t kvq__ids_bytes(const struct kvq__session *s)
{
    const struct kvq__ids *ids = &s->ids;
    uint64_t bytes = ids->room * sizeof *ids->parts + ids->n_spans * sizeof *ids->spans;
    for (uint32_t i = 0; i < ids->n_parts; i++)
        bytes += sizeof **ids->parts / ids->parts[i]->refs;
    return bytes;
}

void kvq__ids_pop(struct kvq__session *s)
{
    assert(s->ids.n_parts > 0);
    assert(s->ids.known <= (s->ids.n_parts - 1) * (uint64_t)KVQ__IDS_PART);
    part_drop(s->ns, s->ids.parts[--s->ids.n_parts]);
}

void kvq__ids_free(struct kvq__session *s)
{
    while (s->ids.n_parts > 0)
        kvq__ids_pop(s);
    kvq__ns_deallocate(s->ns, s->ids.parts, s->ids.room * sizeof *s->ids.parts);
    kvq__ns_deallocate(s->ns, s->ids.spans, s->ids.n_spans * sizeof *s->ids.spans);
    s->ids = (struct kvq__ids){0};
}
