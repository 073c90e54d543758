// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench ring: the round trip of an empty request through libkvq to a kvqd of its own.
//
// The request (kvq_nop) takes the way of every other: entries copied into shared memory, taken by
// the poller, every handle and position checked, a status for each session handed back. What it
// leaves out is the work.
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/kvq.h"
#include "tools/kvq-bench/bench.h"
#include "tools/kvq-bench/daemon.h"

enum {
    MAX_SESSIONS = 1024,
    WARM_UP = 200,
    MAX_REQUESTS = 100000, // or as many as a second allows
    REST_NS = 200 * 1000,  // in mode sleep, between requests, for the daemon to fall asleep
};

struct mode {
    const char *name;
    const char *daemon_spin_us;
    uint32_t client_spin_us;
    bool one_core, rest;
};

static const struct mode modes[] = {
    {"spin", "1000000", 1000000, false, false},
    {"sleep", "0", 1, false, true},
    {"one-core", "1000", 0, true, false},
};
enum { MODES = sizeof modes / sizeof *modes };

struct run {
    const struct bench_options *o;
    struct bench_output *out;
    struct bench_daemon daemon;
    cpu_set_t cpus;
    kvq_client *client;
    kvq_queue *queue;
    kvq_client **idle; // clients with a queue each that do nothing
    struct kvq_entry entries[MAX_SESSIONS];
    double us[MAX_REQUESTS];
};

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "kvq-bench: %s: %s\n", what, why);
    return -1;
}

static int start_daemon(struct run *r, const struct mode *mode)
{
    const char *const options[] = {"--workers",
                                   "1",
                                   "--pin",
                                   mode->one_core ? "no" : "yes",
                                   "--spin-us",
                                   mode->daemon_spin_us,
                                   "--pool-bytes",
                                   "256mb",
                                   "--max-clients",
                                   "1024",
                                   NULL};
    return bench_daemon_start(&r->daemon, options);
}

// ---- CPUs ----

// The nth CPU that this process may use.
static void bind_to(const struct run *r, int n)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &r->cpus) && n-- == 0)
            CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

// ---- Clients ----

static int open_queue(struct run *r, const struct mode *mode, kvq_client **client,
                      kvq_queue **queue)
{
    struct kvq_connect_options options = {.size = sizeof options,
                                          .runtime_dir = r->daemon.folder,
                                          .name = "kvq-bench",
                                          .spin_us = mode->client_spin_us};
    if (kvq_connect(&options, client) || kvq_queue_open(*client, queue))
        return complain("connecting", kvq_error_text());
    return 0;
}

static int connect_idle(struct run *r, const struct mode *mode)
{
    kvq_queue *queue;
    for (uint32_t i = 0; i < r->o->idle; i++)
        if (open_queue(r, mode, &r->idle[i], &queue) || kvq_nop(queue, NULL, 0))
            return complain("a client that will be idle", kvq_error_text());
    return 0;
}

static int connect_client(struct run *r, const struct mode *mode)
{
    if (connect_idle(r, mode) || open_queue(r, mode, &r->client, &r->queue))
        return -1;
    struct kvq_layer layer = {.q_heads = 1, .kv_heads = 1, .k_dim = 64, .v_dim = 64};
    struct kvq_session_options session = {
        .size = sizeof session, .layers = &layer, .n_layers = 1, .format = "f16"};
    uint64_t most = 1;
    for (uint32_t i = 0; i < r->o->sessions.n; i++)
        most = r->o->sessions.value[i] > most ? r->o->sessions.value[i] : most;
    memset(r->entries, 0, sizeof r->entries);
    for (uint32_t i = 0; i < most; i++)
        if (kvq_session_open(r->client, &session, &r->entries[i].session, NULL))
            return complain("opening a session", kvq_error_text());
    return 0;
}

static void disconnect_all(struct run *r)
{
    kvq_disconnect(&r->client);
    r->queue = NULL;
    for (uint32_t i = 0; i < r->o->idle; i++)
        kvq_disconnect(&r->idle[i]);
}

static uint32_t count_idle(const struct run *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->o->idle; i++)
        n += r->idle[i] != NULL;
    return n;
}

// ---- Requests ----

