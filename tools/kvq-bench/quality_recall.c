// SPDX-License-Identifier: Apache-2.0
//
// Recall by distance: prompts that ask for what stood some way back (tools/model/recall.py writes
// them), with the answer teacher-forced; how many of its tokens are the likeliest ones, and what
// they cost in bits.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality_model.h"

enum { DISTANCES = 16, STEP = 128 };

struct tally {
    uint32_t distance, items, whole;
    uint64_t tokens, right;
    double bits;
};

struct recall {
    const struct quality_options *o;
    struct quality_inputs inputs;
    struct quality_model model;
    struct engine engine;
    struct quality_cache cache;
    float *logits;
    double *log_p;
    struct tally tally[DISTANCES];
    uint32_t n_tallies;
};

static struct tally *tally_of(struct recall *x, uint32_t distance)
{
    for (uint32_t i = 0; i < x->n_tallies; i++)
        if (x->tally[i].distance == distance)
            return &x->tally[i];
    if (x->n_tallies == DISTANCES)
        return NULL;
    x->tally[x->n_tallies].distance = distance;
    return &x->tally[x->n_tallies++];
}

static void score(struct recall *x, struct tally *t, const uint8_t *answer, uint32_t n)
{
    uint32_t vocab = x->model.model.config.vocab, right = 0;
    for (uint32_t i = 0; i < n; i++) {
        const float *logits = x->logits + (size_t)i * vocab;
        uint32_t best = 0;
        for (uint32_t j = 1; j < vocab; j++)
            best = logits[j] > logits[best] ? j : best;
        quality_log_softmax(logits, vocab, x->log_p);
        t->bits -= x->log_p[answer[i]] / log(2);
        right += best == answer[i];
    }
    t->tokens += n;
    t->right += right;
    t->items++;
    t->whole += right == n;
}

// The prompt in steps, then its last token with the answer's all but last, whose logits are scored.
static int run_item(struct recall *x, struct tally *t, const char *prompt, const char *answer,
                    struct problem *p)
{
    size_t n_prompt = strlen(prompt), n_answer = strlen(answer), done = 0;
    uint32_t ids[STEP];
    int64_t bos = x->model.model.config.bos;
    size_t head = bos >= 0, body = n_prompt + head - 1;
    if (n_answer == 0 || n_answer > STEP || n_prompt == 0 || body + n_answer > x->cache.room)
        return problem_set(p, RUN_FAILED, "an item has a prompt of %zu and an answer of %zu bytes",
                           n_prompt, n_answer);
    quality_cache_clear(&x->cache);
    while (done < body) {
        uint32_t n = 0;
        for (; n < STEP && done < body; n++, done++)
            ids[n] = done < head ? (uint32_t)bos : (uint8_t)prompt[done - head];
        if (model_step(&x->model.model, &x->cache.base, ids, n, 0, NULL, p))
            return -1;
    }
    ids[0] = (uint8_t)prompt[n_prompt - 1];
    for (size_t i = 1; i < n_answer; i++)
        ids[i] = (uint8_t)answer[i - 1];
    if (model_step(&x->model.model, &x->cache.base, ids, (uint32_t)n_answer, (uint32_t)n_answer,
                   x->logits, p))
        return -1;
    score(x, t, (const uint8_t *)answer, (uint32_t)n_answer);
    return 0;
}

static int run_line(struct recall *x, const char *line, struct problem *p)
{
    cJSON *j = cJSON_Parse(line);
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(j, "kind"));
    const char *prompt = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(j, "prompt"));
    const char *answer = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(j, "answer"));
    const cJSON *distance = cJSON_GetObjectItemCaseSensitive(j, "distance");
    int rc = 0;
    if (!kind || !prompt || !answer || !cJSON_IsNumber(distance) || distance->valueint < 0) {
        rc = problem_set(p, RUN_FAILED, "%s: a line is no item of recall.py", x->o->items);
    } else if (strcmp(kind, "fact") == 0) {
        struct tally *t = tally_of(x, (uint32_t)distance->valueint);
        rc =
            t ? run_item(x, t, prompt, answer, p)
              : problem_set(p, RUN_FAILED, "%s has more than %d distances", x->o->items, DISTANCES);
    }
    cJSON_Delete(j);
    return rc;
}

