// SPDX-License-Identifier: Apache-2.0
//
// Opening a session: what is asked for is checked and built, then either becomes a new session or
// is compared with the one of that name.
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

#define NS_PER_SECOND 1000000000ull

static bool is_empty_text(const char *string)
{
    return !string || !*string;
}

// ---- Checks of the session as a whole ----

static int check_text(const char *what, const char *name, size_t room, char *text)
{
    size_t n = name ? strlen(name) : 0;
    if (n >= room)
        return kvq__fail(text, KVQ_E_LIMIT, "the %s has %zu bytes; it can have %zu", what, n,
                         room - 1);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return kvq__fail(text, KVQ_E_INVALID,
                             "byte %zu of the %s is the control character %#x; use printable text",
                             i, what, (unsigned char)name[i]);
    if (n && name[0] == '#')
        return kvq__fail(text, KVQ_E_INVALID,
                         "the %s starts with '#', which stands for unnamed sessions; use another",
                         what);
    return 0;
}

static int check_choices(const struct kvq__session_spec *spec, char *text)
{
    const struct {
        const char *name;
        uint32_t is, most;
    } choices[] = {{"v_rotation", spec->v_rotation, KVQ__V_NONE},
                   {"attention", spec->path, KVQ_PATH_FAST + 1},
                   {"on_detach", spec->on_detach, KVQ__DETACH_SAVE},
                   {"dtype", spec->dtype, KVQ_BF16}};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (choices[i].is > choices[i].most)
            return kvq__fail(text, KVQ_E_INVALID, "%s is %u; this daemon knows 0 to %u",
                             choices[i].name, choices[i].is, choices[i].most);
    return 0;
}

static int check_numbers(const struct kvq__session_spec *spec, char *text)
{
    bool as_it_is = spec->shards == 0 && spec->n_layers == 0;
    uint32_t shards = spec->shards ? spec->shards : as_it_is ? KVQ_MAX_SHARDS : 1;
    if (shards > KVQ_MAX_SHARDS || spec->shard >= shards)
        return kvq__fail(text, KVQ_E_INVALID, "shard %u of %u; there can be %d, counted from 0",
                         spec->shard, shards, KVQ_MAX_SHARDS);
    if (spec->max_rollback > KVQ_MAX_ROLLBACK)
        return kvq__fail(text, KVQ_E_LIMIT, "max_rollback is %u; it can be %d at most",
                         spec->max_rollback, KVQ_MAX_ROLLBACK);
    if (spec->prompt_tokens > KVQ_MAX_SESSION_TOKENS)
        return kvq__fail(text, KVQ_E_LIMIT, "prompt_tokens is %llu; a session holds %d at most",
                         (unsigned long long)spec->prompt_tokens, KVQ_MAX_SESSION_TOKENS);
    return check_choices(spec, text);
}

static int check_flags(const struct kvq__session_spec *spec, char *text)
{
    if ((spec->flags & KVQ__OPEN_EXACT_PROMPT) && spec->prompt_tokens == 0)
        return kvq__fail(text, KVQ_E_INVALID,
                         "exact_prompt needs to know where the prompt ends; set prompt_tokens");
    if ((spec->flags & KVQ__OPEN_EXACT_PROMPT) && (spec->flags & KVQ__OPEN_PACKED_PROMPT))
        return kvq__fail(text, KVQ_E_INVALID,
                         "exact_prompt and packed_prompt exclude each other; give one of them");
    uint32_t both = KVQ__OPEN_MUST_EXIST | KVQ__OPEN_MUST_CREATE;
    if ((spec->flags & both) == both)
        return kvq__fail(text, KVQ_E_INVALID,
                         "must_exist and must_create exclude each other; give one of them");
    if ((spec->flags & KVQ__OPEN_READ_ONLY) && (spec->flags & KVQ__OPEN_TAKE_OVER))
        return kvq__fail(text, KVQ_E_INVALID,
                         "read_only and take_over exclude each other; a reader needs no hold");
    if (is_empty_text(spec->name) && spec->on_detach >= KVQ__DETACH_KEEP)
        return kvq__fail(text, KVQ_E_INVALID,
                         "an unnamed session cannot be kept, for nobody could open it again; give "
                         "it a name");
    return 0;
}

