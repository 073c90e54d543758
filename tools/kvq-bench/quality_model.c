// SPDX-License-Identifier: Apache-2.0
//
// A model for measurements: opened as kvq-run opens it, and with outliers put into its weights that
// its function does not feel.
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality_model.h"
#include "tools/kvq-run/prompt.h"

enum { K_PAIRS = 2, V_CHANNELS = 4, CHANGES = 9 };

// ---- Text ----

static int parse_ids(const struct config *c, char *text, const char *path, uint32_t *ids,
                     uint64_t *n, struct problem *p)
{
    uint64_t count = 0;
    for (char *at = text, *end;; at = end) {
        while (isspace((unsigned char)*at))
            at++;
        if (!*at)
            break;
        errno = 0;
        unsigned long id = strtoul(at, &end, 10);
        if (end == at || errno || id >= c->vocab)
            return problem_set(p, RUN_FAILED,
                               "%s: \"%.12s\" is no token id below %u; a text for this model is a "
                               "list of token ids",
                               path, at, c->vocab);
        ids[count++] = (uint32_t)id;
    }
    *n = count;
    return 0;
}

int quality_text(const struct config *c, const char *path, uint64_t from, uint64_t most,
                 uint32_t **ids, uint64_t *n, struct problem *p)
{
    uint8_t *bytes;
    uint64_t size;
    // An id takes at most 8 bytes with its white space.
    if (file_read(path, (c->bytes ? 1 : 8) * (from + most), &bytes, &size, p))
        return -1;
    *ids = malloc((size + 1) * sizeof **ids);
    char *text = malloc(size + 1);
    int rc = *ids && text ? 0 : problem_set(p, RUN_FAILED, "out of memory");
    *n = size;
    if (rc == 0 && c->bytes) {
        for (uint64_t i = 0; i < size; i++)
            (*ids)[i] = bytes[i];
    } else if (rc == 0) {
        memcpy(text, bytes, size);
        text[size] = 0;
        rc = parse_ids(c, text, path, *ids, n, p);
    }
    uint64_t left = *n > from ? *n - from : 0;
    *n = left < most ? left : most;
    if (rc == 0 && *n > 0)
        memmove(*ids, *ids + from, *n * sizeof **ids);
    free(text);
    free(bytes);
    return rc;
}

void quality_log_softmax(const float *logits, uint32_t n, double *out)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, (double)logits[i]);
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - max);
    for (uint32_t i = 0; i < n; i++)
        out[i] = (double)logits[i] - max - log(sum);
}

// ---- Outliers ----

// Which channels of a head are outliers: spread over the head, others in every layer.
static uint32_t k_channel(const struct config *c, uint32_t layer, uint32_t i)
{
    uint32_t half = c->head_dim / 2;
    return (7 * layer + 11 + i * (half / 2 + 5)) % half;
}

static uint32_t v_channel(const struct config *c, uint32_t layer, uint32_t i)
{
    return (5 * layer + 3 + i * (c->head_dim / V_CHANNELS + 3)) % c->head_dim;
}

// The factor of a channel of a head. RoPE turns channels i and i + half into each other, so both
// have the same.
static double factor_of(const struct config *c, uint32_t layer, uint32_t channel, bool v,
                        double factor)
{
    for (uint32_t i = 0; !v && i < K_PAIRS; i++)
        if (channel % (c->head_dim / 2) == k_channel(c, layer, i))
            return factor;
    for (uint32_t i = 0; v && i < V_CHANNELS; i++)
        if (channel == v_channel(c, layer, i))
            return factor;
    return 1;
}

// A tensor of the model as fp32 of its own, to be changed. NULL: no memory.
static float *own(struct quality_model *m, const struct tensor **t)
{
    uint64_t n = (*t)->shape[0] * ((*t)->dims > 1 ? (*t)->shape[1] : 1);
    float *data = malloc(n * sizeof *data);
    if (!data)
        return NULL;
    tensor_widen(*t, 0, n, data);
    struct tensor *mine = &m->changed[m->n_changed++];
    *mine = **t;
    mine->data = data;
    mine->dtype = TENSOR_F32;
    *t = mine;
    return data;
}

// Multiplies rows (outputs; heads of them) or columns (inputs) of a weight, or a vector.
struct change {
    const struct tensor **tensor;
    bool v, inverse, columns;
};

static int apply(struct quality_model *m, uint32_t layer, const struct change *x, double factor,
                 struct problem *p)
{
    const struct config *c = &m->model.config;
    if (!*x->tensor)
        return 0;
    uint64_t rows = (*x->tensor)->shape[0];
    uint64_t cols = (*x->tensor)->dims > 1 ? (*x->tensor)->shape[1] : 1;
    float *data = own(m, x->tensor);
    if (!data)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t i = 0; i < cols; i++) {
            uint32_t channel = (uint32_t)((x->columns ? i : r) % c->head_dim);
            double f = factor_of(c, layer, channel, x->v, factor);
            data[r * cols + i] = (float)((double)data[r * cols + i] * (x->inverse ? 1 / f : f));
        }
    return 0;
}

// With norms of q and k the factors go into the norms, which come after the projections.
static int change_layer(struct quality_model *m, uint32_t layer, double factor, struct problem *p)
{
    struct layer_weights *w = &m->model.layers[layer];
    bool norms = w->k_norm != NULL;
    const struct change changes[] = {
        {norms ? &w->k_norm : &w->k, false, false, false},
        {norms ? &w->q_norm : &w->q, false, true, false},
        {norms ? &w->k_norm : &w->k_bias, false, false, false},
        {norms ? &w->q_norm : &w->q_bias, false, true, false},
        {&w->v, true, false, false},
        {&w->v_bias, true, false, false},
        {&w->o, true, true, true},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        if (norms && (i == 2 || i == 3))
            continue;
        if (apply(m, layer, &changes[i], factor, p))
            return -1;
    }
    return 0;
}

int quality_model_open(struct quality_model *m, const char *dir, uint32_t step_tokens,
                       double factor, struct problem *p)
{
    *m = (struct quality_model){0};
    if (model_open(&m->model, dir, step_tokens, p))
        return -1;
    m->changed = calloc((size_t)m->model.config.layers * CHANGES, sizeof *m->changed);
    if (!m->changed)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t i = 0; i < m->model.config.layers && factor != 1; i++)
        if (change_layer(m, i, factor, p))
            return -1;
    return 0;
}

void quality_model_close(struct quality_model *m)
{
    for (uint32_t i = 0; i < m->n_changed; i++)
        free((void *)(uintptr_t)m->changed[i].data);
    free(m->changed);
    model_close(&m->model);
    *m = (struct quality_model){0};
}
