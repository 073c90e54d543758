// SPDX-License-Identifier: Apache-2.0
//
// The host's side of attention on the GPU: cutting a batch into tiles, splits and items, and
// launching the kernels for it.
#include "kernels/cuda/attend.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

// Sources of packed keys and values, in the order of attend_list.h.
enum kvq_gpu_source_kind {
    AFFINE2,
    AFFINE3,
    AFFINE4,
    SHARED2,
    SHARED3,
    INNERQ2,
    INNERQ3,
    BOOK,
    ANY,
    RAW,
    SOURCES
};

// ---- The batch in memory ----

struct header {
    uint32_t narrow_items, wide_items;
    uint32_t whole; // narrow items that are the splits of the same rows and head; 0: they differ
    uint32_t cost;  // of all narrow items
    uint32_t unused[12];
};
static_assert(offsetof(struct header, narrow_items) == 0 &&
                  offsetof(struct header, whole) == KVQ_GPU_WHOLE_WORD * sizeof(uint32_t) &&
                  offsetof(struct header, cost) == KVQ_GPU_COST_WORD * sizeof(uint32_t),
              "kernels find them there");

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

// Byte offsets within a batch.
struct places {
    size_t sessions, tiles, narrow, wide, end;
};

static struct places places_of(const struct kvq_gpu_attend_limits *l)
{
    struct places p;
    p.sessions = aligned(sizeof(struct header));
    p.tiles = p.sessions + aligned(l->sessions * sizeof(struct kvq_gpu_session));
    p.narrow = p.tiles + aligned(l->tiles * sizeof(struct kvq_gpu_tile));
    p.wide = p.narrow + aligned(l->narrow_items * sizeof(struct kvq_gpu_item));
    p.end = p.wide + aligned(l->wide_items * sizeof(struct kvq_gpu_item));
    return p;
}

size_t kvq_gpu_attend_batch_bytes(const struct kvq_gpu_attend_limits *limits)
{
    return places_of(limits).end;
}

size_t kvq_gpu_attend_batch_used(const struct kvq_gpu_attend_limits *limits, const void *batch)
{
    struct places p = places_of(limits);
    struct header h;
    memcpy(&h, batch, sizeof h);
    assert(h.narrow_items <= limits->narrow_items && h.wide_items <= limits->wide_items);
    if (h.wide_items)
        return p.wide + h.wide_items * sizeof(struct kvq_gpu_item);
    return h.narrow_items ? p.narrow + h.narrow_items * sizeof(struct kvq_gpu_item) : sizeof h;
}

// Bytes of the workspace's parts: counters first, then both kinds of sums.
static size_t counters_bytes(const struct kvq_gpu_attend_limits *l)
{
    return aligned((size_t)l->counters * sizeof(uint32_t));
}

static size_t states_bytes(const struct kvq_gpu_attend_limits *l)
{
    return aligned(l->partial_rows * 2 * sizeof(float));
}

size_t kvq_gpu_attend_workspace_bytes(const struct kvq_gpu_layer *layer,
                                      const struct kvq_gpu_attend_limits *limits)
{
    return counters_bytes(limits) + states_bytes(limits) +
           limits->partial_rows * layer->shape->k_dim * sizeof(float);
}

// ---- What a session's share is ----

static uint32_t gqa_of(const struct kvq_gpu_layer *layer)
{
    return (uint32_t)layer->shape->q_heads / layer->shape->kv_heads;
}

static uint64_t total_of(const struct kvq_attend *a)
{
    return a->past_tokens + a->step_tokens;
}

static uint32_t rows_of(const struct kvq_gpu_layer *layer, const struct kvq_attend *a)
{
    return a->q_tokens * gqa_of(layer);
}

// Whether the session goes to the wide kernels: a matter of its own rows alone.
static bool is_wide(const struct kvq_gpu_layer *layer, const struct kvq_attend *a)
{
    assert(layer->wide_rows || !layer->wide_split);
    return layer->wide_split || (layer->wide_rows && rows_of(layer, a) > KVQ_GPU_NARROW_ROWS);
}

