// SPDX-License-Identifier: Apache-2.0
//
// Binding a checkpoint's tensors to the model, and one step of it.
#include "tools/kvq-run/model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-run/fingerprint.h"
#include "tools/kvq-run/fold.h"
#include "tools/kvq-run/rope.h"

// The tensor of that name with shape [rows][cols] (cols 0: a vector of rows).
static int bind(const struct model *m, const struct tensor **out, uint64_t rows, uint64_t cols,
                struct problem *p, const char *format, ...)
{
    char name[TENSORS_NAME_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const struct tensor *t = tensors_find(m->tensors, name);
    if (!t)
        return problem_set(p, RUN_FAILED, "the checkpoint has no tensor %s", name);
    bool fits = cols ? t->dims == 2 && t->shape[0] == rows && t->shape[1] == cols
                     : t->dims == 1 && t->shape[0] == rows;
    if (!fits)
        return problem_set(p, RUN_FAILED,
                           "tensor %s is [%llu][%llu] (%u dimensions); config.json asks for "
                           "[%llu][%llu]",
                           name, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1],
                           t->dims, (unsigned long long)rows, (unsigned long long)cols);
    *out = t;
    return 0;
}

// Likewise, but a checkpoint without it is fine.
static int bind_optional(const struct model *m, const struct tensor **out, uint64_t rows,
                         struct problem *p, uint32_t layer, const char *rest)
{
    char name[TENSORS_NAME_BYTES];
    snprintf(name, sizeof name, "model.layers.%u.%s", layer, rest);
    *out = NULL;
    return tensors_find(m->tensors, name) ? bind(m, out, rows, 0, p, "%s", name) : 0;
}

static int bind_layer(const struct model *m, uint32_t i, struct layer_weights *w, struct problem *p)
{
    const struct config *c = &m->config;
    uint64_t q = (uint64_t)c->q_heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    static const char at[] = "model.layers.%u.%s.weight";
    if (bind(m, &w->norm_in, c->hidden, 0, p, at, i, "input_layernorm") ||
        bind(m, &w->norm_mlp, c->hidden, 0, p, at, i, "post_attention_layernorm") ||
        bind(m, &w->q, q, c->hidden, p, at, i, "self_attn.q_proj") ||
        bind(m, &w->k, kv, c->hidden, p, at, i, "self_attn.k_proj") ||
        bind(m, &w->v, kv, c->hidden, p, at, i, "self_attn.v_proj") ||
        bind(m, &w->o, c->hidden, q, p, at, i, "self_attn.o_proj") ||
        bind(m, &w->gate, c->intermediate, c->hidden, p, at, i, "mlp.gate_proj") ||
        bind(m, &w->up, c->intermediate, c->hidden, p, at, i, "mlp.up_proj") ||
        bind(m, &w->down, c->hidden, c->intermediate, p, at, i, "mlp.down_proj"))
        return -1;
    if (bind_optional(m, &w->q_bias, q, p, i, "self_attn.q_proj.bias") ||
        bind_optional(m, &w->k_bias, kv, p, i, "self_attn.k_proj.bias") ||
        bind_optional(m, &w->v_bias, kv, p, i, "self_attn.v_proj.bias") ||
        bind_optional(m, &w->o_bias, c->hidden, p, i, "self_attn.o_proj.bias") ||
        bind_optional(m, &w->gate_bias, c->intermediate, p, i, "mlp.gate_proj.bias") ||
        bind_optional(m, &w->up_bias, c->intermediate, p, i, "mlp.up_proj.bias") ||
        bind_optional(m, &w->down_bias, c->hidden, p, i, "mlp.down_proj.bias") ||
        bind_optional(m, &w->q_norm, c->head_dim, p, i, "self_attn.q_norm.weight") ||
        bind_optional(m, &w->k_norm, c->head_dim, p, i, "self_attn.k_norm.weight"))
        return -1;
    if (!strcmp(c->family, "qwen3") && (!w->q_norm || !w->k_norm))
        return problem_set(p, RUN_FAILED, "layer %u lacks qwen3's q_norm and k_norm", i);
    return 0;
}