int kvq__spec_check(const struct kvq__session_spec *spec, char *text)
{
    int rc = check_text("session's name", spec->name, KVQ_NAME_BYTES, text);
    if (rc == 0)
        rc = check_text("model fingerprint", spec->model, KVQ_FINGERPRINT_BYTES, text);
    if (rc == 0)
        rc = check_text("salt", spec->salt, KVQ_NAME_BYTES, text);
    if (rc == 0)
        rc = check_text("adapter", spec->adapter, KVQ_NAME_BYTES, text);
    if (rc == 0)
        rc = check_numbers(spec, text);
    return rc == 0 ? check_flags(spec, text) : rc;
}

// ---- Layers ----

static int count_layers(const struct kvq__session_spec *spec, uint32_t *total, char *text)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < spec->n_layers; i++)
        n += spec->layers[i].repeat ? spec->layers[i].repeat : 1;
    if (n > KVQ_MAX_LAYERS)
        return kvq__fail(text, KVQ_E_LIMIT, "the session has %llu layers; it can have %d at most",
                         (unsigned long long)n, KVQ_MAX_LAYERS);
    *total = (uint32_t)n;
    return 0;
}

// name: the unknown one; NULL: none was given.
static int refuse_format(const struct kvq__core *core, uint32_t layer, const char *name,
                         const char *why, int rc, char *text)
{
    char hint[KVQ_TEXT_BYTES / 3];
    kvq__formats_hint(core, name, hint, sizeof hint);
    const char *between = !*hint ? "" : hint[strlen(hint) - 1] == '?' ? " " : "; ";
    return kvq__fail(text, rc, "layer %u: %.280s%s%s%s", layer, why, hint, between,
                     *hint ? "kvqctl format list shows all" : "");
}

// A row that was saved with a session, which keeps its stages whatever the table has under that
// name by now. A name of the configuration may be gone from there, but not stand for something
// else.
static int take_exact(const struct kvq__core *core, const struct kvq_format *exact,
                      struct kvq_format *found, char *why, size_t n)
{
    const struct kvq_format *known = kvq__format_configured(core, exact->name);
    if (known && !kvq_format_same(known, exact)) {
        snprintf(why, n,
                 "format %s was saved with other stages than the configuration gives it now",
                 exact->name);
        return KVQ_E_FORMAT;
    }
    *found = *exact;
    return kvq_format_check(exact, why, n) ? KVQ_E_FORMAT : 0;
}

static int find_format(struct kvq__session *s, const struct kvq__session_spec *spec,
                       const struct kvq__layer_row *row, uint32_t layer, char *text)
{
    char why[KVQ_TEXT_BYTES / 2];
    struct kvq_format found;
    const char *name = is_empty_text(row->format) ? spec->format : row->format;
    // Layers that read another's cache have its format.
    uint32_t own = row->kv_from >= 0 ? (uint32_t)row->kv_from : layer;
    if (is_empty_text(name))
        return refuse_format(s->core, layer, NULL, "it has no format; give it one of ",
                             KVQ_E_FORMAT, text);
    int rc = row->exact ? take_exact(s->core, row->exact, &found, why, sizeof why)
                        : kvq__format_of_layer(s->core, name, own, &found, why, sizeof why);
    if (rc < 0)
        return refuse_format(s->core, layer, row->exact ? row->exact->name : name, why, rc, text);
    s->layers[layer].format = kvq__format_keep(s, &found, &rc);
    if (!s->layers[layer].format)
        return kvq__ns_refused(s->ns, rc, "the formats of a session", text);
    if (kvq__own_format(s->core, name) && name == spec->format)
        snprintf(s->composed.name, sizeof s->composed.name, "%s", name);
    return 0;
}

// Formats with codes of a codebook name it behind '@'; others name none.
static int find_layer_book(struct kvq__core *core, struct kvq__layer *l, uint32_t layer, char *text)
{
    char why[KVQ_TEXT_BYTES / 2] = "this daemon has no codebooks";
    const char *at = strchr(l->format->name, '@');
    bool wanted = kvq_has_centroids(l->format);
    if (!wanted && !at)
        return 0;
    if (!wanted)
        return kvq__fail(text, KVQ_E_FORMAT,
                         "layer %u: format %s has no use for a codebook; leave "
                         "out what follows the '@'",
                         layer, l->format->name);
    if (!at || !at[1])
        return kvq__fail(text, KVQ_E_FORMAT,
                         "layer %u: format %s needs a codebook; name it, as in "
                         "%s@NAME",
                         layer, l->format->name, l->format->name);
    int rc = KVQ_E_FORMAT;
    if (core->config.codebook)
        rc = core->config.codebook(core->config.context, at + 1, layer, l->format, &l->shape,
                                   &l->book, &l->book_hold, why);
    return rc < 0 ? kvq__fail(text, rc, "layer %u: %s", layer, why) : 0;
}

