// SPDX-License-Identifier: Apache-2.0
//
// Nucleus sampling (Holtzman 2020) with a small seeded generator.
#include "tools/kvq-run/sample.h"

#include <math.h>
#include <stdlib.h>

struct candidate {
    double p;
    uint32_t id;
};

int sampler_open(struct sampler *s, uint32_t vocab, double temperature, double top_p, uint64_t seed,
                 struct problem *p)
{
    *s =
        (struct sampler){.temperature = temperature, .top_p = top_p, .state = seed, .vocab = vocab};
    s->order = malloc(vocab * sizeof *s->order);
    return s->order ? 0 : problem_set(p, RUN_FAILED, "out of memory");
}

void sampler_close(struct sampler *s)
{
    free(s->order);
    s->order = NULL;
}

// splitmix64, as a number in [0, 1).
static double uniform(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static uint32_t likeliest(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static int by_probability(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->p != y->p)
        return x->p < y->p ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

uint32_t sampler_next(struct sampler *s, const float *logits)
{
    uint32_t best = likeliest(logits, s->vocab);
    if (s->temperature == 0)
        return best;
    double sum = 0;
    for (uint32_t i = 0; i < s->vocab; i++) {
        s->order[i] = (struct candidate){exp((logits[i] - logits[best]) / s->temperature), i};
        sum += s->order[i].p;
    }
    qsort(s->order, s->vocab, sizeof *s->order, by_probability);
    double nucleus = 0;
    uint32_t n = 0;
    while (n < s->vocab && (n == 0 || nucleus < s->top_p * sum))
        nucleus += s->order[n++].p;
    double at = uniform(&s->state) * nucleus;
    uint32_t i = 0;
    while (i + 1 < n && (at -= s->order[i].p) >= 0)
        i++;
    return s->order[i].id;
}
