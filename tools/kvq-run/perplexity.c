// SPDX-License-Identifier: Apache-2.0
//
// perplexity: two caches of different formats see the same held-out text, teacher-forced, in small
// steps; their next-token distributions are compared position by position.
//
// With --pause-at both caches are saved on the way, and go on after the daemon has been ended,
// killed or left alone: whatever was done to it, no figure but the speed may be another.
//
// The text is cut into pieces of --context tokens, each with a BOS and from an empty cache. A step
// has at most --step tokens, so that nearly all keys and values are read back from the cache as
// it stores them; the share that was read packed is measured and printed.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tools/kvq-run/clusters.h"
#include "tools/kvq-run/commands.h"
#include "tools/kvq-run/model.h"
#include "tools/kvq-run/prompt.h"

enum { SIDES = 2, TEST = 0, REFERENCE = 1 };

struct comparison {
    const struct options *o;
    struct model model;
    struct engine engine;
    struct cache cache[SIDES];
    kvq_capture *capture;                // of the test side
    struct kvq_session_info info[SIDES]; // of the last piece
    float *logits[SIDES];
    double *log_p[SIDES]; // one row each
    uint8_t *text;
    uint64_t bytes;
    float *kl; // per position
    uint64_t positions, room;
    double nll[SIDES];    // natural log, summed
    struct clusters gain; // log-likelihood of test minus reference
    uint64_t same_top;
    double packed_reads, reads; // keys seen by the test side
    double seconds[SIDES];
    double last_progress;
    bool named; // the sessions have names, by which they can be found again
    char name[SIDES][48];
};

static void log_softmax(const float *logits, uint32_t n, double *out)
{
    double max = logits[0], sum = 0;
    for (uint32_t i = 1; i < n; i++)
        max = logits[i] > max ? logits[i] : max;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(logits[i] - max);
    double norm = max + log(sum);
    for (uint32_t i = 0; i < n; i++)
        out[i] = logits[i] - norm;
}

static uint32_t top(const double *p, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (p[i] > p[best])
            best = i;
    return best;
}

static void score(struct comparison *c, uint32_t row, uint32_t next)
{
    uint32_t n = c->model.config.vocab;
    for (int s = 0; s < SIDES; s++)
        log_softmax(c->logits[s] + (uint64_t)row * n, n, c->log_p[s]);
    const double *test = c->log_p[TEST], *reference = c->log_p[REFERENCE];
    double kl = 0;
    for (uint32_t i = 0; i < n; i++)
        kl += exp(reference[i]) * (reference[i] - test[i]);
    c->kl[c->positions++] = (float)(kl > 0 ? kl : 0);
    c->nll[TEST] -= test[next];
    c->nll[REFERENCE] -= reference[next];
    clusters_add(&c->gain, test[next] - reference[next]);
    c->same_top += top(test, n) == top(reference, n);
}

// Keys that the step's queries read, and how many of them were packed when it began. The daemon
// says how many tokens are still in full precision; those of the step itself always are.
static int count_reads(struct comparison *c, uint32_t n, struct problem *p)
{
    struct kvq_session_info info = {.size = sizeof info};
    if (cache_info(&c->cache[TEST], &info, p))
        return -1;
    double packed = (double)(info.tokens - info.full_precision_tokens);
    c->packed_reads += packed * n;
    c->reads += (double)info.tokens * n + 0.5 * n * (n + 1);
    return 0;
}

static int step(struct comparison *c, const uint32_t *ids, uint32_t n, struct problem *p)
{
    if (count_reads(c, n, p))
        return -1;
    for (int s = 0; s < SIDES; s++) {
        double start = run_seconds();
        if (model_step(&c->model, &c->cache[s], ids, n, n, c->logits[s], p))
            return -1;
        c->seconds[s] += run_seconds() - start;
    }
    return 0;
}

static void progress(struct comparison *c, uint64_t done)
{
    if (c->o->quiet || !isatty(STDERR_FILENO) || run_seconds() - c->last_progress < 0.5)
        return;
    c->last_progress = run_seconds();
    double n = (double)c->positions;
    fprintf(stderr, "\r%llu of %llu bytes, perplexity %.4f against %.4f ", (unsigned long long)done,
            (unsigned long long)c->bytes, exp(c->nll[TEST] / n), exp(c->nll[REFERENCE] / n));
}

static int open_caches(struct comparison *c, struct problem *p)
{
    const char *formats[SIDES] = {c->o->format, c->o->against};
    for (int s = 0; s < SIDES; s++) {
        struct cache_options co = {
            .format = formats[s],
            .model = c->model.fingerprint,
            .attention = c->o->attention,
            .v_rotation = options_fold(c->o, c->model.config.head_dim) ? KVQ_V_ROTATION_ENGINE
                          : s == TEST                                  ? c->o->v_rotation
                                                                       : KVQ_V_ROTATION_DEFAULT,
            .capture = s == TEST ? c->capture : NULL,
            .session = c->named ? c->name[s] : NULL,
        };
        if (cache_open(&c->cache[s], &c->engine, &c->model.config, &co, p) ||
            (c->cache[s].rotated && model_fold(&c->model, p)))
            return -1;
    }
    return 0;
}

