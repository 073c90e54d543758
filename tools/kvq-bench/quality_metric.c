// SPDX-License-Identifier: Apache-2.0
//
// What a method does to keys, values, logits and outputs, in double precision.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

enum { EQUAL_SINK = 32, EQUAL_RECENT = 128 };

// Sums of squared differences and of squares.
struct ratio {
    double difference, square;
};

static double root(struct ratio r)
{
    return r.square > 0 ? sqrt(r.difference / r.square) : 0;
}

// Which tokens are read in full precision: [0, first) and [last, n).
struct window {
    uint64_t first, last;
};

enum { OWN, EQUAL, BUDGET, WINDOWS };

struct measuring {
    const struct quality_method *m;
    const struct quality_data *d;
    double scale;
    uint64_t packed; // whole units; [0, packed) is what can be packed
    struct window window[WINDOWS];
    bool within;                    // the budget
    float *k, *v, *seen_k, *seen_v; // of one head
    double *logit, *seen, *mixed;   // of one query
    struct ratio e_k, e_v, e_logits, e_out[WINDOWS], e_out_k;
    double token_errors; // of single keys, summed
    uint64_t keys;
};

// ---- One query ----

static void logits_of(const float *q, const float *k, uint32_t n, uint32_t dim, double scale,
                      double *logit)
{
    for (uint32_t t = 0; t < n; t++) {
        const float *row = k + (size_t)t * dim;
        double sum = 0;
        for (uint32_t c = 0; c < dim; c++)
            sum += (double)q[c] * (double)row[c];
        logit[t] = sum * scale;
    }
}

// In a window a token is as it was; else as seen, or gone.
static bool in_window(const struct window *w, uint64_t t)
{
    return t < w->first || t >= w->last;
}

static void attend_mixed(const struct measuring *x, const struct window *w, const float *seen_v,
                         uint32_t n, double *out)
{
    double max = -INFINITY, sum = 0;
    bool drop = x->m->kind == QUALITY_DROPPED;
    uint32_t dim = x->d->dim;
    for (uint32_t t = 0; t < n; t++) {
        bool raw = in_window(w, t);
        x->mixed[t] = raw ? x->logit[t] : drop ? -INFINITY : x->seen[t];
        max = fmax(max, x->mixed[t]);
    }
    memset(out, 0, dim * sizeof *out);
    for (uint32_t t = 0; t < n; t++) {
        double p = max == -INFINITY ? 0 : exp(x->mixed[t] - max);
        const float *row = (in_window(w, t) ? x->v : seen_v) + (size_t)t * dim;
        sum += p;
        for (uint32_t c = 0; c < dim && p > 1e-12; c++)
            out[c] += p * (double)row[c];
    }
    for (uint32_t c = 0; c < dim && sum > 0; c++)
        out[c] /= sum;
}

static void add_logits(struct measuring *x, uint32_t n)
{
    uint64_t to = x->packed < n ? x->packed : n;
    double mean = 0, seen_mean = 0;
    for (uint64_t t = 0; t < to; t++) {
        mean += x->logit[t] / (double)to;
        seen_mean += x->seen[t] / (double)to;
    }
    for (uint64_t t = 0; t < to; t++) {
        double l = x->logit[t] - mean, s = x->seen[t] - seen_mean;
        x->e_logits.difference += (s - l) * (s - l);
        x->e_logits.square += l * l;
    }
}

static void add_row(const double *is, const double *was, uint32_t n, struct ratio *r)
{
    for (uint32_t i = 0; i < n; i++) {
        r->difference += (is[i] - was[i]) * (is[i] - was[i]);
        r->square += was[i] * was[i];
    }
}

static void add_query(struct measuring *x, uint32_t head, uint32_t i)
{
    const struct quality_data *d = x->d;
    const float *q = d->q + ((size_t)head * d->queries + i) * d->dim;
    uint32_t n = d->position[i] + 1;
    double exact[KVQ_MAX_HEAD_DIM], out[KVQ_MAX_HEAD_DIM];
    const struct window all = {n, n};
    logits_of(q, x->k, n, d->dim, x->scale, x->logit);
    logits_of(q, x->seen_k, n, d->dim, x->scale, x->seen);
    add_logits(x, n);
    attend_mixed(x, &all, x->v, n, exact);
    for (int w = 0; w < WINDOWS; w++) {
        attend_mixed(x, &x->window[w], x->seen_v, n, out);
        add_row(out, exact, d->dim, &x->e_out[w]);
    }
    attend_mixed(x, &x->window[OWN], x->v, n, out);
    add_row(out, exact, d->dim, &x->e_out_k);
}

// The packed rows of one head; *tokens gets the sum of their relative errors, one by one.
static void add_rows(const struct measuring *x, const float *was, const float *is, struct ratio *r,
                     double *tokens)
{
    uint32_t dim = x->d->dim;
    for (uint64_t t = x->m->f.sink_tokens; t < x->packed; t++) {
        struct ratio row = {0};
        for (size_t i = t * dim; i < (t + 1) * dim; i++) {
            double difference = (double)is[i] - (double)was[i];
            row.difference += difference * difference;
            row.square += (double)was[i] * (double)was[i];
        }
        r->difference += row.difference;
        r->square += row.square;
        *tokens += root(row);
    }
}

