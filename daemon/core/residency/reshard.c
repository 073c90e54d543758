// SPDX-License-Identifier: Apache-2.0
//
// See reshard.h. Shards stand at the same tokens, but each has packed, and given raw blocks back,
// in its own time. The chosen state is one that every source can provide: packed as far as the
// source that has packed least, raw from where all sources have raw blocks.
#include "daemon/core/residency/reshard.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/session/activity.h"
#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

// ---- What all shards have in common ----

static const char *source_difference(const struct kvq__saved *a, const struct kvq__saved *b)
{
    return strcmp(a->model, b->model) != 0        ? "model fingerprint"
           : a->dtype != b->dtype                 ? "dtype"
           : a->max_rollback != b->max_rollback   ? "max_rollback"
           : a->prompt_tokens != b->prompt_tokens ? "prompt_tokens"
           : a->on_detach != b->on_detach         ? "on_detach"
           : a->keep_seconds != b->keep_seconds   ? "keep_seconds"
           : a->stamp != b->stamp                 ? "save that it is of"
           : a->tokens != b->tokens               ? "number of tokens"
                                                  : NULL;
}

static bool is_in_order(const struct kvq__saved_shard *s)
{
    for (uint32_t i = 1; i < s->n_parts; i++)
        if (kvq__part_order(&s->parts[i - 1], &s->parts[i]) >= 0)
            return false;
    return true;
}

static int check_sources(const struct kvq__saved_shard *sources, uint32_t n, char *text)
{
    const struct kvq__saved *first = sources[0].saved;
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq__saved *s = sources[i].saved;
        const char *what = s->shard != i || s->shards != n ? "place among the shards"
                           : s->n_layers == 0              ? "number of layers, none,"
                           : !is_in_order(&sources[i])     ? "order of blocks"
                                                           : source_difference(s, first);
        if (what)
            return kvq__fail(text, KVQ_E_DAMAGED,
                             "what was stored of session \"%s\" makes no sense: shard %u has "
                             "another %s than it should; drop it, or restore it from an export",
                             first->name, i, what);
    }
    return 0;
}

// Everything under way, so that functions have few arguments.
struct making {
    const struct kvq__saved_shard *sources;
    uint32_t n;
    struct kvq__reshard_as as;
    struct kvq__resharded *out;
    uint32_t n_ranges;
    uint32_t at[KVQ_MAX_SHARDS]; // index in each source's parts
    char *text;
};

// Refuses this number of shards.
__attribute__((format(printf, 2, 3))) static int refuse(const struct making *m, const char *why,
                                                        ...)
{
    char own[KVQ_TEXT_BYTES / 2];
    va_list args;
    va_start(args, why);
    vsnprintf(own, sizeof own, why, args);
    va_end(args);
    return kvq__fail(m->text, KVQ_E_EXISTS,
                     "session \"%s\" was saved with %u shards, %u are asked for, and %s; open it "
                     "with %u, drop it, or use another name",
                     m->sources[0].saved->name, m->n, m->as.shards, own, m->n);
}

static int refuse_parts(const struct making *m, uint32_t layer)
{
    return kvq__fail(m->text, KVQ_E_DAMAGED,
                     "what was stored of session \"%s\" makes no sense: the blocks of layer %u are "
                     "of other sizes in one shard than in another; drop it, or restore it from an "
                     "export",
                     m->sources[0].saved->name, layer);
}

// ---- Shards by KV heads: layers ----

static bool same_saved_layer(const struct kvq__saved_layer *a, const struct kvq__saved_layer *b)
{
    return a->row.k_dim == b->row.k_dim && a->row.v_dim == b->row.v_dim &&
           a->row.window == b->row.window && a->row.softcap == b->row.softcap &&
           a->row.scale == b->row.scale && a->row.kv_from == b->row.kv_from &&
           a->v_rotation == b->v_rotation &&
           (uint32_t)a->row.q_heads * b->row.kv_heads ==
               (uint32_t)b->row.q_heads * a->row.kv_heads &&
           strcmp(a->format.name, b->format.name) == 0 && kvq_format_same(&a->format, &b->format);
}

