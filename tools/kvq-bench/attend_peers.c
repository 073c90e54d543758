// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench attend --peer: the attention of a ggml library by turns with ours.
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "tools/kvq-bench/attend.h"

// Attention over the same values differs by rounding: sums in fp16 are off by some percent in a
// long cache. A wrong head, scale, mask or layout is off by about 100%.
static const double MAX_ERROR = 0.3;

// Threads of the peer's that wait awake do so for some milliseconds; ours go to sleep sooner.
static void rest(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
}

static double times_as_fast(double theirs, double ours)
{
    return ours > 0 ? theirs / ours : NAN;
}

struct pairs {
    double ours, theirs; // seconds a layer, medians
    double times;        // median of the pairs' quotients
};

// Both sides of a pair last about as long, or other work on the machine would hit the longer one
// more often than the shorter.
static struct pairs time_pairs(struct attend_run *r, struct peer_cache *theirs,
                               struct bench_cache *c, enum kvq_path path)
{
    double a[BENCH_MAX_REPS], b[BENCH_MAX_REPS], quotient[BENCH_MAX_REPS];
    double long_one = peer_cache_walk(theirs, r->threads) * theirs->layers;
    rest();
    double short_one = attend_walk(r, c, path) * c->layers;
    uint32_t walks = short_one > 0 && long_one > short_one ? (uint32_t)(long_one / short_one) : 1;
    for (uint32_t i = 0; i < r->o->reps; i++) {
        b[i] = peer_cache_walk(theirs, r->threads);
        rest();
        a[i] = 0;
        for (uint32_t j = 0; j < walks; j++)
            a[i] += attend_walk(r, c, path) / walks;
        quotient[i] = times_as_fast(b[i], a[i]);
    }
    return (struct pairs){.ours = bench_median(a, r->o->reps),
                          .theirs = bench_median(b, r->o->reps),
                          .times = bench_median(quotient, r->o->reps)};
}

static void print_peer(struct attend_run *r, const struct peer_cache *c, const struct pairs *x,
                       double error)
{
    double values = 2.0 * c->like->shape.k_dim;
    attend_print(r, &(struct attend_row){.format = c->kind->name,
                                         .isa = "peer",
                                         .path = c->kind->layout_name,
                                         .us = x->theirs * 1e6,
                                         .f16_us = x->ours * 1e6,
                                         .error = error,
                                         .bytes_per_token_head = 2.0 * (double)c->row_bytes,
                                         .bits = 16.0 * (double)c->row_bytes / values,
                                         .layer_bytes = c->layer_bytes,
                                         .layers = c->layers});
}

// Whether what the library computes is attention over its cache.
static bool check_peer(struct attend_run *r, struct peer_cache *c, double *error)
{
    if (!isfinite(peer_cache_walk(c, r->threads)))
        return false; // complained
    *error = peer_cache_error(c);
    if (*error <= MAX_ERROR)
        return true;
    fprintf(
        stderr,
        "kvq-bench: %s %s is off by %.0f%% from double precision over its own cache, where %.0f%% "
        "is the limit: that is another calculation, so it is not timed\n",
        c->kind->name, c->kind->layout_name, 100 * *error, 100 * MAX_ERROR);
    return false;
}

static struct attend_against *new_against(struct attend_run *r, const char *format,
                                          const char *path)
{
    struct attend_against *a = &r->against[r->n_against++];
    snprintf(a->name, sizeof a->name, "%s %s", format, path);
    for (int i = 0; i < PEERS; i++)
        a->times[i] = NAN;
    return a;
}

void attend_peers_open(struct attend_run *r)
{
    r->n_against = 0;
    struct attend_against *baseline = new_against(r, r->baseline->format->name, "exact");
    for (int i = 0; r->peer && i < PEERS; i++) {
        struct peer_cache *c = &r->theirs[i];
        double error;
        if (!peer_cache_make(c, r->peer, &peer_kinds[i], r->baseline)) {
            r->failed = true;
            continue;
        }
        if (!check_peer(r, c, &error)) {
            r->failed = true;
            peer_cache_free(c);
            continue;
        }
        struct pairs x = time_pairs(r, c, r->baseline, KVQ_PATH_EXACT);
        baseline->times[i] = x.times;
        print_peer(r, c, &x, error);
    }
}

const struct attend_against *attend_peers_time(struct attend_run *r, struct bench_cache *c,
                                               enum kvq_path path)
{
    if (c == r->baseline)
        return &r->against[0];
    struct attend_against *a =
        new_against(r, c->format->name, path == KVQ_PATH_FAST ? "fast" : "exact");
    for (int i = 0; i < PEERS; i++)
        if (r->theirs[i].p)
            a->times[i] = time_pairs(r, &r->theirs[i], c, path).times;
    return a;
}

static void note_against(const struct attend_run *r)
{
    char line[256];
    int n = snprintf(line, sizeof line, "%-18s", "times as fast as");
    for (int i = 0; i < PEERS; i++)
        n += snprintf(line + n, sizeof line - (size_t)n, " %6s %-6s", peer_kinds[i].type_name,
                      peer_kinds[i].layout_name);
    bench_note(r->out, "%s", line);
    for (uint32_t j = 0; j < r->n_against; j++) {
        n = snprintf(line, sizeof line, "%-18.40s", r->against[j].name);
        for (int i = 0; i < PEERS; i++)
            n += snprintf(line + n, sizeof line - (size_t)n, " %13.2f", r->against[j].times[i]);
        bench_note(r->out, "%s", line);
    }
}

void attend_peers_close(struct attend_run *r)
{
    if (r->peer)
        note_against(r);
    for (int i = 0; i < PEERS; i++)
        if (r->theirs[i].p)
            peer_cache_free(&r->theirs[i]);
}