// Query rows of the largest tile that the session may have.
static uint32_t tile_rows(const struct kvq_gpu_layer *layer, const struct kvq_attend *a)
{
    if (is_wide(layer, a))
        return layer->wide_rows;
    return kvq_gpu_attend_stack_rows(layer);
}

static uint64_t divided_up(uint64_t n, uint64_t by)
{
    return (n + by - 1) / by;
}

// Tokens of its splits: a matter of the session alone as well.
static uint32_t split_of(const struct kvq_gpu_layer *layer, const struct kvq_attend *a)
{
    uint64_t total = total_of(a), tiles = divided_up(rows_of(layer, a), tile_rows(layer, a));
    uint64_t items = tiles * layer->shape->kv_heads;
    uint32_t split = KVQ_GPU_SPLIT_MIN;
    if (layer->wide_split)
        return layer->wide_split;
    if (!is_wide(layer, a)) {
        while (split < KVQ_GPU_SPLIT_MAX && (uint64_t)split * KVQ_GPU_SPLITS < total)
            split *= 2;
        return split;
    }
    while (split < KVQ_GPU_WIDE_SPLIT_MAX && items * (total / (2 * split)) >= KVQ_GPU_WIDE_ITEMS)
        split *= 2;
    return split;
}

uint32_t kvq_gpu_attend_wide_split(const struct kvq_gpu_layer *layer, const struct kvq_attend *call)
{
    return is_wide(layer, call) ? split_of(layer, call) : 0;
}

// The splits that any query sees, one at least.
static void set_splits(const struct kvq_gpu_layer *layer, const struct kvq_attend *a,
                       struct kvq_gpu_session *s)
{
    uint64_t window = layer->shape->window, total = total_of(a), end = a->q_start + a->q_tokens;
    uint64_t from = window && a->q_start + 1 > window ? a->q_start + 1 - window : 0;
    if (a->flags & KVQ_ATTEND_PAST_ONLY)
        end = a->past_tokens;
    end = end < total ? end : total;
    s->split_tokens = split_of(layer, a);
    s->first_split = from < end ? (uint32_t)(from / s->split_tokens) : 0;
    s->splits = 1;
    if (from < end)
        s->splits = (uint32_t)divided_up(end, s->split_tokens) - s->first_split;
}

static struct kvq_gpu_session session_of(const struct kvq_gpu_layer *layer,
                                         const struct kvq_attend *a)
{
    struct kvq_gpu_session s = {
        .pages = a->pages,
        .extras = a->extras,
        .pool = a->pool,
        .past_tokens = a->past_tokens,
        .step_tokens = a->step_tokens,
        .fresh_start = a->fresh_start,
        .q_start = a->q_start,
        .fresh_k = a->fresh_k,
        .fresh_v = a->fresh_v,
        .q = a->q,
        .out = a->out,
        .out_token_stride = a->out_token_stride,
        .out_head_stride = a->out_head_stride,
        .lse = a->lse,
        .lse_token_stride = a->lse_token_stride,
        .n_pages = a->n_pages,
        .fresh_tokens = a->fresh_tokens,
        .q_tokens = a->q_tokens,
        .flags = a->flags,
        .out_dtype = a->out_dtype,
    };
    set_splits(layer, a, &s);
    return s;
}

// ---- Filling ----

// A walk over the batch, which counts and, where there is memory, writes.
struct walk {
    const struct kvq_gpu_layer *layer;
    const struct kvq_attend *calls;
    const uint64_t *shared;
    struct kvq_gpu_attend_limits used;
    uint32_t whole, cost;                       // as in the header; whole ~0: no narrow items yet
    const struct kvq_gpu_attend_limits *limits; // NULL: only counting
    uint8_t *batch;
    struct places places;
};

static void add_item(struct walk *w, bool wide, struct kvq_gpu_item item, uint32_t cost)
{
    uint32_t *used = wide ? &w->used.wide_items : &w->used.narrow_items;
    size_t place = wide ? w->places.wide : w->places.narrow;
    uint32_t i = (*used)++;
    item.before = w->cost;
    w->cost += wide ? 0 : cost;
    if (i < (wide ? w->limits->wide_items : w->limits->narrow_items))
        memcpy(w->batch + place + i * sizeof item, &item, sizeof item);
}