// Whether the layer's heads can be dealt out anew: its format must know heads one by one.
static int check_layer(const struct making *m, uint32_t layer, uint32_t heads)
{
    const struct kvq__saved_layer *first = &m->sources[0].saved->layers[layer];
    const struct kvq_format *f = &first->format;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct kvq__saved_layer *l = &m->sources[i].saved->layers[layer];
        if (l->row.kv_heads == 0 || !same_saved_layer(first, l))
            return refuse(m, "layer %u is another one in shard %u than in shard 0", layer, i);
        if (l->base != first->base)
            return refuse(m,
                          "shard %u has the first %llu tokens of layer %u only packed, shard 0 the "
                          "first %llu",
                          i, (unsigned long long)l->base, layer, (unsigned long long)first->base);
    }
    if (f->k_token_scale == KVQ_SCALE_L2_CROSS)
        return refuse(m,
                      "format %s of layer %u scales a token by the length over all KV heads of its "
                      "shard, which would be others",
                      f->name, layer);
    if (kvq_has_centroids(f))
        return refuse(m,
                      "format %s of layer %u has a codebook, which was made for the KV heads of "
                      "one shard",
                      f->name, layer);
    if (heads % m->as.shards || heads / m->as.shards > KVQ_MAX_HEADS)
        return refuse(m, "layer %u has %u KV heads in all, which so many cannot share equally",
                      layer, heads);
    return 0;
}

static uint32_t heads_of(const struct making *m, uint32_t source, uint32_t layer)
{
    return m->sources[source].saved->layers[layer].row.kv_heads;
}

static uint32_t all_heads(const struct making *m, uint32_t layer)
{
    uint32_t heads = 0;
    for (uint32_t i = 0; i < m->n; i++)
        heads += heads_of(m, i, layer);
    return heads;
}

// The state that all sources have in common. What one has packed further is packed anew.
static int common_state(struct making *m, uint32_t layer, struct kvq__saved_layer *to)
{
    bool learned = false;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct kvq__saved_layer *l = &m->sources[i].saved->layers[layer];
        to->first_page = l->first_page > to->first_page ? l->first_page : to->first_page;
        to->raw_page = l->raw_page > to->raw_page ? l->raw_page : to->raw_page;
        m->out->ahead |= l->packed != to->packed;
        to->packed = kvq__min(l->packed, to->packed);
        to->learned &= l->learned;
        learned |= l->learned;
    }
    uint64_t freed = (uint64_t)to->first_page * KVQ_BLOCK_TOKENS;
    uint64_t raw = (uint64_t)to->raw_page * KVQ_BLOCK_TOKENS;
    bool packs = to->format.k.codec != KVQ_CODEC_RAW;
    if (packs && to->packed < freed)
        to->packed = freed;
    if ((packs && raw > to->packed) || (freed && learned != to->learned))
        return refuse(m,
                      "its shards have packed layer %u to different counts (open it as it was, "
                      "append a token or wait for a moment, and save it again)",
                      layer);
    return 0;
}

// Makes a layer of the shard, with its KV heads: the same part of each layer's.
static int make_layer(struct making *m, uint32_t layer)
{
    struct kvq__saved_layer *to = &m->out->saved.layers[layer];
    uint32_t heads = all_heads(m, layer);
    *to = m->sources[0].saved->layers[layer];
    int rc = check_layer(m, layer, heads);
    if (rc < 0)
        return rc;
    uint32_t ratio = to->row.q_heads / to->row.kv_heads, own = heads / m->as.shards;
    if (ratio * own > KVQ_MAX_HEADS || to->row.q_heads % to->row.kv_heads)
        return refuse(m, "layer %u has %u query heads to %u KV heads", layer, to->row.q_heads,
                      to->row.kv_heads);
    to->row.kv_heads = (uint16_t)own;
    to->row.q_heads = (uint16_t)(ratio * own);
    to->row.format = to->format.name;
    return to->row.kv_from >= 0 ? 0 : common_state(m, layer, to);
}

// ---- Parts ----

// Adds all of the part that a source is at.
static void add_source_part(struct making *m, uint32_t source, uint64_t bytes)
{
    m->out->ranges[m->n_ranges++] =
        (struct kvq__range){.source = source, .part = m->at[source], .n = 1, .bytes = bytes};
}

// Goes on to a part in a source; NULL: the source lacks it.
static const struct kvq__part *seek(struct making *m, uint32_t source, const struct kvq__part *part)
{
    const struct kvq__saved_shard *s = &m->sources[source];
    uint32_t *at = &m->at[source];
    while (*at < s->n_parts && kvq__part_order(&s->parts[*at], part) < 0)
        ++*at;
    return *at < s->n_parts && kvq__part_order(&s->parts[*at], part) == 0 ? &s->parts[*at] : NULL;
}

