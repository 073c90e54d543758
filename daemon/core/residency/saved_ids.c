// SPDX-License-Identifier: Apache-2.0
//
// Ids of tokens and spans as stored parts of a session; see saved.h. A session works without them,
// so damage among them only ends what is known.
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/saved.h"
#include "daemon/core/state.h"

static uint64_t parts_of_ids(uint64_t known)
{
    return (known + KVQ__IDS_PART - 1) / KVQ__IDS_PART;
}

uint32_t kvq__saved_ids_parts(const struct kvq__saved *saved)
{
    return (uint32_t)parts_of_ids(saved->known) + (saved->n_spans > 0);
}

struct kvq__part kvq__saved_ids_part(const struct kvq__saved *saved, uint32_t i)
{
    struct kvq__part part = {
        .layer = KVQ__IDS_LAYER, .page = i, .kind = KVQ__PART_IDS, .from = KVQ_MAX_SESSION_TOKENS};
    uint64_t first = (uint64_t)i * KVQ__IDS_PART, left = saved->known - first;
    if (first < saved->known) {
        part.bytes = (left < KVQ__IDS_PART ? left : KVQ__IDS_PART) * sizeof *saved->ids;
    } else {
        part.page = UINT32_MAX; // behind all parts of ids
        part.kind = KVQ__PART_SPANS;
        part.bytes = saved->n_spans * sizeof(struct kvq__saved_span);
    }
    return part;
}

// ---- Reading ----

// The part's place in the list; n: it is not there.
static uint32_t place_of_ids(const struct kvq__ids_reader *r, const struct kvq__part *wanted)
{
    uint32_t low = 0, high = r->n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (kvq__part_order(&r->parts[middle], wanted) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool there = low < r->n && kvq__part_order(&r->parts[low], wanted) == 0 &&
                 r->parts[low].bytes == wanted->bytes;
    return there ? low : r->n;
}

// 0, 1 if the part is lost, or a code that ends all.
static int read_part(const struct kvq__saved *saved, const struct kvq__ids_reader *r, uint32_t i,
                     void *out)
{
    struct kvq__part wanted = kvq__saved_ids_part(saved, i);
    uint32_t at = place_of_ids(r, &wanted);
    int rc = at < r->n ? r->read(r->context, at, out) : 1;
    return rc == KVQ_E_NO_MEMORY || rc == KVQ_E_STALE ? rc : rc != 0;
}

static int read_spans(struct kvq__saved *saved, const struct kvq__ids_reader *r)
{
    struct kvq__saved_span *from = calloc(saved->n_spans, sizeof *from);
    struct kvq__span *spans = calloc(saved->n_spans, sizeof *spans);
    uint32_t part = kvq__saved_ids_parts(saved) - 1;
    int rc = from && spans ? read_part(saved, r, part, from) : KVQ_E_NO_MEMORY;
    for (uint32_t i = 0; i < saved->n_spans && rc == 0; i++) {
        spans[i] = (struct kvq__span){.first = from[i].first, .tokens = from[i].tokens};
        memcpy(spans[i].digest, from[i].digest, sizeof spans[i].digest);
    }
    free(from);
    if (rc == 0)
        saved->spans = spans;
    else
        free(spans);
    return rc;
}

static int read_saved_ids(struct kvq__saved *saved, const struct kvq__ids_reader *r, uint64_t known)
{
    uint64_t parts = parts_of_ids(known);
    int32_t *ids = malloc(parts * KVQ__IDS_PART * sizeof *ids);
    int rc = ids ? 0 : KVQ_E_NO_MEMORY;
    uint32_t i = 0;
    for (; i < parts && rc == 0; i++)
        rc = read_part(saved, r, i, ids + (size_t)i * KVQ__IDS_PART);
    if (rc > 0)
        known = (uint64_t)(i - 1) * KVQ__IDS_PART;
    saved->ids = ids;
    saved->known = known;
    return rc < 0 ? rc : 0;
}

int kvq__saved_ids_read(struct kvq__saved *saved, const struct kvq__ids_reader *r)
{
    uint64_t known = saved->known < r->most ? saved->known : r->most;
    bool sane = saved->known <= saved->tokens && saved->tokens <= KVQ_MAX_SESSION_TOKENS &&
                saved->n_spans <= KVQ_MAX_SPANS;
    int rc = !sane ? 1 : saved->n_spans ? read_spans(saved, r) : 0;
    if (rc == 0 && known > 0)
        rc = read_saved_ids(saved, r, known);
    else
        saved->known = 0;
    if (!saved->spans)
        saved->n_spans = 0;
    if (rc < 0)
        kvq__saved_ids_free(saved);
    return rc < 0 ? rc : 0;
}

void kvq__saved_ids_free(struct kvq__saved *saved)
{
    free((void *)(uintptr_t)saved->ids);
    free((void *)(uintptr_t)saved->spans);
    saved->ids = NULL;
    saved->spans = NULL;
    saved->known = saved->n_spans = 0;
}

// ---- Restoring ----

// Notes which of the restored ids the store has as they will stay.
static void note_stored(struct kvq__session *s, const struct kvq__part *parts, uint32_t n)
{
    for (uint32_t i = n; i > 0 && parts[i - 1].layer == KVQ__IDS_LAYER; i--) {
        const struct kvq__part *part = &parts[i - 1];
        uint64_t end = ((uint64_t)part->page + 1) * KVQ__IDS_PART;
        if (part->kind == KVQ__PART_IDS && end <= s->ids.known && end <= s->floor)
            s->ids.parts[part->page]->stored = part->id;
    }
}

int kvq__ids_restore(struct kvq__session *s, const struct kvq__saved *saved,
                     const struct kvq__part *parts, uint32_t n, char *text)
{
    uint64_t had = saved->ids ? saved->known : 0, known = had < s->tokens ? had : s->tokens;
    char why[KVQ_TEXT_BYTES] = "";
    if (!saved->ids && !saved->spans)
        return 0;
    int rc = saved->known > saved->tokens || saved->n_spans > KVQ_MAX_SPANS ? KVQ_E_LIMIT : 0;
    rc = rc ? rc : kvq__ids_spans(s, saved->spans, saved->n_spans, why);
    if (rc == 0 && known > 0)
        rc = kvq__ids_set(s, saved->ids, known);
    if (rc < 0)
        return kvq__fail(text, rc == KVQ_E_NO_MEMORY || rc == KVQ_E_QUOTA ? rc : KVQ_E_DAMAGED,
                         "the token ids of session \"%s\" cannot be restored, %llu of %llu: %.200s",
                         s->name, (unsigned long long)saved->known,
                         (unsigned long long)saved->tokens,
                         why[0]                  ? why
                         : rc == KVQ_E_NO_MEMORY ? "no memory"
                         : rc == KVQ_E_QUOTA     ? "its namespace is at its limit of table bytes"
                                                 : "too many");
    if (known > 0)
        note_stored(s, parts, n);
    return 0;
}