static int bind_all(struct model *m, struct problem *p)
{
    const struct config *c = &m->config;
    m->layers = calloc(c->layers, sizeof *m->layers);
    if (!m->layers)
        return problem_set(p, RUN_FAILED, "out of memory");
    if (bind(m, &m->embed, c->vocab, c->hidden, p, "model.embed_tokens.weight") ||
        bind(m, &m->norm, c->hidden, 0, p, "model.norm.weight"))
        return -1;
    m->head = m->embed;
    if (!c->tied_head && bind(m, &m->head, c->vocab, c->hidden, p, "lm_head.weight"))
        return -1;
    for (uint32_t i = 0; i < c->layers; i++)
        if (bind_layer(m, i, &m->layers[i], p))
            return -1;
    return 0;
}

static float *floats(uint64_t n)
{
    return aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64);
}

static int make_room(struct model *m, struct problem *p)
{
    const struct config *c = &m->config;
    uint64_t t = m->step_tokens, half = c->head_dim / 2;
    uint64_t q = (uint64_t)c->q_heads * c->head_dim;
    uint64_t wide = q > c->hidden ? q : c->hidden;
    m->x = floats(t * c->hidden);
    m->h = floats(t * c->hidden);
    m->gate = floats(t * c->intermediate);
    m->up = floats(t * c->intermediate);
    m->freq = floats(half);
    m->cos = floats(t * half);
    m->sin = floats(t * half);
    if (!m->x || !m->h || !m->gate || !m->up || !m->freq || !m->cos || !m->sin)
        return problem_set(p, RUN_FAILED, "out of memory");
    rope_frequencies(&c->rope, c->head_dim, m->freq);
    uint64_t row = wide > c->intermediate ? wide : c->intermediate;
    return linear_scratch_open(&m->scratch, (uint32_t)row, p);
}

int model_open(struct model *m, const char *dir, uint32_t step_tokens, struct problem *p)
{
    memset(m, 0, sizeof *m);
    m->step_tokens = step_tokens;
    if (config_read(dir, &m->config, p) || tensors_open(dir, &m->tensors, p) || bind_all(m, p) ||
        make_room(m, p))
        return -1;
    fingerprint_model(m, m->fingerprint, sizeof m->fingerprint);
    return 0;
}

static int fold_layer(struct layer_weights *w, uint32_t dim, struct problem *p)
{
    if (fold_rows(w->v, dim, &w->folded[0], p) || fold_columns(w->o, dim, &w->folded[2], p) ||
        (w->v_bias && fold_rows(w->v_bias, dim, &w->folded[1], p)))
        return -1;
    w->v = &w->folded[0];
    w->v_bias = w->v_bias ? &w->folded[1] : NULL;
    w->o = &w->folded[2];
    return 0;
}

int model_fold(struct model *m, struct problem *p)
{
    uint32_t dim = m->config.head_dim;
    if (m->folded)
        return 0;
    if (dim & (dim - 1))
        return problem_set(p, RUN_FAILED,
                           "head_dim %u is no power of two: V cannot be rotated in "
                           "the weights; use --v-rotation none",
                           dim);
    for (uint32_t i = 0; i < m->config.layers; i++)
        if (fold_layer(&m->layers[i], dim, p))
            return -1;
    m->folded = true;
    return 0;
}

void model_close(struct model *m)
{
    float *rooms[] = {m->x, m->h, m->gate, m->up, m->freq, m->cos, m->sin};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        free(rooms[i]);
    linear_scratch_close(&m->scratch);
    for (uint32_t i = 0; m->layers && i < 3 * m->config.layers; i++)
        fold_free(&m->layers[i / 3].folded[i % 3]);
    free(m->layers);
    tensors_close(&m->tensors);
    memset(m, 0, sizeof *m);
}