// The number of strips, each with all heads, in a part; 1 if it has none. 0: an impossible length.
static uint32_t strips_of(const struct making *m, const struct kvq__part *p, uint32_t heads)
{
    const struct kvq__layer_row *row = &m->out->saved.layers[p->layer].row;
    uint64_t dim = kvq_stored_dim(row->k_dim);
    uint64_t strip = heads * KVQ_GROUP_TOKENS * 2 * 2 * dim;
    if (p->kind != KVQ__PART_RAW)
        return 1;
    return strip == 0 || p->bytes % strip || p->bytes / strip > KVQ_BLOCK_GROUPS
               ? 0
               : (uint32_t)(p->bytes / strip);
}

// Adds one part, of the KV heads [low, high) of all; nothing if a source lacks it, since the
// restore finds out whether it is needed.
static int gather_part(struct making *m, const struct kvq__part *model, uint32_t low, uint32_t high)
{
    struct kvq__resharded *out = m->out;
    struct kvq__part *to = &out->parts[out->n_parts];
    uint32_t ranges = m->n_ranges, start = 0, end;
    uint64_t record = 0;
    *to = *model;
    for (uint32_t i = 0; i < m->n && start < high; i++, start = end) {
        uint32_t heads = heads_of(m, i, model->layer);
        end = start + heads;
        if (end <= low)
            continue;
        uint32_t from = start > low ? start : low, until = end < high ? end : high;
        const struct kvq__part *p = seek(m, i, model);
        if (!p) {
            m->n_ranges = ranges;
            return 0;
        }
        uint32_t strips = strips_of(m, p, heads);
        if (strips == 0 || p->bytes % heads || p->bytes >> 40 ||
            (record && p->bytes / heads != record))
            return refuse_parts(m, model->layer);
        record = p->bytes / heads;
        uint64_t unit = record / strips; // bytes of a head in a strip
        out->ranges[m->n_ranges++] = (struct kvq__range){.source = i,
                                                         .part = m->at[i],
                                                         .n = strips,
                                                         .from = (from - start) * unit,
                                                         .to = (from - low) * unit,
                                                         .bytes = (until - from) * unit,
                                                         .from_step = heads * unit,
                                                         .to_step = (high - low) * unit};
        to->id = until - from == heads && heads == high - low ? p->id : 0;
    }
    to->bytes = (high - low) * record;
    out->first[out->n_parts++] = ranges;
    return 0;
}

// The first source that has some of a layer's heads from `head` on.
static uint32_t source_of(const struct making *m, uint32_t layer, uint32_t head)
{
    uint32_t i = 0;
    for (uint32_t end = heads_of(m, 0, layer); end <= head; end += heads_of(m, i, layer))
        i++;
    return i;
}

static int gather_layer(struct making *m, uint32_t layer)
{
    uint32_t own = m->out->saved.layers[layer].row.kv_heads, low = m->as.shard * own;
    uint32_t first = source_of(m, layer, low);
    const struct kvq__saved_shard *lead = &m->sources[first];
    uint32_t i = m->at[first];
    int rc = 0;
    if (m->out->saved.layers[layer].row.kv_from >= 0)
        return 0;
    while (i < lead->n_parts && lead->parts[i].layer < layer)
        i++;
    for (; rc == 0 && i < lead->n_parts && lead->parts[i].layer == layer; i++)
        rc = gather_part(m, &lead->parts[i], low, low + own);
    return rc;
}

static int by_heads(struct making *m)
{
    int rc = 0;
    for (uint32_t i = 0; i < m->out->saved.n_layers && rc == 0; i++)
        rc = make_layer(m, i);
    for (uint32_t i = 0; i < m->out->saved.n_layers && rc == 0; i++)
        rc = gather_layer(m, i);
    return rc;
}

// ---- Shards by layers ----