static uint8_t v_rotation_of(const struct kvq__session_spec *spec, const struct kvq__layer_row *row,
                             const struct kvq_format *f)
{
    uint32_t asked = row->v_rotation ? row->v_rotation : spec->v_rotation;
    return (uint8_t)(asked == KVQ__V_BY_PAPER ? kvq_v_rotation_by_paper(f)
                     : asked == KVQ__V_ENGINE ? KVQ_V_ROT_ENGINE
                     : asked == KVQ__V_DAEMON ? KVQ_V_ROT_DAEMON
                                              : KVQ_V_ROT_NONE);
}

// A session has one dtype: who does not say which gets that of the first layer's format.
static uint8_t dtype_of(const struct kvq__session_spec *spec, const struct kvq_format *first)
{
    uint32_t natural = first->raw_dtype ? first->raw_dtype : KVQ_F16;
    return (uint8_t)(spec->dtype ? spec->dtype : natural);
}

static struct kvq_shape shape_of(const struct kvq__session_spec *spec,
                                 const struct kvq__layer_row *row, const struct kvq_format *f,
                                 uint8_t dtype)
{
    struct kvq_shape shape = {
        .q_heads = row->q_heads,
        .kv_heads = row->kv_heads,
        .dtype = dtype,
        .v_rotation = v_rotation_of(spec, row, f),
        .window = row->window,
        .softcap = row->softcap,
        .scale = row->scale != 0.0f ? row->scale : 1.0f / sqrtf((float)row->k_dim),
    };
    kvq_shape_set_dims(&shape, row->k_dim, row->v_dim);
    return shape;
}

static int check_shape(const struct kvq__pool *pool, const struct kvq__layer *l, uint32_t layer,
                       char *text)
{
    char why[KVQ_TEXT_BYTES / 2];
    const struct kvq_shape *s = &l->shape;
    if (s->q_heads > KVQ_MAX_HEADS || s->kv_heads > KVQ_MAX_HEADS)
        return kvq__fail(text, KVQ_E_LIMIT,
                         "layer %u has %u query heads and %u KV heads; it can have %d at most",
                         layer, s->q_heads, s->kv_heads, KVQ_MAX_HEADS);
    if (kvq_shape_check(s, l->format, why, sizeof why) < 0)
        return kvq__fail(text, KVQ_E_SHAPE, "layer %u: %s", layer, why);
    if (pool->gpu && s->head_dim)
        return kvq__fail(text, KVQ_E_SHAPE,
                         "layer %u: head_dim %u is served on the host alone, a GPU takes 64, 128 "
                         "and 256; open the session with place \"host\", or hand over rows of %u "
                         "with zeros behind Q, K and V, and a scale of 1/sqrt(%u)",
                         layer, s->head_dim, s->k_dim, s->head_dim);
    struct kvq_layer_bytes bytes = kvq_layer_bytes_of(l->format, s);
    uint64_t first = bytes.packed + bytes.sinks, most = kvq__max(bytes.raw, first);
    if (most > pool->extent_bytes || bytes.extras > pool->extent_bytes)
        return kvq__fail(text, KVQ_E_LIMIT,
                         "layer %u: a block of 128 tokens takes %llu bytes, outliers and factors "
                         "%llu, and an extent of the pool has %llu; raise extent_bytes",
                         layer, (unsigned long long)most, (unsigned long long)bytes.extras,
                         (unsigned long long)pool->extent_bytes);
    return 0;
}