// ---- All ----

static void make_windows(struct measuring *x, const struct kvq_shape *s, double budget_bits)
{
    const struct kvq_format *f = &x->m->f;
    uint64_t n = x->d->tokens, unit = f->unit_tokens;
    double budget = budget_bits / 8 * 2 * x->d->dim * (double)n;
    uint64_t own = n > f->recent_tokens ? (n - f->recent_tokens) / unit * unit : 0;
    int64_t recent = quality_window_for(x->m, s, n, budget);
    bool raw = x->m->kind == QUALITY_FORMAT && kvq_is_raw(f);
    x->window[OWN] = (struct window){f->sink_tokens, raw ? 0 : own};
    x->window[EQUAL] = (struct window){EQUAL_SINK, n > EQUAL_RECENT ? n - EQUAL_RECENT : 0};
    x->within = recent >= 0;
    x->window[BUDGET] = (struct window){f->sink_tokens, x->within ? n - (uint64_t)recent : n};
    // What does not fill a unit was not packed, whatever the window; the budget has paid for it.
    for (int w = 0; w < WINDOWS; w++)
        x->window[w].last = x->window[w].last < x->packed ? x->window[w].last : x->packed;
}

static bool take_rows(struct measuring *x)
{
    size_t n = (size_t)x->d->tokens, rows = n * x->d->dim;
    x->k = malloc(4 * rows * sizeof *x->k);
    x->logit = malloc(3 * n * sizeof *x->logit);
    if (!x->k || !x->logit)
        return false;
    x->v = x->k + rows;
    x->seen_k = x->v + rows;
    x->seen_v = x->seen_k + rows;
    x->seen = x->logit + n;
    x->mixed = x->seen + n;
    return true;
}

// Appends [heads][tokens][dim] to a layer that takes [tokens][heads][dim].
static bool append_all(struct quality_layer *l, const struct quality_data *d)
{
    size_t n = (size_t)d->heads * d->tokens * d->dim;
    float *k = malloc(2 * n * sizeof *k), *v = k + n;
    if (!k)
        return false;
    for (uint32_t h = 0; h < d->heads; h++)
        for (uint32_t t = 0; t < d->tokens; t++) {
            size_t from = ((size_t)h * d->tokens + t) * d->dim;
            size_t to = ((size_t)t * d->heads + h) * d->dim;
            memcpy(k + to, d->k + from, d->dim * sizeof *k);
            memcpy(v + to, d->v + from, d->dim * sizeof *v);
        }
    quality_layer_append(l, k, v, d->tokens);
    free(k);
    return true;
}

static void measure_heads(struct measuring *x, const struct quality_layer *l)
{
    for (uint32_t h = 0; h < x->d->heads; h++) {
        quality_layer_read(l, false, h, x->k, x->v);
        quality_layer_read(l, true, h, x->seen_k, x->seen_v);
        double unused = 0;
        add_rows(x, x->k, x->seen_k, &x->e_k, &x->token_errors);
        add_rows(x, x->v, x->seen_v, &x->e_v, &unused);
        x->keys += x->packed > x->m->f.sink_tokens ? x->packed - x->m->f.sink_tokens : 0;
        for (uint32_t i = 0; i < x->d->queries; i++)
            add_query(x, h, i);
    }
}

int quality_measure(const struct quality_method *m, const struct quality_data *d,
                    const struct kvq_book *book, double softmax_scale, double budget_bits,
                    struct quality_error *e, char *text, size_t n)
{
    struct measuring x = {.m = m, .d = d, .scale = softmax_scale};
    struct quality_layer l = {0};
    struct kvq_shape s = {.q_heads = (uint16_t)d->heads,
                          .kv_heads = (uint16_t)d->heads,
                          .dtype = KVQ_F16,
                          .scale = (float)softmax_scale};
    kvq_shape_set_dims(&s, (uint16_t)d->dim, (uint16_t)d->dim);
    int rc = quality_layer_open(&l, m, &s, d->layer, d->tokens, d->tokens, book, text, n);
    if (rc == 0 && (!take_rows(&x) || !append_all(&l, d))) {
        snprintf(text, n, "no memory for %u tokens", d->tokens);
        rc = -1;
    }
    if (rc == 0) {
        quality_layer_settle(&l, 0);
        x.packed = l.packed;
        make_windows(&x, &s, budget_bits);
        measure_heads(&x, &l);
        *e = (struct quality_error){
            .k = root(x.e_k),
            .v = root(x.e_v),
            .logits = root(x.e_logits),
            .k_token = x.keys ? x.token_errors / (double)x.keys : 0,
            .out = root(x.e_out[OWN]),
            .out_k = root(x.e_out_k),
            .out_windows = root(x.e_out[EQUAL]),
            .out_bytes = x.within ? root(x.e_out[BUDGET]) : NAN,
        };
    }
    free(x.k);
    free(x.logit);
    quality_layer_close(&l);
    return rc;
}
