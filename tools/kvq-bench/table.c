// SPDX-License-Identifier: Apache-2.0
//
// Rows for people or for scripts, the clock and the median.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tools/kvq-bench/bench.h"

void bench_output_open(struct bench_output *out, bool json)
{
    out->json = json;
    out->rows = cJSON_CreateArray();
}

void bench_output_close(struct bench_output *out)
{
    char *text = out->json ? cJSON_Print(out->rows) : NULL;
    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(out->rows);
    out->rows = NULL;
}

void bench_note(const struct bench_output *out, const char *format, ...)
{
    if (out->json)
        return;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

double bench_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *x, uint32_t n)
{
    qsort(x, n, sizeof *x, ascending);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}