static int build_layer(struct kvq__session *s, const struct kvq__session_spec *spec,
                       const struct kvq__layer_row *row, uint32_t layer, char *text)
{
    struct kvq__layer *l = &s->layers[layer];
    assert(layer < s->n_layers);
    int rc = find_format(s, spec, row, layer, text);
    if (rc < 0)
        return rc;
    l->shape = shape_of(spec, row, l->format, dtype_of(spec, s->layers[0].format));
    rc = check_shape(s->pool, l, layer, text);
    if (rc < 0)
        return rc;
    rc = find_layer_book(s->core, l, row->kv_from >= 0 ? (uint32_t)row->kv_from : layer, text);
    if (rc < 0)
        return rc;
    l->layout = kvq_layout_of(l->format, &l->shape);
    l->raw_layout = kvq_raw_layout_of(&l->shape);
    struct kvq_layer_bytes bytes = kvq_layer_bytes_of(l->format, &l->shape);
    l->raw_bytes = bytes.raw;
    l->packed_bytes = bytes.packed;
    l->sink_bytes = bytes.sinks;
    l->extras_bytes = bytes.extras;
    l->learn = kvq_learn_tokens(l->format, spec->prompt_tokens);
    l->source = row->kv_from >= 0 ? (uint32_t)row->kv_from : layer;
    assert(l->raw_bytes % 64 == 0 && l->packed_bytes % 64 == 0);
    return 0;
}

// Whether a row whose layer before was built of an equal one makes the same layer. Formats of the
// configuration go by a layer's number, as do the first layers of some others, and codebooks.
static bool repeats(const struct kvq__session *s, const struct kvq__session_spec *spec,
                    const struct kvq__layer_row *row, const struct kvq__layer_row *before,
                    uint32_t layer)
{
    if (layer == 0 || row->kv_from >= 0 || before->kv_from >= 0)
        return false;
    const struct kvq_format *f = s->layers[layer - 1].format;
    const char *name = is_empty_text(row->format) ? spec->format : row->format;
    const char *name_before = is_empty_text(before->format) ? spec->format : before->format;
    return row->q_heads == before->q_heads && row->kv_heads == before->kv_heads &&
           row->k_dim == before->k_dim && row->v_dim == before->v_dim &&
           row->window == before->window && row->softcap == before->softcap &&
           row->scale == before->scale && row->exact == before->exact &&
           row->v_rotation == before->v_rotation && !is_empty_text(name) &&
           strcmp(name, name_before) == 0 && !kvq__own_format(s->core, name) &&
           !kvq_has_centroids(f) && layer > f->plain_layers;
}

static void repeat_layer(struct kvq__session *s, uint32_t layer)
{
    struct kvq__layer *l = &s->layers[layer];
    assert(layer > 0 && !l[-1].book_hold && l[-1].source == layer - 1);
    *l = l[-1];
    l->source = layer;
}

static bool same_cache(const struct kvq__layer *a, const struct kvq__layer *b)
{
    // Within one session formats of one name are one.
    return a->format == b->format && a->shape.kv_heads == b->shape.kv_heads &&
           a->shape.k_dim == b->shape.k_dim && a->shape.v_dim == b->shape.v_dim &&
           a->shape.head_dim == b->shape.head_dim && a->shape.dtype == b->shape.dtype;
}

static int check_source(const struct kvq__session *s, uint32_t layer, char *text)
{
    const struct kvq__layer *l = &s->layers[layer];
    if (l->source >= s->n_layers || s->layers[l->source].source != l->source)
        return kvq__fail(text, KVQ_E_SHAPE,
                         "layer %u reads the cache of layer %u, which has none of its own; "
                         "kv_from must be 0, or 1 + one of the %u layers that has",
                         layer, l->source, s->n_layers);
    if (!same_cache(l, &s->layers[l->source]))
        return kvq__fail(text, KVQ_E_SHAPE,
                         "layer %u reads the cache of layer %u but differs from it in KV heads, "
                         "head_dim, dtype or format; they must be equal, or kv_from 0 for a cache "
                         "of its own",
                         layer, l->source);
    return 0;
}

// Follows kv_from: counts caches, and how far back each is read.
static int link_layers(struct kvq__session *s, char *text)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        int rc = check_source(s, i, text);
        if (rc < 0)
            return rc;
        s->n_owned += kvq__layer_owns(s, i);
        s->layers[i].keep = s->layers[i].shape.window;
    }
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *own = kvq__source_layer(s, i);
        uint32_t window = s->layers[i].shape.window;
        own->keep = own->keep == 0 || window == 0 ? 0 : window > own->keep ? window : own->keep;
    }
    return 0;
}

