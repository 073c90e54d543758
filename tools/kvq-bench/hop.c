// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench hop: what a layer's way to the daemon and back costs on a GPU.
//
// All modes of a request take turns, round by round, so that what else the machine does falls on
// all of them. A round goes over all layers, as a decode step does; layers have caches of their
// own, so that no round finds the last one's in the GPU's cache. Each round of steps makes the
// daemon's sessions a token longer, which the local ones are not: a few in thousands.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvq-bench/daemon.h"
#include "tools/kvq-bench/hop.h"

enum { NO_GPU = 77, CONTEXT = 1 + HOP_ORDERS, MODES = CONTEXT + 2, WARM_UP = 2 };

struct hop;

// How attention comes about. Functions enqueue on the stream. NULL: of open, begin and end that
// nothing is to be done, of the others that the mode has no such request.
struct mode {
    const char *name;
    int (*open)(struct hop *h, uint32_t i);
    int (*least)(struct hop *h, uint32_t i);
    int (*attend)(struct hop *h, uint32_t i, uint32_t layer);
    int (*begin)(struct hop *h, uint32_t i, bool append); // before the layers; append: of a step
    int (*layer)(struct hop *h, uint32_t i, uint32_t layer);
    int (*end)(struct hop *h, uint32_t i, bool append);
};

struct hop {
    const struct hop_options *o;
    struct bench_output *out;
    struct bench_daemon daemon;
    struct hop_gpu gpu;
    struct hop_local *local;
    struct hop_engine *engine;
    struct hop_case c;
    const char *mps;
    char text[HOP_TEXT];
    char why[MODES][HOP_TEXT]; // a mode cannot be had; else empty
};

static int complain(const char *text)
{
    fprintf(stderr, "kvq-bench: hop: %s\n", text);
    return -1;
}

static int driver_failed(struct hop *h, int result, const char *what)
{
    return result ? kvq_gpu_fault(&h->gpu.driver, result, what, h->text, HOP_TEXT) : 0;
}

// ---- The table of modes ----

static int local_attend(struct hop *h, uint32_t i, uint32_t layer)
{
    (void)i;
    return hop_local_attend(h->local, layer, false, h->text);
}

static int local_layer(struct hop *h, uint32_t i, uint32_t layer)
{
    (void)i;
    return hop_local_attend(h->local, layer, true, h->text);
}

static int queue_attend(struct hop *h, uint32_t i, uint32_t layer)
{
    return hop_engine_attend(h->engine, i - 1, layer, h->text);
}

static int queue_least(struct hop *h, uint32_t i)
{
    return hop_engine_least(h->engine, i - 1, h->text);
}

static int queue_begin(struct hop *h, uint32_t i, bool append)
{
    return append ? hop_engine_begin(h->engine, i - 1, h->text) : 0;
}

static int queue_layer(struct hop *h, uint32_t i, uint32_t layer)
{
    return hop_engine_append(h->engine, i - 1, layer, h->text);
}

static int queue_end(struct hop *h, uint32_t i, bool append)
{
    return append ? hop_engine_end(h->engine, i - 1, h->text) : 0;
}

static int context_open(struct hop *h, uint32_t i)
{
    (void)i;
    return hop_context_open(h->engine, h->text);
}

static int context_attend(struct hop *h, uint32_t i, uint32_t layer)
{
    (void)i;
    return hop_context_attend(h->engine, layer, false, h->text);
}

static int context_begin(struct hop *h, uint32_t i, bool append)
{
    (void)i;
    return hop_context_begin(h->engine, append, h->text);
}

static int context_layer(struct hop *h, uint32_t i, uint32_t layer)
{
    (void)i;
    return hop_context_attend(h->engine, layer, true, h->text);
}

// All layers at once.
static int replay_layer(struct hop *h, uint32_t i, uint32_t layer)
{
    (void)i;
    return layer == 0 ? hop_context_replay(h->engine, h->text) : 0;
}

static int context_end(struct hop *h, uint32_t i, bool append)
{
    (void)i;
    return hop_context_end(h->engine, append, h->text);
}

static int queue_open(struct hop *h, uint32_t i);

