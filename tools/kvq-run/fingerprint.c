// SPDX-License-Identifier: Apache-2.0
//
// Hashing what decides the contents of a cache.
#include "tools/kvq-run/fingerprint.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

uint64_t fingerprint_bytes(uint64_t h, const void *data, size_t n)
{
    return XXH3_64bits_withSeed(data, n, h);
}

static uint64_t add_count(uint64_t h, uint64_t x)
{
    return fingerprint_bytes(h, &x, sizeof x);
}

static uint64_t add_number(uint64_t h, double x)
{
    return fingerprint_bytes(h, &x, sizeof x);
}

static uint64_t add_tensor(uint64_t h, const struct tensor *t)
{
    if (!t)
        return add_count(h, 0);
    h = fingerprint_bytes(h, t->name, strlen(t->name) + 1);
    h = add_count(add_count(h, t->dtype), t->dims);
    uint64_t n = t->dtype == TENSOR_F32 ? 4 : 2;
    for (uint32_t i = 0; i < t->dims; i++) {
        h = add_count(h, t->shape[i]);
        n *= t->shape[i];
    }
    return fingerprint_bytes(h, t->data, n);
}

static uint64_t add_layer(uint64_t h, const struct layer_weights *w)
{
    const struct tensor *all[] = {w->norm_in,   w->norm_mlp, w->q,        w->k,      w->v,
                                  w->o,         w->q_bias,   w->k_bias,   w->v_bias, w->q_norm,
                                  w->k_norm,    w->gate,     w->up,       w->down,   w->o_bias,
                                  w->gate_bias, w->up_bias,  w->down_bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        h = add_tensor(h, all[i]);
    return h;
}

// Field by field: what stands between them is not defined.
static uint64_t add_config(uint64_t h, const struct config *c)
{
    const struct rope_config *r = &c->rope;
    const double numbers[] = {r->theta,     r->factor,    r->low_freq_factor,  r->high_freq_factor,
                              r->beta_fast, r->beta_slow, r->attention_factor, c->norm_eps};
    const uint32_t counts[] = {r->kind,   r->original_positions, c->intermediate, c->vocab,
                               c->window, c->window_from};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        h = add_number(h, numbers[i]);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        h = add_count(h, counts[i]);
    return h;
}

void fingerprint_model(const struct model *m, char *out, size_t n)
{
    const struct config *c = &m->config;
    uint64_t h = add_config(0, c);
    h = add_tensor(add_tensor(add_tensor(h, m->embed), m->norm), m->head);
    for (uint32_t i = 0; i < c->layers; i++)
        h = add_layer(h, &m->layers[i]);
    snprintf(out, n, "%s L%u h%u q%u kv%u d%u theta%g rope%u %016llx", c->family, c->layers,
             c->hidden, c->q_heads, c->kv_heads, c->head_dim, c->rope.theta, c->rope.kind,
             (unsigned long long)h);
}