// A half-open range of splits, or of what is left out of it.
struct range {
    uint32_t from, to;
};

static uint32_t splits_of(struct range in, struct range but)
{
    uint32_t from = in.from > but.from ? in.from : but.from, to = in.to < but.to ? in.to : but.to;
    uint32_t all = in.to > in.from ? in.to - in.from : 0;
    return all - (to > from ? to - from : 0);
}

static void note_whole(struct walk *w, bool wide, uint32_t splits)
{
    if (!wide && splits > 0)
        w->whole = w->whole == ~0u || w->whole == splits ? splits : 0;
}

// What a split costs, in units of 32 tokens: its tokens, and a fixed part that is about as long on
// an H100 as 128 tokens are.
static uint32_t cost_of(const struct kvq_gpu_session *s, uint32_t split)
{
    uint64_t from = (uint64_t)split * s->split_tokens, total = s->past_tokens + s->step_tokens;
    uint64_t left = total > from ? total - from : 0;
    uint64_t tokens = left < s->split_tokens ? left : s->split_tokens;
    return (uint32_t)((tokens + KVQ_BLOCK_TOKENS) / KVQ_GROUP_TOKENS);
}

// Items for all KV heads of splits of s in `in`, but those in `but`. Heads one after the other, so
// that blocks of threads seldom change queries.
static void add_items(struct walk *w, const struct kvq_gpu_session *s, bool wide, uint32_t tile,
                      uint32_t tiles, struct range in, struct range but)
{
    if (!w->limits) {
        uint32_t *used = wide ? &w->used.wide_items : &w->used.narrow_items;
        *used += w->layer->shape->kv_heads * splits_of(in, but);
        return;
    }
    note_whole(w, wide, splits_of(in, but));
    for (uint32_t head = 0; head < w->layer->shape->kv_heads; head++)
        for (uint32_t split = in.from; split < in.to; split++)
            if (split < but.from || split >= but.to)
                add_item(w, wide,
                         (struct kvq_gpu_item){tile, (uint16_t)tiles, (uint16_t)head, split, 0},
                         cost_of(s, split));
}

static void add_tile(struct walk *w, const struct kvq_gpu_session *s, uint32_t first_row,
                     uint32_t rows)
{
    uint32_t i = w->used.tiles++;
    w->used.counters += w->layer->shape->kv_heads;
    struct kvq_gpu_tile tile = {.session = w->used.sessions,
                                .first_row = first_row,
                                .rows = rows,
                                .partial = (uint32_t)w->used.partial_rows};
    if (s->splits > 1)
        w->used.partial_rows += (uint64_t)w->layer->shape->kv_heads * s->splits * rows;
    if (w->limits && i < w->limits->tiles)
        memcpy(w->batch + w->places.tiles + i * sizeof tile, &tile, sizeof tile);
}

static void note_rows(struct walk *w, bool wide, uint32_t rows)
{
    if (!wide && rows > w->used.narrow_rows)
        w->used.narrow_rows = rows > 8 ? 16 : 8;
}

// Items for each of n tiles of a wide session. Tiles one after the other, so that a split is read
// from the L2 cache by all but the first; the last split, which is short, last of all, so that
// blocks of threads that have an item more than others have a short one.
static void add_wide_items(struct walk *w, const struct kvq_gpu_session *s, uint32_t tile,
                           uint32_t n, struct range in, struct range but)
{
    uint32_t heads = w->layer->shape->kv_heads, before = s->splits - 1;
    if (!w->limits) {
        w->used.wide_items += n * heads * splits_of(in, but);
        return;
    }
    for (uint32_t i = 0; i < heads * s->splits; i++) {
        bool last = i >= heads * before;
        uint32_t head = last ? i % heads : i / before;
        uint32_t split = last ? in.to - 1 : in.from + i % before;
        for (uint32_t t = 0; t < n && (split < but.from || split >= but.to); t++)
            add_item(w, true, (struct kvq_gpu_item){tile + t, 1, (uint16_t)head, split, 0}, 0);
    }
}