#define THROUGH_DAEMON queue_open, queue_least, queue_attend, queue_begin, queue_layer, queue_end
// The first is what the others are measured against.
static const struct mode modes[MODES] = {
    {"local", NULL, NULL, local_attend, NULL, local_layer, NULL},
    {"words", THROUGH_DAEMON},
    {"events", THROUGH_DAEMON},
    {"host", THROUGH_DAEMON},
    [CONTEXT] = {"in-context", context_open, NULL, context_attend, context_begin, context_layer,
                 context_end},
    {"replayed", NULL, NULL, NULL, context_begin, replay_layer, context_end},
};

static int queue_open(struct hop *h, uint32_t i)
{
    return hop_engine_order(h->engine, i - 1, modes[i].name, h->text);
}

// ---- Requests ----

enum request { LEAST, ATTEND, STEP };
static const char *const requests[] = {"least", "attend", "step"};

static bool has(const struct hop *h, uint32_t i, enum request request)
{
    return !h->why[i][0] && (request != LEAST || modes[i].least) &&
           (request != ATTEND || modes[i].attend);
}

static int run_layer(struct hop *h, uint32_t i, enum request request, uint32_t layer)
{
    if (request == LEAST)
        return modes[i].least(h, i);
    return request == ATTEND ? modes[i].attend(h, i, layer) : modes[i].layer(h, i, layer);
}

struct times {
    double all[BENCH_MAX_REPS], host[BENCH_MAX_REPS]; // seconds of a round
};

// One round over all layers.
static int run_round(struct hop *h, uint32_t i, enum request request, double *all, double *host)
{
    const struct mode *m = &modes[i];
    double start = bench_seconds();
    int rc = request != LEAST && m->begin ? m->begin(h, i, request == STEP) : 0;
    for (uint32_t l = 0; rc == 0 && l < h->o->layers; l++)
        rc = run_layer(h, i, request, l);
    *host = bench_seconds() - start;
    if (rc == 0)
        rc = driver_failed(h, h->gpu.driver.stream_sync(h->gpu.stream), "waiting for the stream");
    if (rc == 0 && request != LEAST && m->end)
        rc = m->end(h, i, request == STEP);
    *all = bench_seconds() - start;
    return rc;
}

static int time_request(struct hop *h, enum request request, struct times times[MODES])
{
    double skip[2];
    for (uint32_t r = 0; r < WARM_UP + h->o->reps; r++)
        for (uint32_t i = 0; i < MODES; i++) {
            double *all = r < WARM_UP ? &skip[0] : &times[i].all[r - WARM_UP];
            double *host = r < WARM_UP ? &skip[1] : &times[i].host[r - WARM_UP];
            if (has(h, i, request) && run_round(h, i, request, all, host))
                return -1;
        }
    return 0;
}

// ---- Outputs ----

static int take_output(struct hop *h, uint32_t i, uint32_t layer, float *out, size_t bytes)
{
    const struct hop_gpu *g = &h->gpu;
    int result = g->driver.fill8(h->c.out, 0xff, bytes, g->stream);
    if (driver_failed(h, result, "clearing outputs") ||
        (modes[i].begin && modes[i].begin(h, i, false)) || modes[i].attend(h, i, layer))
        return -1;
    result = g->driver.copy_out(out, h->c.out, bytes, g->stream);
    result = result ? result : g->driver.stream_sync(g->stream);
    int rc = driver_failed(h, result, "taking outputs");
    return rc || !modes[i].end ? rc : modes[i].end(h, i, false);
}

// All modes' outputs are the first one's, in the first layer and in the last.
static int compare(struct hop *h)
{
    const uint64_t n = (uint64_t)h->c.sessions * h->o->q_heads * h->o->head_dim;
    float *first = malloc(n * sizeof(float)), *other = malloc(n * sizeof(float));
    int rc = first && other ? 0 : -1;
    for (uint32_t layer = 0; rc == 0 && layer < h->o->layers; layer += h->o->layers - 1) {
        rc = take_output(h, 0, layer, first, n * sizeof(float));
        for (uint32_t i = 1; rc == 0 && i < MODES; i++) {
            if (!has(h, i, ATTEND))
                continue;
            rc = take_output(h, i, layer, other, n * sizeof(float));
            if (rc == 0 && memcmp(first, other, n * sizeof(float))) {
                snprintf(h->text, HOP_TEXT, "layer %u: the outputs of %s are not those of %s",
                         layer, modes[i].name, modes[0].name);
                rc = -1;
            }
        }
        if (h->o->layers == 1)
            break;
    }
    free(first);
    free(other);
    return rc;
}