static int request(struct run *r, uint32_t sessions)
{
    if (kvq_nop(r->queue, r->entries, sessions))
        return complain("a request", kvq_error_text());
    for (uint32_t i = 0; i < sessions; i++)
        if (r->entries[i].status)
            return complain("a session", kvq_strerror(r->entries[i].status));
    return 0;
}

// What is timed is only worth something if the daemon looks at it: a wrong position is refused.
static int prove_checked(struct run *r)
{
    r->entries[0].position = 1; // the session is empty
    int rc = kvq_nop(r->queue, r->entries, 1);
    int status = r->entries[0].status;
    r->entries[0].position = 0;
    if (rc || status != KVQ_E_POSITION)
        return complain("a request with a wrong position", kvq_strerror(rc ? rc : status));
    return 0;
}

// Times requests for about a second. Returns how many, negative after a failure.
static int time_requests(struct run *r, const struct mode *mode, uint32_t sessions)
{
    const struct timespec rest = {.tv_nsec = REST_NS};
    for (int i = 0; i < WARM_UP; i++)
        if (request(r, sessions))
            return -1;
    double end = bench_seconds() + 1;
    int n = 0;
    while (n < MAX_REQUESTS && bench_seconds() < end) {
        if (mode->rest)
            nanosleep(&rest, NULL);
        double start = bench_seconds();
        if (request(r, sessions))
            return -1;
        r->us[n++] = (bench_seconds() - start) * 1e6;
    }
    return n;
}

static int bench_sessions(struct run *r, const struct mode *mode, uint32_t sessions)
{
    int n = time_requests(r, mode, sessions);
    if (n <= 0)
        return -1;
    double p50 = bench_median(r->us, (uint32_t)n); // sorts
    double p99 = r->us[(size_t)n * 99 / 100];
    bench_note(r->out, "%8u %-9s %9.2f %9.2f %9d", sessions, mode->name, p50, p99, n);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddNumberToObject(row, "sessions", sessions);
    cJSON_AddStringToObject(row, "mode", mode->name);
    cJSON_AddNumberToObject(row, "idle", count_idle(r));
    cJSON_AddNumberToObject(row, "p50_us", p50);
    cJSON_AddNumberToObject(row, "p99_us", p99);
    cJSON_AddNumberToObject(row, "requests", n);
    cJSON_AddItemToArray(r->out->rows, row);
    return 0;
}

static int bench_mode(struct run *r, const struct mode *mode)
{
    int rc = -1;
    if (CPU_COUNT(&r->cpus) < 2 && !mode->one_core) {
        bench_note(r->out, "%8s %-9s needs 2 CPUs", "", mode->name);
        return 0;
    }
    if (mode->one_core)
        bind_to(r, 0); // the daemon inherits it
    if (start_daemon(r, mode))
        goto out;
    if (!mode->one_core)
        bind_to(r, CPU_COUNT(&r->cpus) - 1); // the daemon binds its workers from the first on
    if (connect_client(r, mode) || prove_checked(r))
        goto out;
    rc = 0;
    for (uint32_t i = 0; !rc && i < r->o->sessions.n; i++)
        rc = bench_sessions(r, mode, (uint32_t)r->o->sessions.value[i]);
out:
    disconnect_all(r);
    rc = bench_daemon_stop(&r->daemon) ? -1 : rc;
    sched_setaffinity(0, sizeof r->cpus, &r->cpus);
    return rc;
}

int bench_ring(const struct bench_options *o)
{
    static struct run r; // too large for the stack
    struct bench_output out;
    int rc = 0;
    r = (struct run){.o = o, .out = &out};
    if (sched_getaffinity(0, sizeof r.cpus, &r.cpus)) {
        complain("CPUs", strerror(errno));
        return 1;
    }
    r.idle = calloc(o->idle + 1, sizeof(kvq_client *));
    if (!r.idle || bench_daemon_open(&r.daemon, o->kvqd)) {
        free(r.idle);
        return 1;
    }
    bench_output_open(&out, o->json);
    bench_note(&out, "%8s %-9s %9s %9s %9s", "sessions", "mode", "p50 us", "p99 us", "requests");
    for (int i = 0; !rc && i < MODES; i++)
        rc = bench_mode(&r, &modes[i]);
    bench_output_close(&out);
    bench_daemon_close(&r.daemon);
    free(r.idle);
    return rc ? 1 : 0;
}