static int run_items(struct recall *x, struct problem *p)
{
    FILE *f = fopen(x->o->items, "re");
    if (!f)
        return problem_set(p, RUN_FAILED, "cannot open %s", x->o->items);
    char *line = NULL;
    size_t room = 0;
    int rc = 0;
    while (rc == 0 && getline(&line, &room, f) > 0)
        rc = run_line(x, line, p);
    free(line);
    fclose(f);
    return rc;
}

static bool put(const struct recall *x, const struct quality_method *m, const char *key,
                struct quality_results *r)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "part", "recall");
    cJSON_AddStringToObject(j, "model", quality_base_name(x->o->model));
    quality_inputs_put(&x->inputs, j);
    cJSON_AddStringToObject(j, "method", m->name);
    cJSON *list = cJSON_AddArrayToObject(j, "distances");
    for (uint32_t i = 0; i < x->n_tallies; i++) {
        const struct tally *t = &x->tally[i];
        cJSON *row = cJSON_CreateObject();
        cJSON_AddNumberToObject(row, "distance", t->distance);
        cJSON_AddNumberToObject(row, "items", t->items);
        cJSON_AddNumberToObject(row, "right", (double)t->right / (double)t->tokens);
        cJSON_AddNumberToObject(row, "whole", (double)t->whole / t->items);
        cJSON_AddNumberToObject(row, "bits", t->bits / (double)t->tokens);
        cJSON_AddItemToArray(list, row);
    }
    return quality_results_put(r, key, j);
}

static int run_method(struct recall *x, const struct quality_method *m, const char *key,
                      struct quality_results *r, struct problem *p)
{
    x->n_tallies = 0;
    memset(x->tally, 0, sizeof x->tally);
    struct quality_books books;
    int rc = quality_books_make(&books, m, x->o, p);
    if (rc == 0)
        rc = quality_cache_open(&x->cache, &x->engine, &x->model.model.config, m,
                                x->o->context + STEP, books.book, false, p);
    if (rc == 0)
        rc = run_items(x, p);
    if (rc == 0 && !put(x, m, key, r))
        rc = problem_set(p, RUN_FAILED, "cannot write results");
    quality_cache_close(&x->cache);
    quality_books_free(&books);
    return rc;
}

static int run_methods(struct recall *x, struct quality_results *r, struct problem *p)
{
    const struct quality_options *o = x->o;
    const struct config *c = &x->model.model.config;
    if (quality_inputs_read(&x->inputs, o, true, o->items, p) ||
        quality_model_open(&x->model, o->model, STEP, o->outliers, p) ||
        quality_engine_open(&x->engine, c, STEP, p))
        return -1;
    if (!c->bytes)
        return problem_set(p, RUN_FAILED, "recall needs a model whose vocabulary is bytes");
    x->logits = malloc((size_t)STEP * c->vocab * sizeof *x->logits);
    x->log_p = malloc(c->vocab * sizeof *x->log_p);
    if (!x->logits || !x->log_p)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t i = 0; i < o->n_methods; i++) {
        char key[512];
        snprintf(key, sizeof key, "recall|%s|%g|%s|%s|%016llx", quality_base_name(o->model),
                 o->outliers, quality_base_name(o->items), o->method[i].name,
                 (unsigned long long)quality_inputs_of(&x->inputs, &o->method[i]));
        if (!quality_results_has(r, key) && run_method(x, &o->method[i], key, r, p))
            return -1;
    }
    return 0;
}

int quality_part_recall(const struct quality_options *o, struct quality_results *r)
{
    struct recall x = {.o = o};
    struct problem p = {0};
    int rc = run_methods(&x, r, &p);
    if (rc)
        fprintf(stderr, "kvq-bench: %s\n", p.text);
    free(x.logits);
    free(x.log_p);
    quality_engine_close(&x.engine);
    quality_model_close(&x.model);
    return rc ? 1 : 0;
}