// A session with its tiles, and the items of splits that are not shared.
static void add_session(struct walk *w, const struct kvq_attend *a, struct range shared)
{
    struct kvq_gpu_session s = session_of(w->layer, a);
    struct range all = {s.first_split, s.first_split + s.splits};
    uint32_t rows = rows_of(w->layer, a), most = tile_rows(w->layer, a), first = w->used.tiles;
    bool wide = is_wide(w->layer, a);
    for (uint32_t row = 0; row < rows; row += most) {
        uint32_t n = rows - row < most ? rows - row : most;
        if (!wide)
            add_items(w, &s, false, w->used.tiles, 1, all, shared);
        add_tile(w, &s, row, n);
        note_rows(w, wide, n);
    }
    if (wide)
        add_wide_items(w, &s, first, w->used.tiles - first, all, shared);
    if (w->limits && w->used.sessions < w->limits->sessions)
        memcpy(w->batch + w->places.sessions + w->used.sessions * sizeof s, &s, sizeof s);
    w->used.sessions++;
}

// ---- Sessions that share blocks ----

// Splits that the sessions [first, end) share.
struct stack {
    uint32_t end;
    struct range shared;
};

// Whether the rows of b may stand beside those of a, the call before it.
static bool may_share(const struct kvq_gpu_layer *layer, const struct kvq_attend *a,
                      const struct kvq_attend *b)
{
    return a->q_tokens == b->q_tokens && split_of(layer, a) == split_of(layer, b) &&
           a->q.dtype == b->q.dtype && a->out_dtype == b->out_dtype &&
           kvq_extras_shared(layer->format, a->extras, b->extras);
}

uint64_t kvq_gpu_attend_common(const struct kvq_page *a, uint32_t n_a, const struct kvq_page *b,
                               uint32_t n_b)
{
    uint32_t n = n_a < n_b ? n_a : n_b, i = 0;
    while (i < n && a[i].packed && a[i].packed == b[i].packed &&
           a[i].packed_tokens == KVQ_BLOCK_TOKENS && b[i].packed_tokens == KVQ_BLOCK_TOKENS)
        i++;
    return (uint64_t)i * KVQ_BLOCK_TOKENS;
}

uint32_t kvq_gpu_attend_stack_rows(const struct kvq_gpu_layer *layer)
{
    return layer->shape->k_dim == 256 ? 8 : KVQ_GPU_NARROW_ROWS;
}

// Tokens of `a` that lie in blocks, at most so many.
static uint64_t in_blocks(const struct kvq_attend *a, uint64_t tokens)
{
    return a->fresh_tokens && a->fresh_start < tokens ? a->fresh_start : tokens;
}

// Query rows that an item of several sessions may have: kernels of 8 rows stay those.
static uint32_t item_rows(const struct walk *w, const struct kvq_attend *a)
{
    uint32_t rows = tile_rows(w->layer, a);
    bool fewer = w->limits && !is_wide(w->layer, a) && w->limits->narrow_rows < rows;
    return fewer ? w->limits->narrow_rows : rows;
}

// As many sessions from `first` on as share a split and whose rows fit an item.
static struct stack stack_at(const struct walk *w, uint32_t first, uint32_t n)
{
    const struct kvq_attend *calls = w->calls;
    struct kvq_gpu_session s = session_of(w->layer, &calls[first]);
    struct stack k = {first + 1, {s.first_split, s.first_split + s.splits}};
    uint32_t most = item_rows(w, &calls[first]) / rows_of(w->layer, &calls[first]);
    for (; w->shared && k.end < n && k.end - first < most; k.end++) {
        const struct kvq_attend *a = &calls[k.end - 1], *b = &calls[k.end];
        struct kvq_gpu_session other = session_of(w->layer, b);
        uint64_t tokens = in_blocks(a, in_blocks(b, w->shared[k.end]));
        uint32_t from = other.first_split > k.shared.from ? other.first_split : k.shared.from;
        uint32_t to = (uint32_t)(tokens / s.split_tokens);
        to = to < k.shared.to ? to : k.shared.to;
        to = to < other.first_split + other.splits ? to : other.first_split + other.splits;
        if (!may_share(w->layer, a, b) || from >= to)
            break;
        k.shared.from = from;
        k.shared.to = to;
    }
    if (k.end == first + 1)
        k.shared.to = k.shared.from;
    return k;
}