// ---- Rows ----

static void add_number(cJSON *row, const char *name, const struct hop *h, double value)
{
    if (h->gpu.software)
        cJSON_AddNullToObject(row, name);
    else
        cJSON_AddNumberToObject(row, name, value);
}

static cJSON *new_row(struct hop *h, enum request request, uint32_t mode)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "gpu", h->gpu.name);
    cJSON_AddStringToObject(row, "mps", h->mps);
    cJSON_AddStringToObject(row, "format", h->o->format);
    cJSON_AddStringToObject(row, "request", requests[request]);
    cJSON_AddStringToObject(row, "mode", modes[mode].name);
    cJSON_AddNumberToObject(row, "sessions", request == LEAST ? 1 : h->c.sessions);
    cJSON_AddNumberToObject(row, "tokens", request == LEAST ? 1 : (double)h->c.tokens);
    cJSON_AddNumberToObject(row, "layers", h->o->layers);
    cJSON_AddItemToArray(h->out->rows, row);
    return row;
}

static void print_row(struct hop *h, enum request request, uint32_t mode, const double *x)
{
    char figures[64] = "         -         -         -        -";
    unsigned sessions = request == LEAST ? 1 : h->c.sessions;
    unsigned long long tokens = request == LEAST ? 1 : h->c.tokens;
    if (!h->gpu.software && (mode == 0 || request == LEAST)) // there is nothing to compare with
        snprintf(figures, sizeof figures, "%10.2f%10.2f         -        -", x[0], x[1]);
    else if (!h->gpu.software)
        snprintf(figures, sizeof figures, "%10.2f%10.2f%10.2f%9.2f", x[0], x[1], x[2], x[3]);
    bench_note(h->out, "%-8s%9u%9llu  %-11s%s", requests[request], sessions, tokens,
               modes[mode].name, figures);
}

// One mode's figures: us, host us, extra, vs local. The last two are medians of pairs.
static void add_row(struct hop *h, enum request request, uint32_t i, struct times times[MODES])
{
    const uint32_t n = h->o->reps;
    const double us = 1e6 / h->o->layers;
    double extra[BENCH_MAX_REPS], ratio[BENCH_MAX_REPS], all[BENCH_MAX_REPS], host[BENCH_MAX_REPS];
    for (uint32_t r = 0; r < n; r++) {
        all[r] = times[i].all[r] * us;
        host[r] = times[i].host[r] * us;
        extra[r] = (times[i].all[r] - times[0].all[r]) * us;
        ratio[r] = times[i].all[r] / times[0].all[r];
    }
    const double x[4] = {bench_median(all, n), bench_median(host, n), bench_median(extra, n),
                         bench_median(ratio, n)};
    cJSON *row = new_row(h, request, i);
    add_number(row, "us", h, x[0]);
    add_number(row, "host_us", h, x[1]);
    if (i > 0 && request != LEAST) {
        add_number(row, "extra_us", h, x[2]);
        add_number(row, "vs_local", h, x[3]);
    }
    print_row(h, request, i, x);
}

static int bench_request(struct hop *h, enum request request)
{
    static struct times times[MODES];
    if (time_request(h, request, times))
        return -1;
    for (uint32_t i = 0; i < MODES; i++) {
        if (has(h, i, request))
            add_row(h, request, i, times);
        else if (h->why[i][0])
            cJSON_AddStringToObject(new_row(h, request, i), "not_run", h->why[i]);
    }
    return 0;
}

static int bench_case(struct hop *h, uint32_t sessions, uint64_t tokens)
{
    h->c = (struct hop_case){.sessions = sessions, .tokens = tokens};
    int rc = hop_engine_fill(h->engine, &h->c, h->text);
    rc = rc ? rc : hop_local_fill(h->local, &h->c, h->text);
    rc = rc ? rc : compare(h);
    rc = rc ? rc : bench_request(h, ATTEND);
    rc = rc ? rc : bench_request(h, STEP);
    hop_local_empty(h->local);
    hop_engine_empty(h->engine);
    return rc;
}

// ---- Opening ----

