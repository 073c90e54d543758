// SPDX-License-Identifier: Apache-2.0
//
// The model over held-out text, teacher-forced, a few methods at a time beside f16: perplexity,
// KL divergence from f16 and how often the likeliest token is the same.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality_model.h"
#include "tools/kvq-run/clusters.h"

enum { SIDES = 9 }; // f16 and up to eight methods in one pass

struct side {
    const struct quality_method *m;
    char key[512];
    struct quality_cache cache;
    struct quality_books books;
    double *log_p;
    double nll;
    struct clusters kl, gain;
    uint64_t same_top;
};

struct pass {
    const struct quality_options *o;
    const struct quality_inputs *inputs;
    struct quality_model model;
    struct engine engine;
    struct side side[SIDES];
    uint32_t sides;
    uint32_t *ids;
    uint64_t n_ids;
    float *logits; // of one step
    uint64_t positions;
};

static uint32_t top(const double *p, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (p[i] > p[best])
            best = i;
    return best;
}

static void score(struct pass *x, struct side *s, const float *logits, uint32_t next)
{
    uint32_t n = x->model.model.config.vocab;
    const double *reference = x->side[0].log_p;
    quality_log_softmax(logits, n, s->log_p);
    double kl = 0, gain = s->log_p[next] - reference[next];
    for (uint32_t i = 0; i < n; i++)
        kl += exp(reference[i]) * (reference[i] - s->log_p[i]);
    clusters_add(&s->kl, fmax(kl, 0));
    clusters_add(&s->gain, gain);
    s->nll -= s->log_p[next];
    s->same_top += top(s->log_p, n) == top(reference, n);
}

// One step of every side; each row's next token is scored if there is one.
static int step(struct pass *x, const uint32_t *ids, uint32_t n, const uint32_t *next,
                struct problem *p)
{
    uint32_t vocab = x->model.model.config.vocab;
    size_t all = (size_t)n * vocab;
    for (uint32_t s = 0; s < x->sides; s++)
        if (model_step(&x->model.model, &x->side[s].cache.base, ids, n, n, x->logits + s * all, p))
            return -1;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t s = 0; s < x->sides; s++)
            score(x, &x->side[s], x->logits + s * all + (size_t)i * vocab, next[i]);
    x->positions += n;
    return 0;
}

static int piece(struct pass *x, uint64_t from, uint32_t tokens, struct problem *p)
{
    const struct config *c = &x->model.model.config;
    uint32_t ids[CACHE_STEP_TOKENS], bos = c->bos >= 0, inputs = bos ? tokens : tokens - 1;
    for (uint32_t s = 0; s < x->sides; s++)
        quality_cache_clear(&x->side[s].cache);
    for (uint32_t at = 0, n; at < inputs; at += n) {
        n = inputs - at < x->o->step ? inputs - at : x->o->step;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = bos && at + i == 0 ? (uint32_t)c->bos : x->ids[from + at + i - bos];
        if (step(x, ids, n, x->ids + from + at + 1 - bos, p))
            return -1;
    }
    for (uint32_t s = 0; s < x->sides; s++) {
        clusters_end(&x->side[s].kl);
        clusters_end(&x->side[s].gain);
    }
    return 0;
}

// ---- Results ----

static void add_side(struct pass *x, struct side *s, const struct quality_method *m)
{
    const struct quality_options *o = x->o;
    s->m = m;
    snprintf(s->key, sizeof s->key, "perplexity|%s|%g|%u|%u|%u|%u|%s|%016llx",
             quality_base_name(o->model), o->outliers, o->from, o->bytes, o->context, o->step,
             m->name, (unsigned long long)quality_inputs_of(x->inputs, m));
}