static void add_stack(struct walk *w, uint32_t first, const struct stack *k)
{
    struct kvq_gpu_session s = session_of(w->layer, &w->calls[first]);
    uint32_t tile = w->used.tiles, n = k->end - first;
    bool wide = is_wide(w->layer, &w->calls[first]);
    for (uint32_t i = first; i < k->end; i++)
        add_session(w, &w->calls[i], k->shared);
    add_items(w, &s, wide, tile, n, k->shared, (struct range){0, 0});
    if (k->shared.from < k->shared.to)
        note_rows(w, wide, n * rows_of(w->layer, &w->calls[first]));
}

static void walk(struct walk *w, uint32_t n)
{
    for (uint32_t i = 0; i < n;) {
        struct stack k = stack_at(w, i, n);
        add_stack(w, i, &k);
        i = k.end;
    }
}

// ---- Checks ----

static int check_calls(const struct kvq_attend *calls, uint32_t n, char *text, size_t text_n)
{
    if (n == 0 || n > KVQ_GPU_MAX_SESSIONS) {
        snprintf(text, text_n, "a batch of %u sessions; it can have 1 to %d", n,
                 KVQ_GPU_MAX_SESSIONS);
        return -1;
    }
    for (uint32_t i = 0; i < n; i++)
        if (calls[i].q_tokens == 0 || calls[i].q_tokens > KVQ_GPU_MAX_QUERIES) {
            snprintf(text, text_n,
                     "session %u of the batch has %u query tokens; it can have 1 to %d", i,
                     calls[i].q_tokens, KVQ_GPU_MAX_QUERIES);
            return -1;
        }
    return 0;
}

int kvq_gpu_attend_needs(const struct kvq_gpu_layer *layer, const struct kvq_attend *calls,
                         const uint64_t *shared, uint32_t n, struct kvq_gpu_attend_limits *needs,
                         char *text, size_t text_n)
{
    struct walk w = {.layer = layer, .calls = calls, .shared = shared};
    if (check_calls(calls, n, text, text_n))
        return -1;
    walk(&w, n);
    *needs = w.used;
    return 0;
}

static void raise_to(uint32_t *most, uint32_t needs)
{
    *most = needs > *most ? needs : *most;
}

static void raise_limits(struct kvq_gpu_attend_limits *most,
                         const struct kvq_gpu_attend_limits *needs)
{
    raise_to(&most->sessions, needs->sessions);
    raise_to(&most->tiles, needs->tiles);
    raise_to(&most->narrow_items, needs->narrow_items);
    raise_to(&most->wide_items, needs->wide_items);
    raise_to(&most->narrow_rows, needs->narrow_rows);
    raise_to(&most->counters, needs->counters);
    if (needs->partial_rows > most->partial_rows)
        most->partial_rows = needs->partial_rows;
}

// The most tokens of which a session with these queries has splits of so many, if not all.
static uint64_t longest_of(const struct kvq_gpu_layer *layer, const struct kvq_attend *a,
                           uint32_t split)
{
    uint64_t tiles = divided_up(rows_of(layer, a), tile_rows(layer, a));
    if (!is_wide(layer, a))
        return (uint64_t)split * KVQ_GPU_SPLITS;
    return 2u * split * divided_up(KVQ_GPU_WIDE_ITEMS, tiles * layer->shape->kv_heads) - 1;
}