static int close_caches(struct comparison *c, struct problem *p)
{
    for (int s = 0; s < SIDES; s++)
        if (cache_info(&c->cache[s], &c->info[s], p))
            return -1;
    for (int s = 0; s < SIDES; s++) {
        if (c->named && cache_drop(&c->cache[s], p))
            return -1;
        cache_close(&c->cache[s]);
    }
    return 0;
}

static void wait_for_line(void)
{
    int byte;
    do
        byte = getchar();
    while (byte != '\n' && byte != EOF);
}

// Saves, waits, and goes on with what the daemon that is there then gives back.
static int pause_here(struct comparison *c, uint32_t inputs, struct problem *p)
{
    for (int s = 0; s < SIDES; s++)
        if (cache_save(&c->cache[s], p))
            return -1;
    fprintf(stderr, "kvq-run: paused; both sessions are saved, and a line on standard input goes "
                    "on with them\n");
    wait_for_line();
    for (int s = 0; s < SIDES; s++)
        cache_close(&c->cache[s]); // of a daemon that may be gone
    engine_close(&c->engine);
    if (engine_open(&c->engine, &c->model.config, c->o->runtime_dir, c->o->in_context, c->o->step,
                    p) ||
        open_caches(c, p))
        return -1;
    for (int s = 0; s < SIDES; s++)
        if (c->cache[s].tokens != inputs)
            return problem_set(p, RUN_FAILED, "session %s came back with %llu tokens of %u",
                               c->name[s], (unsigned long long)c->cache[s].tokens, inputs);
    return 0;
}

// One piece of text: the BOS and all but the last byte go in, every byte is predicted.
static int piece(struct comparison *c, uint64_t from, uint32_t bytes, struct problem *p)
{
    uint32_t ids[CACHE_STEP_TOKENS];
    const uint8_t *text = c->text + from;
    bool bos = c->model.config.bos >= 0;
    uint32_t inputs = bos ? bytes : bytes - 1;
    if (open_caches(c, p))
        return -1;
    for (uint32_t at = 0; at < inputs;) {
        uint32_t n = inputs - at < c->o->step ? inputs - at : c->o->step;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t byte = at + i; // index of the input among BOS, text[0], text[1], ...
            ids[i] = !bos ? text[byte] : byte ? text[byte - 1] : (uint32_t)c->model.config.bos;
        }
        if (step(c, ids, n, p))
            return -1;
        for (uint32_t i = 0; i < n; i++)
            score(c, i, text[at + i + !bos]);
        at += n;
        progress(c, from + at);
        bool reached = from < c->o->pause_at && from + at >= c->o->pause_at;
        if (reached && from + at - n < c->o->pause_at && at < inputs && pause_here(c, at, p))
            return -1;
        if (atomic_load(&run_interrupted))
            return problem_set(p, RUN_FAILED, "interrupted after %llu of %llu bytes",
                               (unsigned long long)(from + at), (unsigned long long)c->bytes);
    }
    clusters_end(&c->gain);
    return close_caches(c, p);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

struct summary {
    double ppl[SIDES], kl_mean, kl_99, same_top, gain, gain_error, packed, rate[SIDES];
};

static struct summary summarize(struct comparison *c)
{
    double n = (double)c->positions, kl = 0;
    qsort(c->kl, c->positions, sizeof *c->kl, by_value);
    for (uint64_t i = 0; i < c->positions; i++)
        kl += c->kl[i];
    return (struct summary){
        .ppl = {exp(c->nll[TEST] / n), exp(c->nll[REFERENCE] / n)},
        .kl_mean = kl / n,
        .kl_99 = c->kl[(uint64_t)(0.99 * (n - 1))],
        .same_top = (double)c->same_top / n,
        .gain = c->gain.sum / n,
        .gain_error = clusters_error(&c->gain),
        .packed = c->reads > 0 ? c->packed_reads / c->reads : 0,
        .rate = {n / c->seconds[TEST], n / c->seconds[REFERENCE]},
    };
}