static void rms_norm(struct model *m, const float *x, const struct tensor *weight, uint32_t rows,
                     uint32_t n, float *out)
{
    float *w = m->scratch.panel;
    tensor_widen(weight, 0, n, w);
    for (uint32_t r = 0; r < rows; r++, x += n, out += n) {
        double sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += (double)x[i] * x[i];
        float scale = (float)(1 / sqrt(sum / n + m->config.norm_eps));
        for (uint32_t i = 0; i < n; i++)
            out[i] = x[i] * scale * w[i];
    }
}

static void rotate(const struct model *m, float *x, uint32_t heads, uint32_t n)
{
    uint32_t half = m->config.head_dim / 2;
    for (uint32_t t = 0; t < n; t++)
        rope_apply(x + (uint64_t)t * heads * 2 * half, heads, half, m->cos + (uint64_t)t * half,
                   m->sin + (uint64_t)t * half);
}

static int attention(struct model *m, struct cache *cache, uint32_t i, uint32_t n,
                     struct problem *p)
{
    const struct config *c = &m->config;
    const struct layer_weights *w = &m->layers[i];
    struct engine *e = cache->engine;
    engine_layer(e, i);
    rms_norm(m, m->x, w->norm_in, n, c->hidden, m->h);
    linear(&m->scratch, w->q, w->q_bias, m->h, n, e->q);
    linear(&m->scratch, w->k, w->k_bias, m->h, n, e->k);
    linear(&m->scratch, w->v, w->v_bias, m->h, n, e->v);
    if (w->q_norm)
        rms_norm(m, e->q, w->q_norm, n * c->q_heads, c->head_dim, e->q);
    if (w->k_norm)
        rms_norm(m, e->k, w->k_norm, n * c->kv_heads, c->head_dim, e->k);
    rotate(m, e->q, c->q_heads, n);
    rotate(m, e->k, c->kv_heads, n);
    if (cache_attend(cache, i, p))
        return -1;
    linear(&m->scratch, w->o, w->o_bias, e->out, n, m->h);
    for (uint64_t j = 0; j < (uint64_t)n * c->hidden; j++)
        m->x[j] += m->h[j];
    return 0;
}

static void mlp(struct model *m, uint32_t i, uint32_t n)
{
    const struct config *c = &m->config;
    const struct layer_weights *w = &m->layers[i];
    rms_norm(m, m->x, w->norm_mlp, n, c->hidden, m->h);
    linear(&m->scratch, w->gate, w->gate_bias, m->h, n, m->gate);
    linear(&m->scratch, w->up, w->up_bias, m->h, n, m->up);
    for (uint64_t j = 0; j < (uint64_t)n * c->intermediate; j++)
        m->gate[j] = m->gate[j] / (1 + expf(-m->gate[j])) * m->up[j];
    linear(&m->scratch, w->down, w->down_bias, m->gate, n, m->h);
    for (uint64_t j = 0; j < (uint64_t)n * c->hidden; j++)
        m->x[j] += m->h[j];
}

int model_step(struct model *m, struct cache *cache, const uint32_t *ids, uint32_t n, uint32_t want,
               float *logits, struct problem *p)
{
    const struct config *c = &m->config;
    for (uint32_t t = 0; t < n; t++) {
        if (ids[t] >= c->vocab)
            return problem_set(p, RUN_FAILED, "token %u is outside the vocabulary of %u", ids[t],
                               c->vocab);
        tensor_widen(m->embed, (uint64_t)ids[t] * c->hidden, c->hidden,
                     m->x + (uint64_t)t * c->hidden);
    }
    rope_tables(&c->rope, m->freq, c->head_dim / 2, cache->tokens, n, m->cos, m->sin);
    if (cache_begin(cache, ids, n, p))
        return -1;
    for (uint32_t i = 0; i < c->layers; i++) {
        if (attention(m, cache, i, n, p)) {
            cache_abort(cache);
            return -1;
        }
        mlp(m, i, n);
    }
    if (cache_end(cache, p))
        return -1;
    if (!want)
        return 0;
    rms_norm(m, m->x + (uint64_t)(n - want) * c->hidden, m->norm, want, c->hidden, m->h);
    linear(&m->scratch, m->head, NULL, m->h, want, logits);
    return 0;
}