int kvq_gpu_attend_bound(const struct kvq_gpu_layer *layer, uint64_t tokens, uint32_t queries,
                         struct kvq_gpu_attend_limits *most, char *text, size_t text_n)
{
    struct kvq_gpu_attend_limits needs;
    *most = (struct kvq_gpu_attend_limits){0};
    for (uint32_t q = 1; q <= queries; q++) {
        struct kvq_attend a = {.past_tokens = tokens, .q_start = tokens, .q_tokens = q};
        if (kvq_gpu_attend_needs(layer, &a, NULL, 1, &needs, text, text_n))
            return -1;
        raise_limits(most, &needs);
        for (uint32_t split = KVQ_GPU_SPLIT_MIN; split < KVQ_GPU_WIDE_SPLIT_MAX; split *= 2) {
            a.past_tokens = a.q_start = longest_of(layer, &a, split);
            if (a.past_tokens == 0 || a.past_tokens >= tokens)
                continue;
            if (kvq_gpu_attend_needs(layer, &a, NULL, 1, &needs, text, text_n))
                return -1;
            raise_limits(most, &needs);
        }
    }
    return 0;
}

// What is larger than the limit, or NULL.
static const char *excess(const struct kvq_gpu_attend_limits *used,
                          const struct kvq_gpu_attend_limits *limits, uint64_t *have,
                          uint64_t *allowed)
{
    const struct {
        const char *what;
        uint64_t used, limit;
    } rows[] = {
        {"sessions", used->sessions, limits->sessions},
        {"tiles of query rows", used->tiles, limits->tiles},
        {"items", used->narrow_items, limits->narrow_items},
        {"items of many query rows", used->wide_items, limits->wide_items},
        {"query rows to an item", used->narrow_rows, limits->narrow_rows},
        {"counters", used->counters, limits->counters},
        {"partial sums", used->partial_rows, limits->partial_rows},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].used > rows[i].limit) {
            *have = rows[i].used;
            *allowed = rows[i].limit;
            return rows[i].what;
        }
    return NULL;
}

int kvq_gpu_attend_fill(const struct kvq_gpu_layer *layer, const struct kvq_attend *calls,
                        const uint64_t *shared, uint32_t n,
                        const struct kvq_gpu_attend_limits *limits, void *batch, char *text,
                        size_t text_n)
{
    struct walk w = {.layer = layer,
                     .calls = calls,
                     .shared = shared,
                     .whole = ~0u,
                     .limits = limits,
                     .batch = batch,
                     .places = places_of(limits)};
    struct header header = {0};
    uint64_t have, allowed;
    if (check_calls(calls, n, text, text_n))
        return -1;
    walk(&w, n);
    const char *what = excess(&w.used, limits, &have, &allowed);
    if (what) {
        snprintf(text, text_n,
                 "the batch has %llu %s, and there is room for %llu; make larger limits with "
                 "kvq_gpu_attend_needs",
                 (unsigned long long)have, what, (unsigned long long)allowed);
        return -1;
    }
    header.narrow_items = w.used.narrow_items;
    header.wide_items = w.used.wide_items;
    header.whole = w.whole == ~0u ? 0 : w.whole;
    header.cost = w.cost;
    memcpy(batch, &header, sizeof header);
    return 0;
}

// ---- Launching ----

static bool is_affine(const struct kvq_recipe_side *side, uint8_t axis, uint8_t bits)
{
    return side->row.codec == KVQ_CODEC_AFFINE && side->row.axis == axis &&
           side->row.bits == bits && side->row.group == KVQ_GROUP_TOKENS;
}

// K symmetric, of 3 bits, with a scale for each token and 32 channels; V symmetric or hybrid, of 2
// or 3 bits, with a scale for each channel of 32 tokens.
static bool is_innerq(const struct kvq_recipe *r)
{
    const struct kvq_side *k = &r->k.row, *v = &r->v.row;
    bool hybrid = v->codec == KVQ_CODEC_HYBRID && v->bits == 2;
    bool symmetric = v->codec == KVQ_CODEC_SYMMETRIC && (v->bits == 2 || v->bits == 3);
    return k->codec == KVQ_CODEC_SYMMETRIC && k->bits == 3 && k->axis == KVQ_PER_TOKEN &&
           k->group == KVQ_GROUP_CHANNELS && (hybrid || symmetric) && v->axis == KVQ_PER_CHANNEL &&
           v->group == KVQ_GROUP_TOKENS && r->k_token_scale == KVQ_SCALE_NONE;
}