static int build_layers(struct kvq__session *s, const struct kvq__session_spec *spec, char *text)
{
    const struct kvq__layer_row *before = spec->layers;
    uint32_t layer = 0;
    for (uint32_t i = 0; i < spec->n_layers; i++) {
        const struct kvq__layer_row *row = &spec->layers[i];
        uint32_t repeat = row->repeat ? row->repeat : 1;
        for (uint32_t j = 0; j < repeat; j++, layer++, before = row) {
            bool again = repeats(s, spec, row, before, layer);
            if (again)
                repeat_layer(s, layer);
            int rc = again ? 0 : build_layer(s, spec, row, layer, text);
            if (rc < 0)
                return rc;
        }
    }
    assert(layer == s->n_layers);
    return link_layers(s, text);
}

// ---- A session as asked for ----

static uint8_t choose_path(const struct kvq__session *s, uint32_t asked)
{
    uint32_t path = asked == 2 ? s->core->config.path : asked;
    for (uint32_t i = 0; path == KVQ_PATH_FAST && i < s->n_layers; i++)
        if (kvq_kernels_has_fast(s->core->config.kernels, s->layers[i].format, &s->layers[i].shape))
            return KVQ_PATH_FAST;
    return KVQ_PATH_EXACT;
}

// What all layers have; where they differ, the daemon rotates some and others come as they are.
static uint8_t common_rotation(const struct kvq__session *s)
{
    uint8_t first = s->layers[0].shape.v_rotation;
    for (uint32_t i = 1; i < s->n_layers; i++)
        if (s->layers[i].shape.v_rotation != first)
            return KVQ__V_MIXED;
    return first;
}

static void set_keep(struct kvq__session *s, const struct kvq__session_spec *spec)
{
    uint64_t most = UINT64_MAX / NS_PER_SECOND;
    s->spec.drop_on_detach = is_empty_text(spec->name) || spec->on_detach == KVQ__DETACH_DROP;
    s->spec.save_on_detach = spec->on_detach == KVQ__DETACH_SAVE;
    s->spec.keep_ns = s->spec.drop_on_detach ? 0 : s->core->config.keep_ns;
    if (!s->spec.drop_on_detach && spec->keep_seconds)
        s->spec.keep_ns = (spec->keep_seconds < most ? spec->keep_seconds : most) * NS_PER_SECOND;
}

struct kvq__pool *kvq__place_find(struct kvq__core *core, const char *place, char *text)
{
    for (uint32_t i = 0; i < core->n_pools; i++)
        if (strcmp(place, kvq__pool_name(&core->pools[i])) == 0 ||
            kvq_gpu_place_is(place, kvq__pool_name(&core->pools[i])))
            return &core->pools[i];
    kvq__fail(text, KVQ_E_INVALID,
              "place \"%.64s\": this daemon has \"host\"%s; kvqctl status lists its places", place,
              core->n_pools > 1 ? " and GPUs by their UUID" : " and uses no GPU");
    return NULL;
}

// Whether GPUs take the rows of all layers.
static bool rows_suit_gpu(const struct kvq__session_spec *spec)
{
    for (uint32_t i = 0; i < spec->n_layers; i++)
        if (kvq_stored_dim(spec->layers[i].k_dim) != spec->layers[i].k_dim)
            return false;
    return true;
}

// Where it shall live: as asked, or else on the GPU with the most room, or without one on the host.
static int find_place(struct kvq__session *s, const struct kvq__session_spec *spec, char *text)
{
    struct kvq__core *core = s->core;
    const char *place = spec->place;
    bool gpu = core->n_pools > 1 && rows_suit_gpu(spec);
    s->pool = &core->pools[gpu];
    for (uint32_t i = 2; gpu && is_empty_text(place) && i < core->n_pools; i++) {
        const struct kvq__pool *other = &core->pools[i];
        assert(other->used_bytes <= other->budget);
        if (other->budget - other->used_bytes > s->pool->budget - s->pool->used_bytes)
            s->pool = &core->pools[i];
    }
    if (is_empty_text(place))
        return 0;
    struct kvq__pool *pool = kvq__place_find(core, place, text);
    s->pool = pool ? pool : s->pool;
    return pool ? 0 : KVQ_E_INVALID;
}