// Layer `to` of the new shard, which is layer `layer` of a source, whose first is `start` of all.
static int take_source_layer(struct making *m, uint32_t source, uint32_t layer, uint32_t start,
                             uint32_t to)
{
    struct kvq__resharded *out = m->out;
    const struct kvq__saved_shard *s = &m->sources[source];
    struct kvq__saved_layer *l = &out->saved.layers[to];
    int32_t first = (int32_t)(m->as.shard * m->as.n_layers); // of all
    *l = s->saved->layers[layer];
    l->row.format = l->format.name;
    if (kvq_has_centroids(&l->format))
        return refuse(m,
                      "format %s of layer %u of shard %u has a codebook, in which that layer has "
                      "its number",
                      l->format.name, layer, source);
    if (l->format.plain_layers)
        return refuse(m,
                      "format %s of layer %u of shard %u is another one for a shard's first layers",
                      l->format.name, layer, source);
    if (l->row.kv_from >= 0) {
        l->row.kv_from += (int32_t)start - first;
        return l->row.kv_from >= 0 ? 0
                                   : refuse(m,
                                            "layer %u of shard %u reads the cache of a layer that "
                                            "would be in another shard",
                                            layer, source);
    }
    for (; m->at[source] < s->n_parts && s->parts[m->at[source]].layer <= layer; m->at[source]++) {
        const struct kvq__part *p = &s->parts[m->at[source]];
        if (p->layer < layer)
            continue;
        out->first[out->n_parts] = m->n_ranges;
        out->parts[out->n_parts] = *p;
        out->parts[out->n_parts++].layer = to;
        add_source_part(m, source, p->bytes);
    }
    return 0;
}

static int by_layers(struct making *m)
{
    uint32_t start = 0, first = m->as.shard * m->as.n_layers, n = m->as.n_layers, to = 0;
    int rc = 0;
    for (uint32_t i = 0; i < m->n && rc == 0; i++) {
        uint32_t own = m->sources[i].saved->n_layers;
        for (uint32_t j = 0; j < own && rc == 0; j++)
            if (start + j >= first && start + j < first + n)
                rc = take_source_layer(m, i, j, start, to++);
        start += own;
    }
    return rc;
}

// ---- Ids of tokens ----

// The source that knows most ids: all have the same tokens, but not all need know their ids.
static uint32_t who_knows(const struct making *m)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct kvq__saved *s = m->sources[i].saved, *b = m->sources[best].saved;
        if (s->ids && (!b->ids || s->known > b->known))
            best = i;
    }
    return best;
}

static void take_source_ids(struct making *m)
{
    struct kvq__resharded *out = m->out;
    uint32_t source = who_knows(m), i = m->sources[source].n_parts;
    const struct kvq__part *parts = m->sources[source].parts;
    const struct kvq__saved *from = m->sources[source].saved;
    out->saved.ids = from->ids;
    out->saved.known = from->ids ? from->known : 0;
    out->saved.spans = from->spans;
    out->saved.n_spans = from->spans ? from->n_spans : 0;
    while (i > 0 && parts[i - 1].layer >= KVQ__IDS_LAYER)
        i--;
    for (; i < m->sources[source].n_parts; i++) {
        m->at[source] = i;
        out->first[out->n_parts] = m->n_ranges;
        out->parts[out->n_parts++] = parts[i];
        add_source_part(m, source, parts[i].bytes);
    }
}

// ---- The whole ----

static int reserve_ranges(struct making *m, uint32_t n_layers)
{
    struct kvq__resharded *out = m->out;
    size_t n = 0;
    for (uint32_t i = 0; i < m->n; i++)
        n += m->sources[i].n_parts;
    if (n >= UINT32_MAX)
        return KVQ_E_NO_MEMORY;
    out->saved.n_layers = n_layers;
    out->saved.layers = calloc(n_layers, sizeof *out->saved.layers);
    out->parts = calloc(n + 1, sizeof *out->parts);
    out->ranges = calloc(n + 1, sizeof *out->ranges);
    out->first = calloc(n + 1, sizeof *out->first);
    return out->saved.layers && out->parts && out->ranges && out->first ? 0 : KVQ_E_NO_MEMORY;
}

static void describe_shard(struct making *m)
{
    struct kvq__saved *to = &m->out->saved;
    bool own_format = true;
    *to = *m->sources[0].saved;
    for (uint32_t i = 1; i < m->n; i++) // a prompt that one source packed early is packed
        to->exact_tokens = m->sources[i].saved->exact_tokens ? to->exact_tokens : 0;
    to->layers = NULL;
    to->shard = m->as.shard;
    to->shards = m->as.shards;
    to->saturated = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        uint64_t floor = m->sources[i].saved->floor;
        to->floor = kvq__max(floor, to->floor); // sources that were cut may differ
        own_format &= strcmp(m->sources[i].saved->own_format, to->own_format) == 0;
        if (m->as.shard == 0) // the sum goes to one shard
            to->saturated += m->sources[i].saved->saturated;
    }
    if (!own_format)
        to->own_format[0] = 0;
}