// K affine with parameters for a whole record, of 2 bits with V affine, or of 3 with V Lloyd-Max; V
// of 2 bits, with one scale for all of a token.
static bool is_shared(const struct kvq_recipe *r, uint8_t k_bits)
{
    const struct kvq_side *k = &r->k.row, *v = &r->v.row;
    uint8_t codec = k_bits == 3 ? KVQ_CODEC_LLOYD : KVQ_CODEC_AFFINE;
    return k->codec == KVQ_CODEC_AFFINE && k->axis == KVQ_PER_CHANNEL && k->bits == k_bits &&
           k->group == KVQ_BLOCK_TOKENS && v->codec == codec && v->axis == KVQ_PER_TOKEN &&
           v->bits == 2 && !v->wide && v->group == r->dim;
}

// A table of 256 entries of 4 channels, one for all sub-vectors.
static bool is_small_book(const struct kvq_recipe_side *side, size_t sub)
{
    return side->row.codec == KVQ_CODEC_BOOK && side->row.bits == 8 && side->row.vector == 4 &&
           sub == 0;
}

static enum kvq_gpu_source_kind source_of(const struct kvq_gpu_attend_args *a)
{
    const struct kvq_recipe *r = &a->recipe;
    if (r->is_raw)
        return RAW;
    for (uint8_t bits = 2; bits <= 4; bits++)
        if (is_affine(&r->k, KVQ_PER_CHANNEL, bits) && is_affine(&r->v, KVQ_PER_TOKEN, bits))
            return AFFINE2 + (bits - 2u);
    if (is_shared(r, 2) || is_shared(r, 3))
        return r->k.row.bits == 2 ? SHARED2 : SHARED3;
    if (is_innerq(r))
        return r->v.row.bits == 2 ? INNERQ2 : INNERQ3;
    if (is_small_book(&r->k, a->book.k_sub) && is_small_book(&r->v, a->book.v_sub) &&
        r->k_token_scale == KVQ_SCALE_NONE)
        return BOOK;
    return ANY;
}

static uint32_t narrow_bytes(const struct kvq_gpu_attend_args *a, uint32_t rows,
                             enum kvq_gpu_source_kind kind)
{
    uint32_t dim = a->recipe.dim, bits = a->recipe.k.row.bits, stages = 0;
    uint32_t raw = KVQ_GPU_RAW_STAGE(dim) * (kind == RAW ? KVQ_GPU_RAW_STAGES(dim) : 1);
    bool apart = kind <= INNERQ3 && KVQ_GPU_APART(dim, rows, bits);
    if (kind == SHARED2 || kind == SHARED3)
        stages = KVQ_GPU_SHARED_STAGES(dim, bits);
    else if (kind <= INNERQ3)
        stages = KVQ_GPU_AFFINE_STAGES(dim, bits);
    return KVQ_GPU_NARROW_BYTES(dim, rows, KVQ_GPU_MOST(stages, raw), apart) +
           (kind == BOOK ? KVQ_GPU_TABLES : 0);
}

// The kernel of a source, or, where a block has less shared memory than its stages and tables take,
// the one for all formats, which has one stage and reads tables where they lie.
static enum kvq_gpu_source_kind source_for(const struct kvq_gpu *gpu,
                                           const struct kvq_gpu_attend_args *a, uint32_t rows)
{
    enum kvq_gpu_source_kind kind = source_of(a);
    return narrow_bytes(a, rows, kind) <= gpu->shared_bytes ? kind : ANY;
}

static enum kvq_gpu_kernel narrow_kernel(const struct kvq_gpu_attend_args *a, uint32_t rows,
                                         enum kvq_gpu_source_kind kind)
{
    uint32_t dim = a->recipe.dim, shape = dim == 64 ? 0 : dim == 128 ? 2 : 4;
    static_assert(KVQ_KERNEL_ATTEND_D256_RAW_N1 - KVQ_KERNEL_ATTEND_D64_B2_N1 == 5 * SOURCES - 1,
                  "attend_list.h has them in order");
    assert(rows <= 8 || dim < 256);
    return KVQ_KERNEL_ATTEND_D64_B2_N1 + SOURCES * (shape + (rows > 8)) + kind;
}