int kvq__session_build(struct kvq__namespace *ns, const struct kvq__session_spec *spec,
                       struct kvq__session **out, char *text)
{
    uint32_t n_layers = 0;
    assert(spec->n_layers > 0);
    int rc = count_layers(spec, &n_layers, text);
    if (rc < 0)
        return rc;
    struct kvq__session *s;
    char what[64];
    snprintf(what, sizeof what, "a session of %u layers", n_layers);
    rc = kvq__session_new(ns, n_layers, &s);
    if (rc < 0)
        return kvq__ns_refused(ns, rc, what, text);
    rc = find_place(s, spec, text);
    rc = rc ? rc : build_layers(s, spec, text);
    if (rc == 0 && (rc = kvq__session_place(s)) < 0)
        kvq__fail(text, rc, "no memory on %s for a session", kvq__pool_name(s->pool));
    if (rc < 0) {
        s->n_owned = 0;
        kvq__session_free(s);
        return rc;
    }
    snprintf(s->name, sizeof s->name, "%s", spec->name ? spec->name : "");
    snprintf(s->spec.model, sizeof s->spec.model, "%s", spec->model ? spec->model : "");
    snprintf(s->spec.salt, sizeof s->spec.salt, "%s", spec->salt ? spec->salt : "");
    snprintf(s->spec.adapter, sizeof s->spec.adapter, "%s", spec->adapter ? spec->adapter : "");
    s->shard = spec->shard;
    s->shards = spec->shards ? spec->shards : 1;
    s->max_rollback = spec->max_rollback;
    s->prompt.tokens = spec->prompt_tokens;
    if (!(spec->flags & KVQ__OPEN_PACKED_PROMPT))
        s->prompt.exact = kvq__exact_fits(s, spec->prompt_tokens);
    assert(s->n_owned > 0 && s->n_owned <= s->n_layers);
    s->v_rotation = common_rotation(s);
    s->dtype = s->layers[0].shape.dtype;
    s->path = choose_path(s, spec->path);
    set_keep(s, spec);
    *out = s;
    return 0;
}

// ---- A session that is there ----

static int differs(const struct kvq__session *s, const char *what, char *text)
{
    return kvq__fail(text, KVQ_E_EXISTS,
                     "session \"%s\" exists with another %s; open it without layers to take it "
                     "as it is, drop it, or use another name",
                     s->name, what);
}

// What the session holds is of no use to whoever asks.
static int is_of_another(const struct kvq__session *s, const char *what, char *text)
{
    return kvq__fail(text, KVQ_E_EXISTS,
                     "session \"%s\" exists with another %s; use another name, or drop it", s->name,
                     what);
}

static const char *dtype_name(uint8_t dtype)
{
    return dtype == KVQ_BF16 ? "bf16" : "f16";
}

// Two layers that differ: in what, and both values. False if nothing of this differs.
static bool tell_difference(uint32_t layer, const struct kvq__layer *there,
                            const struct kvq__layer *asked, char *what, size_t n)
{
    const struct kvq_shape *a = &there->shape, *b = &asked->shape;
    const struct {
        const char *name;
        double there, asked;
    } fields[] = {{"number of query heads", a->q_heads, b->q_heads},
                  {"number of KV heads", a->kv_heads, b->kv_heads},
                  {"head_dim", kvq_row_dim(a), kvq_row_dim(b)},
                  {"window", a->window, b->window},
                  {"softcap", a->softcap, b->softcap},
                  {"scale", a->scale, b->scale},
                  {"source of K and V", there->source, asked->source}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].there != fields[i].asked) {
            snprintf(what, n, "%s in layer %u (%.9g there, %.9g asked for)", fields[i].name, layer,
                     fields[i].there, fields[i].asked);
            return true;
        }
    if (a->dtype != b->dtype)
        snprintf(what, n, "dtype of windows in layer %u (%s there, %s asked for)", layer,
                 dtype_name(a->dtype), dtype_name(b->dtype));
    return a->dtype != b->dtype;
}

static int compare_layers(const struct kvq__session *s, const struct kvq__session *wanted,
                          char *text)
{
    char what[96 + 2 * KVQ_FORMAT_NAME];
    if (s->n_layers != wanted->n_layers) {
        snprintf(what, sizeof what, "number of layers (%u there, %u asked for)", s->n_layers,
                 wanted->n_layers);
        return differs(s, what, text);
    }
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *a = &s->layers[i], *b = &wanted->layers[i];
        bool shape = kvq_shape_same(&a->shape, &b->shape) && a->source == b->source;
        bool format = strcmp(a->format->name, b->format->name) == 0;
        if (format && shape)
            continue;
        if (!shape && tell_difference(i, a, b, what, sizeof what))
            return differs(s, what, text);
        if (format)
            return differs(s, "v_rotation", text);
        snprintf(what, sizeof what, "format of layer %u (%s there, %s asked for)", i,
                 a->format->name, b->format->name);
        return differs(s, what, text);
    }
    return 0;
}