static int open_gpu(struct hop *h)
{
    struct hop_gpu *g = &h->gpu;
    struct kvq_gpu_driver *d = &g->driver;
    if (kvq_gpu_driver_open(d, h->o->driver, h->text, HOP_TEXT))
        return NO_GPU;
    g->software = d->kernels_inside;
    int result = d->init(0), count = 0;
    result = result ? result : d->device_count(&count);
    if (result || count == 0) {
        driver_failed(h, result ? result : KVQ_GPU_NO_DEVICE, "looking for a GPU");
        return NO_GPU;
    }
    result = d->device_get(&g->device, 0);
    result = result ? result : d->device_name(g->name, sizeof g->name, g->device);
    result = result ? result : d->context_retain(&g->context, g->device);
    result = result ? result : d->context_set(g->context);
    result = result ? result : d->stream_create(&g->stream, 1);
    return driver_failed(h, result, "opening the GPU");
}

static void close_gpu(struct hop *h)
{
    struct hop_gpu *g = &h->gpu;
    if (g->stream)
        g->driver.stream_destroy(g->stream);
    if (g->context)
        g->driver.context_release(g->device);
    kvq_gpu_driver_close(&g->driver);
}

// Where its control pipe is; a daemon of MPS that serves somebody else is not told apart.
static const char *find_mps(void)
{
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    return access(folder ? folder : "/tmp/nvidia-mps", F_OK) == 0 ? "yes" : "no";
}

static int open_all(struct hop *h)
{
    const char *const options[] = {"--backend",
                                   h->gpu.software ? "emu" : "gpu",
                                   "--gpu-driver",
                                   h->o->driver,
                                   "--workers",
                                   "1",
                                   "--pool-bytes",
                                   "64mb",
                                   NULL};
    setenv("KVQ_GPU_DRIVER", h->o->driver, 1);
    if (hop_local_open(&h->local, &h->gpu, h->o, h->text))
        return -1;
    h->text[0] = '\0';
    if (bench_daemon_start(&h->daemon, options))
        return -1;
    if (hop_engine_open(&h->engine, &h->gpu, h->o, h->daemon.folder, h->text))
        return -1;
    for (uint32_t i = 0; i < MODES; i++) {
        if (!modes[i].open || modes[i].open(h, i) == 0)
            continue;
        for (uint32_t j = i; j == i || (i == CONTEXT && j < MODES); j++)
            snprintf(h->why[j], HOP_TEXT, "%s", h->text);
        bench_note(h->out, "%s: not to be had: %s", modes[i].name, h->text);
    }
    return 0;
}

static int run(struct hop *h)
{
    const struct hop_options *o = h->o;
    int rc = open_all(h);
    if (rc == 0 && h->gpu.software)
        bench_note(h->out, "The software driver: outputs are compared, nothing is timed.");
    if (rc == 0)
        bench_note(h->out, "%s, MPS: %s, %s, %u layers\n%-8s%9s%9s  %-11s%10s%10s%10s%9s",
                   h->gpu.name, h->mps, o->format, o->layers, "request", "sessions", "tokens",
                   "mode", "us", "host us", "extra", "vs local");
    rc = rc ? rc : bench_request(h, LEAST);
    for (uint32_t t = 0; t < o->tokens.n; t++)
        for (uint32_t s = 0; rc == 0 && s < o->sessions.n; s++)
            rc = bench_case(h, (uint32_t)o->sessions.value[s], o->tokens.value[t]);
    return rc;
}

int hop_main(int argc, char **argv)
{
    static struct hop h; // too large for the stack
    struct hop_options o;
    struct bench_output out;
    int rc = hop_options_read(&o, argc, argv);
    if (rc)
        return rc > 0 ? 0 : 2;
    h = (struct hop){.o = &o, .out = &out, .mps = find_mps()};
    rc = open_gpu(&h);
    if (rc == NO_GPU) {
        complain(h.text);
        kvq_gpu_driver_close(&h.gpu.driver);
        return NO_GPU;
    }
    bench_output_open(&out, o.json);
    rc = rc || bench_daemon_open(&h.daemon, o.kvqd) ? -1 : run(&h);
    if (rc && h.text[0])
        complain(h.text);
    hop_local_close(&h.local);
    hop_engine_close(&h.engine);
    if (bench_daemon_stop(&h.daemon))
        rc = -1;
    bench_daemon_close(&h.daemon);
    close_gpu(&h);
    bench_output_close(&out);
    return rc ? 1 : 0;
}