uint32_t kvq_gpu_attend_wide_rows(const struct kvq_gpu *gpu, uint32_t dim)
{
    if (dim < 256 && KVQ_GPU_WIDE_BYTES(dim, 128) <= gpu->shared_bytes)
        return 128;
    return KVQ_GPU_WIDE_BYTES(dim, 64) <= gpu->shared_bytes ? 64 : 0;
}

static struct kvq_gpu_attend_args args_of(const struct kvq_gpu_attend_launch *launch)
{
    const struct kvq_shape *s = launch->layer.shape;
    const struct kvq_gpu_attend_limits *l = &launch->limits;
    const float log2e = 1.44269504f;
    uint8_t *batch = (uint8_t *)(uintptr_t)launch->batch;
    uint8_t *workspace = (uint8_t *)(uintptr_t)launch->workspace;
    struct places p = places_of(l);
    struct kvq_gpu_attend_args a = {
        .sessions = (const void *)(batch + p.sessions),
        .tiles = (const void *)(batch + p.tiles),
        .items = (const void *)(batch + p.narrow),
        .n_items = (const void *)(batch + offsetof(struct header, narrow_items)),
        .counters = (void *)workspace,
        .partial_ml = (void *)(workspace + counters_bytes(l)),
        .kv_heads = s->kv_heads,
        .gqa = gqa_of(&launch->layer),
        .window = s->window,
        .sign = s->scale < 0 ? -1.0f : 1.0f,
        .cap = s->softcap * log2e,
        .recipe = kvq_recipe_of(launch->layer.format, s),
    };
    a.scale = a.sign * (s->softcap != 0.0f ? s->scale / s->softcap : s->scale * log2e);
    a.partial_o = (void *)((uint8_t *)a.partial_ml + states_bytes(l));
    if (launch->layer.book)
        a.book = *launch->layer.book;
    return a;
}

static enum kvq_gpu_kernel wide_kernel(const struct kvq_recipe *r)
{
    return r->dim == 64    ? KVQ_KERNEL_ATTEND_WIDE_D64
           : r->dim == 128 ? KVQ_KERNEL_ATTEND_WIDE_D128
                           : KVQ_KERNEL_ATTEND_WIDE_D256;
}

// Launches a kernel for at most so many items.
static int start(const struct kvq_gpu *gpu, const struct kvq_gpu_attend_launch *launch,
                 const struct kvq_gpu_attend_args *args, enum kvq_gpu_kernel kernel,
                 uint32_t shared, uint32_t items, char *text, size_t n)
{
    struct kvq_gpu_grid grid = {
        .threads = KVQ_GPU_THREADS, .shared = shared, .stream = launch->stream};
    uint32_t blocks = launch->blocks;
    if (blocks == 0) {
        int each;
        if (kvq_gpu_blocks(gpu, kernel, grid.threads, grid.shared, &each, text, n))
            return -1;
        blocks = (uint32_t)(each * gpu->multiprocessors);
    }
    grid.x = blocks < items ? blocks : items;
    return kvq_gpu_launch(gpu, kernel, &grid, args, sizeof *args, text, n);
}

int kvq_gpu_attend(const struct kvq_gpu *gpu, const struct kvq_gpu_attend_launch *launch,
                   char *text, size_t n)
{
    const struct kvq_gpu_attend_limits *l = &launch->limits;
    struct kvq_gpu_attend_args args = args_of(launch);
    enum kvq_gpu_source_kind kind = source_for(gpu, &args, l->narrow_rows);
    if (l->narrow_items &&
        start(gpu, launch, &args, narrow_kernel(&args, l->narrow_rows, kind),
              narrow_bytes(&args, l->narrow_rows, kind), l->narrow_items, text, n))
        return -1;
    if (l->wide_items == 0)
        return 0;
    uint8_t *batch = (uint8_t *)(uintptr_t)launch->batch;
    args.items = (const void *)(batch + places_of(l).wide);
    args.n_items = (const void *)(batch + offsetof(struct header, wide_items));
    return start(gpu, launch, &args, wide_kernel(&args.recipe),
                 KVQ_GPU_WIDE_BYTES(args.recipe.dim, launch->layer.wide_rows), l->wide_items, text,
                 n);
}
