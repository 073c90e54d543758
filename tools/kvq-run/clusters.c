// SPDX-License-Identifier: Apache-2.0
//
// Standard errors by blocks.
#include "tools/kvq-run/clusters.h"

#include <math.h>

void clusters_add(struct clusters *c, double x)
{
    c->open += x;
    if (++c->filled == CLUSTER_TOKENS)
        clusters_end(c);
}

void clusters_end(struct clusters *c)
{
    double s = c->open, n = c->filled;
    if (c->filled == 0)
        return;
    c->sum += s;
    c->tokens += n;
    c->squares += s * s;
    c->cross += s * n;
    c->sizes += n * n;
    c->blocks++;
    c->open = 0;
    c->filled = 0;
}

// The mean is a ratio of sums, so blocks may have different sizes.
double clusters_error(const struct clusters *c)
{
    double mean = c->sum / c->tokens, n = (double)c->blocks;
    if (c->blocks < 2)
        return NAN;
    double squares = c->squares - 2 * mean * c->cross + mean * mean * c->sizes;
    return sqrt(fmax(squares, 0) * n / (n - 1)) / c->tokens;
}
