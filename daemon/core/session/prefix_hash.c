// SPDX-License-Identifier: Apache-2.0
//
// What pages are known by: hashes over all that two sessions must have in common to share a page.
// See prefix.h.
#include <assert.h>
#include <sodium.h>
#include <string.h>

#include "daemon/core/session/prefix.h"
#include "daemon/core/state.h"

static_assert((int)KVQ__HASH_BYTES == (int)crypto_generichash_BYTES, "a BLAKE2b-256");

typedef crypto_generichash_state hash_state;

static void begin_hash(hash_state *state, const struct kvq__core *core)
{
    crypto_generichash_init(state, core->config.prefix_key, sizeof core->config.prefix_key,
                            KVQ__HASH_BYTES);
}

static void put_bytes(hash_state *state, const void *bytes, size_t n)
{
    crypto_generichash_update(state, bytes, n);
}

static void put_number(hash_state *state, uint64_t value)
{
    put_bytes(state, &value, sizeof value);
}

// With its length before it, so that no two rows of texts look alike.
static void put_text(hash_state *state, const char *text)
{
    put_number(state, strlen(text));
    put_bytes(state, text, strlen(text));
}

void kvq__prefix_root(const struct kvq__session *s, const char *ns, uint8_t *root)
{
    hash_state state;
    begin_hash(&state, s->core);
    put_text(&state, "kvq prefix 1");
    put_text(&state, ns);
    put_text(&state, s->spec.model);
    put_text(&state, s->spec.salt);
    put_text(&state, s->spec.adapter);
    put_number(&state, s->shards);
    put_number(&state, s->dtype);
    put_number(&state, s->v_rotation == KVQ_V_ROT_ENGINE); // else each layer's own, see put_layer
    put_number(&state, s->path);
    crypto_generichash_final(&state, root, KVQ__HASH_BYTES);
}

static void put_float(hash_state *state, float value)
{
    put_bytes(state, &value, sizeof value);
}

static void put_side(hash_state *state, const struct kvq_side *side)
{
    const uint8_t bytes[] = {side->codec, side->bits, side->axis,  side->zero,
                             side->full,  side->wide, side->vector};
    put_bytes(state, bytes, sizeof bytes);
    put_number(state, side->group);
}

// All fields, not the name alone: a name of the configuration may mean another row in the next run.
static void hash_format(hash_state *state, const struct kvq_format *f)
{
    const uint8_t bytes[] = {f->k_channel, f->k_rotation, f->k_token_scale,  f->v_rotation,
                             f->raw_dtype, f->outliers,   f->extra_outliers, f->plain_layers};
    put_text(state, f->name); // with the codebook's
    put_bytes(state, bytes, sizeof bytes);
    put_side(state, &f->k);
    put_side(state, &f->v);
    put_number(state, f->unit_tokens);
    put_number(state, f->recent_tokens);
    put_number(state, f->sink_tokens);
}

uint64_t kvq__layer_book(const struct kvq__session *s, const struct kvq__layer *l)
{
    const struct kvq__core_config *config = &s->core->config;
    return l->book_hold && config->codebook_id ? config->codebook_id(config->context, l->book_hold)
                                               : 0;
}

static void put_layer(hash_state *state, const struct kvq__session *s, const struct kvq__layer *l)
{
    const struct kvq_shape *shape = &l->shape;
    put_number(state, shape->q_heads);
    put_number(state, shape->kv_heads);
    put_number(state, kvq_row_dim(shape)); // of K,
    put_number(state, kvq_row_dim(shape)); // and of V
    put_number(state, shape->dtype);
    put_number(state, shape->v_rotation);
    put_number(state, shape->window);
    put_float(state, shape->softcap);
    put_float(state, shape->scale);
    put_number(state, l->source);
    hash_format(state, l->format);
    put_number(state, kvq__layer_book(s, l));
}

static void hash_layers(struct kvq__session *s)
{
    hash_state state;
    begin_hash(&state, s->core);
    put_text(&state, "kvq layers 1");
    put_number(&state, s->n_layers);
    for (uint32_t i = 0; i < s->n_layers; i++)
        put_layer(&state, s, &s->layers[i]);
    crypto_generichash_final(&state, s->ids.layers, KVQ__HASH_BYTES);
}

int kvq__ids_shareable(const struct kvq__session *s, char *text)
{
    if (s->spec.model[0] == '\0')
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "a session without a model's fingerprint shares no prefix, since nothing "
                         "would tell two models apart; give it one");
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].extras_bytes > 0)
            return kvq__fail(text, KVQ_E_UNSUPPORTED,
                             "layer %u: format %s keeps outliers or factors of the prompt, which "
                             "are one session's own; share its beginning by a fork",
                             i, s->layers[i].format->name);
    return 0;
}

int kvq__ids_identify(struct kvq__session *s, char *text)
{
    int rc = kvq__ids_shareable(s, text);
    if (rc == 0 && !s->ids.identified) {
        kvq__prefix_root(s, s->ns->name, s->ids.root);
        hash_layers(s);
        s->ids.identified = true;
    }
    return rc;
}

// What of a span lies in a page: where, how much, and which of the span's own tokens come first.
static void put_span(hash_state *state, const struct kvq__span *span, uint64_t start)
{
    uint64_t end = start + KVQ_BLOCK_TOKENS, last = span->first + span->tokens;
    uint64_t from = kvq__max(span->first, start), to = kvq__min(last, end);
    if (from >= to)
        return;
    put_number(state, from - start);
    put_number(state, to - from);
    put_number(state, from - span->first);
    put_bytes(state, span->digest, sizeof span->digest);
}

void kvq__prefix_chain(const struct kvq__core *core, uint8_t *chain, const int32_t *ids,
                       const struct kvq__span *spans, uint32_t n_spans, uint32_t page)
{
    hash_state state;
    begin_hash(&state, core);
    put_bytes(&state, chain, KVQ__HASH_BYTES);
    put_bytes(&state, ids, KVQ_BLOCK_TOKENS * sizeof *ids);
    for (uint32_t i = 0; i < n_spans; i++)
        put_span(&state, &spans[i], (uint64_t)page * KVQ_BLOCK_TOKENS);
    crypto_generichash_final(&state, chain, KVQ__HASH_BYTES);
}

// Covers everything that two sessions must have in common to share the page: a store compares
// nothing but this hash.
void kvq__prefix_stored(const struct kvq__core *core, const uint8_t *chain, const uint8_t *layers,
                        uint32_t shard, uint8_t *out)
{
    hash_state state;
    begin_hash(&state, core);
    put_text(&state, "kvq stored 1");
    put_number(&state, KVQ_LAYOUT_ID);
    put_bytes(&state, chain, KVQ__HASH_BYTES);
    put_bytes(&state, layers, KVQ__HASH_BYTES);
    put_number(&state, shard);
    crypto_generichash_final(&state, out, KVQ__HASH_BYTES);
}

void kvq__core_prefix_key(struct kvq__core *core, const uint8_t key[32])
{
    memcpy(core->config.prefix_key, key, sizeof core->config.prefix_key);
}