// Who says nothing of rotation takes it as it is, in a session that an older daemon saved, say:
// outputs are the same. But an engine that does not rotate cannot use what one that does has left.
static void take_rotation(struct kvq__session *wanted, const struct kvq__session *s)
{
    for (uint32_t i = 0; i < wanted->n_layers && i < s->n_layers; i++)
        if (s->layers[i].shape.v_rotation != KVQ_V_ROT_ENGINE)
            wanted->layers[i].shape.v_rotation = s->layers[i].shape.v_rotation;
}

static int compare_with_spec(const struct kvq__session *s, const struct kvq__session_spec *spec,
                             char *text)
{
    struct kvq__session *wanted;
    if (!is_empty_text(spec->model) && strcmp(s->spec.model, spec->model) != 0)
        return is_of_another(s, "model fingerprint", text);
    if (!is_empty_text(spec->salt) && strcmp(s->spec.salt, spec->salt) != 0)
        return is_of_another(s, "salt", text);
    if (!is_empty_text(spec->adapter) && strcmp(s->spec.adapter, spec->adapter) != 0)
        return is_of_another(s, "adapter", text);
    if (spec->n_layers == 0)
        return 0;
    assert(!s->ns->lenient);
    s->ns->lenient = true; // else a session that is there could not be opened at the limit
    int rc = kvq__session_build(s->ns, spec, &wanted, text);
    s->ns->lenient = false;
    if (rc < 0)
        return rc;
    if (spec->v_rotation == KVQ__V_BY_PAPER)
        take_rotation(wanted, s);
    if (!is_empty_text(spec->place) && wanted->pool != kvq__home_of(s))
        rc = differs(s, "place", text);
    else
        rc = compare_layers(s, wanted, text);
    kvq__session_free(wanted);
    return rc;
}

// ---- Opening ----

// The last step of a writer that is gone may still be under way on a GPU.
static int end_step(struct kvq__session *s, const struct kvq__session_spec *spec, char *text)
{
    assert(s->in_step.committing && !s->writer);
    if (!(spec->flags & KVQ__OPEN_TAKE_OVER))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" was closed with a step that a GPU has yet to end; open it "
                         "read-only, again in a moment, or with take_over",
                         s->name);
    s->core->up->step_leave(s);
    return 0;
}

static int take_hold_of_opened(struct kvq__session *s, const struct kvq__session_spec *spec,
                               char *text)
{
    if (spec->flags & KVQ__OPEN_READ_ONLY)
        return 0;
    if (!s->writer)
        return s->in_step.committing ? end_step(s, spec, text) : 0;
    if (!(spec->flags & KVQ__OPEN_TAKE_OVER))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" has a writer, client %llu; open it read-only, or with "
                         "take_over to end that hold",
                         s->name, (unsigned long long)s->writer->client->id);
    struct kvq__handle *old = s->writer;
    kvq__handle_detach(old);
    assert(!s->writer && !old->session);
    old->taken = true;
    return 0;
}

// What the client enqueues on the session's GPU, if it lives on one.
static int need_stream(struct kvq__client *client, const struct kvq__session *s, char *text)
{
    struct kvq__work_stream *stream;
    const struct kvq__pool *next = s->core->up->move_place(s);
    int rc = s->pool->gpu ? kvq__work_stream_get(client, s->pool->gpu, &stream) : 0;
    rc = rc || !next || !next->gpu ? rc : kvq__work_stream_get(client, next->gpu, &stream);
    return rc < 0 ? kvq__fail(text, rc, "no memory on %s for a client's stream",
                              kvq__pool_name(s->pool))
                  : 0;
}

static int open_existing(struct kvq__client *client, struct kvq__session *s,
                         const struct kvq__session_spec *spec, char *text)
{
    if (spec->flags & KVQ__OPEN_MUST_CREATE)
        return kvq__fail(text, KVQ_E_EXISTS,
                         "session \"%s\" exists already%s; drop it, or open it without "
                         "must_create",
                         s->name, s->group ? ", with this shard" : "");
    int rc = compare_with_spec(s, spec, text);
    rc = rc ? rc : need_stream(client, s, text);
    return rc == 0 ? take_hold_of_opened(s, spec, text) : rc;
}