static void report_json(const struct comparison *c, const struct summary *s)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "format", c->info[TEST].format);
    cJSON_AddStringToObject(j, "against", c->info[REFERENCE].format);
    cJSON_AddStringToObject(j, "attention", c->info[TEST].attention);
    cJSON_AddNumberToObject(j, "bits_per_value", c->info[TEST].bits_per_value);
    cJSON_AddNumberToObject(j, "bytes_per_token_head", c->info[TEST].bytes_per_token_head);
    cJSON_AddNumberToObject(j, "bytes_per_token_head_total",
                            c->info[TEST].bytes_per_token_head_total);
    cJSON_AddNumberToObject(j, "tokens", (double)c->positions);
    cJSON_AddNumberToObject(j, "tokens_per_step", c->o->step);
    cJSON_AddNumberToObject(j, "context", c->o->context);
    cJSON_AddNumberToObject(j, "packed_read_share", s->packed);
    cJSON_AddNumberToObject(j, "perplexity", s->ppl[TEST]);
    cJSON_AddNumberToObject(j, "perplexity_against", s->ppl[REFERENCE]);
    cJSON_AddNumberToObject(j, "kl_mean", s->kl_mean);
    cJSON_AddNumberToObject(j, "kl_99", s->kl_99);
    cJSON_AddNumberToObject(j, "same_top", s->same_top);
    cJSON_AddNumberToObject(j, "log_likelihood_difference", s->gain);
    cJSON_AddNumberToObject(j, "log_likelihood_difference_stderr", s->gain_error);
    cJSON_AddNumberToObject(j, "tokens_per_s", s->rate[TEST]);
    cJSON_AddNumberToObject(j, "tokens_per_s_against", s->rate[REFERENCE]);
    char *text = cJSON_Print(j);
    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(j);
}

static void report(struct comparison *c)
{
    struct summary s = summarize(c);
    if (!c->o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\r%60s\r", "");
    if (c->o->json) {
        report_json(c, &s);
        return;
    }
    printf("%s (%.2f bits per value) against %s, %llu tokens, %u a step, context %u\n"
           "  read packed                  %8.1f %% of keys and values\n"
           "  perplexity                   %8.4f against %.4f (%.4f and %.4f bits per token)\n"
           "  KL divergence, mean and 99%%  %8.5f and %.5f nats\n"
           "  same likeliest token         %8.2f %%\n"
           "  log-likelihood difference    %8.5f +- %.5f nats per token\n"
           "  speed                        %8.0f against %.0f tokens/s\n",
           c->info[TEST].format, c->info[TEST].bits_per_value, c->info[REFERENCE].format,
           (unsigned long long)c->positions, c->o->step, c->o->context, 100 * s.packed, s.ppl[TEST],
           s.ppl[REFERENCE], log2(s.ppl[TEST]), log2(s.ppl[REFERENCE]), s.kl_mean, s.kl_99,
           100 * s.same_top, s.gain, s.gain_error, s.rate[TEST], s.rate[REFERENCE]);
}

static int open_all(struct comparison *c, struct problem *p)
{
    const struct options *o = c->o;
    if (model_open(&c->model, o->model, o->step, p))
        return -1;
    uint32_t vocab = c->model.config.vocab;
    if (!c->model.config.bytes)
        return problem_set(p, RUN_FAILED,
                           "perplexity reads text as bytes; this model's vocabulary "
                           "has %u tokens",
                           vocab);
    const struct capture_options captured = {o->capture, c->model.fingerprint, o->capture_tokens};
    if (capture_open(&captured, &c->model.config, &c->capture, p))
        return -1;
    if (file_read(o->text, o->bytes, &c->text, &c->bytes, p) ||
        engine_open(&c->engine, &c->model.config, o->runtime_dir, o->in_context, o->step, p))
        return -1;
    c->named = o->pause_at > 0;
    for (int s = 0; s < SIDES; s++)
        snprintf(c->name[s], sizeof c->name[s], "perplexity-%ld-%s", (long)getpid(),
                 s == TEST ? "test" : "reference");
    c->kl = malloc(c->bytes * sizeof *c->kl);
    for (int s = 0; s < SIDES; s++) {
        c->logits[s] = malloc((uint64_t)o->step * vocab * sizeof *c->logits[s]);
        c->log_p[s] = malloc(vocab * sizeof *c->log_p[s]);
        if (!c->logits[s] || !c->log_p[s] || !c->kl)
            return problem_set(p, RUN_FAILED, "out of memory");
    }
    return 0;
}

int run_perplexity(const struct options *o, struct problem *p)
{
    struct comparison c = {.o = o};
    int rc = -1;
    if (open_all(&c, p))
        goto out;
    for (uint64_t at = 0; at + 2 <= c.bytes; at += o->context) {
        uint64_t rest = c.bytes - at;
        if (piece(&c, at, rest < o->context ? (uint32_t)rest : o->context, p))
            goto out;
    }
    if (!c.positions) {
        problem_set(p, RUN_FAILED, "%s has too little text", o->text);
        goto out;
    }
    report(&c);
    rc = 0;
out:
    if (capture_close(&c.capture, p))
        rc = -1;
    for (int s = 0; s < SIDES; s++) {
        if (c.engine.client)
            cache_close(&c.cache[s]);
        free(c.logits[s]);
        free(c.log_p[s]);
    }
    engine_close(&c.engine);
    free(c.kl);
    free(c.text);
    model_close(&c.model);
    return rc;
}