// Refuses sources that differ: shards may, but one shard cannot have two of these.
static int check_own_layers(const struct making *m)
{
    const struct kvq__saved *a = m->sources[0].saved;
    for (uint32_t i = 1; i < m->n; i++) {
        const struct kvq__saved *b = m->sources[i].saved;
        const char *what = a->path != b->path                    ? "attention"
                           : strcmp(a->salt, b->salt) != 0       ? "salt"
                           : strcmp(a->adapter, b->adapter) != 0 ? "adapter"
                                                                 : NULL;
        if (what)
            return refuse(m, "shard %u has another %s than shard 0", i, what);
    }
    return 0;
}

// Shards are KV heads or layers, as the number of layers asked for says.
static int make_shard(struct making *m)
{
    uint32_t own = m->sources[0].saved->n_layers, all = 0, asked = m->as.n_layers;
    bool alike = true;
    int rc = check_own_layers(m);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < m->n; i++) {
        alike &= m->sources[i].saved->n_layers == own;
        all += m->sources[i].saved->n_layers;
    }
    bool heads = alike && (asked == 0 || asked == own);
    if (!heads && (asked == 0 || (uint64_t)asked * m->as.shards != all))
        return refuse(m,
                      "%u layers are asked for (0: as they are): as shards by KV heads each would "
                      "have the %u of shard 0, as shards by layers an equal part of the %u of all",
                      asked, own, all);
    describe_shard(m);
    rc = reserve_ranges(m, heads ? own : asked);
    if (rc < 0)
        return kvq__fail(m->text, rc, "no memory to restore session \"%s\"",
                         m->sources[0].saved->name);
    rc = heads ? by_heads(m) : by_layers(m);
    take_source_ids(m);
    m->out->first[m->out->n_parts] = m->n_ranges;
    return rc;
}

int kvq__reshard(const struct kvq__saved_shard *sources, uint32_t n,
                 const struct kvq__reshard_as *as, struct kvq__resharded *out, char *text)
{
    struct making m = {.sources = sources, .n = n, .as = *as, .out = out, .text = text};
    assert(n > 0 && n <= KVQ_MAX_SHARDS && as->shard < as->shards && as->shards <= KVQ_MAX_SHARDS);
    *out = (struct kvq__resharded){0};
    int rc = check_sources(sources, n, text);
    rc = rc ? rc : make_shard(&m);
    if (rc < 0)
        kvq__resharded_free(out);
    return rc;
}

void kvq__resharded_free(struct kvq__resharded *r)
{
    free(r->saved.layers);
    free(r->parts);
    free(r->ranges);
    free(r->first);
    *r = (struct kvq__resharded){0};
}

// ---- What is in memory with another number ----

bool kvq__reshard_make_way(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                           const struct kvq__saved *stored, uint32_t shards)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__session *s;
    if (kvq__session_get(core, peer, ns, stored->name, &s, text) < 0 || s->shards == shards)
        return false;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m && (kvq__session_uses(m, KVQ__USES_REPLACE) || m->saving.stamp != stored->stamp ||
                  m->tokens != stored->tokens))
            return false;
    }
    for (uint32_t i = 0; i < s->shards; i++)
        if (kvq__group_member(s, i))
            kvq__group_member(s, i)->saving.kept =
                true; // what is stored, also if it was to be parked
    kvq__group_end(s, "it comes back with another number of shards");
    return true;
}

bool kvq__session_here(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                       const char *name, uint32_t shard, uint32_t shards)
{
    struct kvq__session *s;
    if (kvq__session_get(core, peer, ns, name, &s, NULL) < 0)
        return false;
    return shard < s->shards && (shards == 0 || shards == s->shards) &&
           kvq__group_member(s, shard) != NULL;
}

bool kvq__reshard_there(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                        const struct kvq__saved *made, struct kvq__reshard_as *as)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__session *s;
    if (kvq__session_get(core, peer, ns, made->name, &s, text) < 0 ||
        (s->shards == made->shards && s->n_layers == made->n_layers))
        return false;
    as->shards = s->shards;
    as->n_layers = s->n_layers;
    return true;
}