// As another shard of the session of its name, if there is one.
int kvq__session_enter(struct kvq__session *s, char *text)
{
    const struct kvq__session *first = s->name[0] ? kvq__session_named(s->ns, s->name) : NULL;
    assert(!s->published && !s->group);
    int rc = first ? kvq__group_agrees(s, first, text) : 0;
    if (rc == 0 && (rc = kvq__group_join(s)) < 0)
        kvq__ns_refused(s->ns, rc, "a session of several shards", text);
    if (rc == 0)
        kvq__session_publish(s);
    return rc;
}

static int create_session(struct kvq__client *client, struct kvq__namespace *ns,
                          const struct kvq__session_spec *spec, const struct kvq__session *first,
                          struct kvq__session **s, char *text)
{
    if ((spec->flags & (KVQ__OPEN_MUST_EXIST | KVQ__OPEN_READ_ONLY)) || spec->n_layers == 0)
        return kvq__fail(text, KVQ_E_NO_SESSION,
                         "namespace \"%s\" has no session \"%s\"%s; to create it give its layers, "
                         "and neither read_only nor must_exist",
                         ns->name, spec->name ? spec->name : "", first ? " with this shard" : "");
    if (spec->on_detach == KVQ__DETACH_SAVE && !client->core->config.saves)
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "on_detach = save, but this daemon saves no sessions; set storage_dir in "
                         "its configuration, or keep them instead");
    int rc = kvq__namespace_room(ns, text);
    if (rc == 0)
        rc = kvq__session_build(ns, spec, s, text);
    if (rc < 0)
        return rc;
    rc = need_stream(client, *s, text);
    rc = rc ? rc : kvq__prefix_adopt(client, *s, &spec->prefix, text);
    rc = rc ? rc : kvq__session_enter(*s, text);
    if (rc < 0)
        kvq__session_free(*s);
    return rc;
}

// How many shards a session has cannot be changed by opening more of it.
int kvq__shards_check(const struct kvq__session *first, const struct kvq__session_spec *spec,
                      char *text)
{
    uint32_t asked = spec->shards ? spec->shards : 1;
    if ((spec->shards == 0 && spec->n_layers == 0) || asked == first->shards)
        return 0;
    return kvq__shards_refuse(first->core, first->name, first->shards, asked, text);
}

static int find_or_create(struct kvq__client *client, struct kvq__namespace *ns,
                          const struct kvq__session_spec *spec, struct kvq__session **s,
                          bool *created, char *text)
{
    const struct kvq__session *first =
        is_empty_text(spec->name) ? NULL : kvq__session_named(ns, spec->name);
    int rc = first ? kvq__shards_check(first, spec, text) : 0;
    if (rc < 0)
        return rc;
    *s = first ? kvq__group_member(first, spec->shard) : NULL;
    *created = !*s;
    return *s ? open_existing(client, *s, spec, text)
              : create_session(client, ns, spec, first, s, text);
}

int kvq__session_open(struct kvq__client *client, const struct kvq__session_spec *spec,
                      struct kvq__session_info *info, char *text)
{
    struct kvq__core *core = client->core;
    struct kvq__namespace *ns;
    struct kvq__handle *h;
    struct kvq__session *s;
    bool created;
    if (core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; no session is opened");
    if (client->gone)
        return kvq__fail(text, KVQ_E_DISCONNECTED, "the client that asked is gone");
    int rc = kvq__spec_check(spec, text);
    if (rc == 0)
        rc = kvq__namespace_get(core, &client->peer, spec->ns, &ns, text);
    if (rc < 0)
        return rc;
    rc = kvq__handle_new(client, &h);
    if (rc == KVQ_E_LIMIT)
        return kvq__fail(text, rc,
                         "this client has %u sessions open, the most it can have; close some, or "
                         "connect another client",
                         client->n_handles);
    if (rc < 0)
        return kvq__fail(text, rc, "no memory for the handle of a session");
    rc = find_or_create(client, ns, spec, &s, &created, text);
    if (rc < 0) {
        kvq__handle_free(h);
        return rc;
    }
    kvq__handle_attach(h, s, spec->flags & KVQ__OPEN_READ_ONLY);
    core->up->opened(s);
    kvq__event(core, KVQ__EVENT_SESSION_OPENED, ns->name, s->name, client->id,
               created        ? "created"
               : h->read_only ? "read-only"
                              : "for writing");
    kvq__session_fill_info(s, info);
    info->handle = kvq__handle_value(h);
    info->created = created;
    info->read_only = h->read_only;
    return 0;
}