static bool put(const struct pass *x, const struct side *s, struct quality_results *r)
{
    double n = (double)x->positions;
    const struct kvq_shape *shape = &s->cache.layer[0].shape;
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "part", "perplexity");
    cJSON_AddStringToObject(j, "model", quality_base_name(x->o->model));
    quality_inputs_put(x->inputs, j);
    cJSON_AddNumberToObject(j, "outliers", x->o->outliers);
    cJSON_AddStringToObject(j, "method", s->m->name);
    cJSON_AddNumberToObject(j, "bytes", quality_packed_bytes(s->m, shape));
    cJSON_AddNumberToObject(j, "tokens", n);
    cJSON_AddNumberToObject(j, "perplexity", exp(s->nll / n));
    cJSON_AddNumberToObject(j, "kl", s->kl.sum / n);
    cJSON_AddNumberToObject(j, "kl_error", clusters_error(&s->kl));
    cJSON_AddNumberToObject(j, "same_top", (double)s->same_top / n);
    cJSON_AddNumberToObject(j, "gain", s->gain.sum / n);
    cJSON_AddNumberToObject(j, "gain_error", clusters_error(&s->gain));
    return quality_results_put(r, s->key, j);
}

// ---- A pass ----

static int open_pass(struct pass *x, struct problem *p)
{
    const struct quality_options *o = x->o;
    const struct config *c = &x->model.model.config;
    if (quality_model_open(&x->model, o->model, o->step, o->outliers, p) ||
        quality_text(c, o->text, o->from, o->bytes, &x->ids, &x->n_ids, p) ||
        quality_engine_open(&x->engine, c, o->step, p))
        return -1;
    x->logits = malloc((size_t)x->sides * o->step * c->vocab * sizeof *x->logits);
    if (!x->logits)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t s = 0; s < x->sides; s++) {
        x->side[s].log_p = malloc(c->vocab * sizeof(double));
        if (!x->side[s].log_p)
            return problem_set(p, RUN_FAILED, "out of memory");
        if (quality_books_make(&x->side[s].books, x->side[s].m, o, p) ||
            quality_cache_open(&x->side[s].cache, &x->engine, c, x->side[s].m, o->context + 1,
                               x->side[s].books.book, false, p))
            return -1;
    }
    return 0;
}

static void close_pass(struct pass *x)
{
    for (uint32_t s = 0; s < x->sides; s++) {
        quality_cache_close(&x->side[s].cache);
        quality_books_free(&x->side[s].books);
        free(x->side[s].log_p);
    }
    free(x->logits);
    free(x->ids);
    quality_engine_close(&x->engine);
    quality_model_close(&x->model);
}

static int run_pass(struct pass *x, struct quality_results *r, struct problem *p)
{
    int rc = open_pass(x, p);
    uint32_t context = x->o->context;
    for (uint64_t at = 0; rc == 0 && at + 2 <= x->n_ids; at += context) {
        uint64_t rest = x->n_ids - at;
        rc = piece(x, at, rest < context ? (uint32_t)rest : context, p);
    }
    if (rc == 0 && x->positions == 0)
        rc = problem_set(p, RUN_FAILED, "%s has too little text", x->o->text);
    for (uint32_t s = 0; rc == 0 && s < x->sides; s++)
        if (!quality_results_has(r, x->side[s].key) && !put(x, &x->side[s], r))
            rc = problem_set(p, RUN_FAILED, "cannot write results");
    close_pass(x);
    return rc;
}

int quality_part_perplexity(const struct quality_options *o, struct quality_results *r)
{
    struct quality_method f16;
    struct quality_inputs inputs;
    struct problem p = {0};
    char text[400];
    if (quality_method_parse("f16", &f16, text, sizeof text))
        return 1;
    if (quality_inputs_read(&inputs, o, true, o->text, &p)) {
        fprintf(stderr, "kvq-bench: %s\n", p.text);
        return 1;
    }
    for (uint32_t next = 0; next < o->n_methods;) {
        struct pass *x = calloc(1, sizeof *x);
        if (!x)
            return 1;
        x->o = o;
        x->inputs = &inputs;
        add_side(x, &x->side[x->sides++], &f16);
        for (; next < o->n_methods && x->sides < SIDES; next++) {
            struct side *s = &x->side[x->sides];
            add_side(x, s, &o->method[next]);
            x->sides += !quality_results_has(r, s->key) && strcmp(s->m->name, "f16") != 0;
        }
        bool work = x->sides > 1 || !quality_results_has(r, x->side[0].key);
        int rc = work ? run_pass(x, r, &p) : 0;
        free(x);
        if (rc) {
            fprintf(stderr, "kvq-bench: %s\n", p.text);
            return 1;
        }
    }
    return 0;
}
