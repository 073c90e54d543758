// SPDX-License-Identifier: Apache-2.0
//
// Metrics in Prometheus' text format and OpenMetrics. Both have the same families, in the same
// order: a family's kind, unit and help, then its samples. Units are seconds and bytes. Labels
// never name sessions, which are secrets of their users and without end.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/http/internal.h"
#include "proto/shm.h"

enum kind { GAUGE, COUNTER, HISTOGRAM, SUMMARY, INFO };

struct writer {
    FILE *out;
    bool open;          // OpenMetrics
    const char *family; // the samples' name, without what their kind adds
    enum kind kind;
};

static void begin_family(struct writer *w, const char *family, enum kind kind, const char *unit,
                         const char *help)
{
    static const char *const kinds[] = {"gauge", "counter", "histogram", "summary", "info"};
    const char *type = kind == INFO && !w->open ? "gauge" : kinds[kind];
    // OpenMetrics names the family without what the samples' names end in, the older format with.
    const char *end = w->open || (kind != COUNTER && kind != INFO) ? ""
                      : kind == INFO                               ? "_info"
                                                                   : "_total";
    w->family = family;
    w->kind = kind;
    fprintf(w->out, "# HELP %s%s %s\n# TYPE %s%s %s\n", family, end, help, family, end, type);
    if (w->open && *unit)
        fprintf(w->out, "# UNIT %s %s\n", family, unit);
}

// The shortest text that is read as the same number: 1e-06, and not 9.9999999999999995e-07.
static void write_shortest(FILE *out, double value)
{
    char text[32];
    int digits = 15; // every text of so many stays what it is as a double
    do
        snprintf(text, sizeof text, "%.*g", digits, value);
    while (digits++ < 17 && strtod(text, NULL) != value);
    fputs(text, out);
}

// A label's value, with what the format escapes.
static void write_label(FILE *out, const char *name, const char *value, bool first)
{
    fprintf(out, "%s%s=\"", first ? "" : ",", name);
    for (; *value; value++)
        if (*value == '\n')
            fputs("\\n", out);
        else if (*value == '"' || *value == '\\')
            fprintf(out, "\\%c", *value);
        else
            fputc(*value, out);
    fputc('"', out);
}

// labels: {name, value} pairs, ending with a NULL.
static void write_sample(const struct writer *w, const char *const labels[][2], double value)
{
    fprintf(w->out, "%s%s", w->family,
            w->kind == COUNTER ? "_total"
            : w->kind == INFO  ? "_info"
                               : "");
    if (labels && labels[0][0]) {
        fputc('{', w->out);
        for (int i = 0; labels[i][0]; i++)
            write_label(w->out, labels[i][0], labels[i][1], i == 0);
        fputc('}', w->out);
    }
    fputc(' ', w->out);
    write_shortest(w->out, value);
    fputc('\n', w->out);
}

static void write_one(struct writer *w, const char *family, enum kind kind, const char *unit,
                      double value, const char *help)
{
    begin_family(w, family, kind, unit, help);
    write_sample(w, NULL, value);
}

static void write_histogram(const struct writer *w, const char *label, const char *value,
                            const struct kvq__histogram *h)
{
    uint64_t n = 0;
    assert(w->kind == HISTOGRAM);
    for (uint32_t i = 0; i < KVQ__BUCKETS; i++) {
        n += h->count[i];
        fprintf(w->out, "%s_bucket{", w->family);
        if (label) {
            write_label(w->out, label, value, true);
            fputc(',', w->out);
        }
        fputs("le=\"", w->out);
        if (i + 1 < KVQ__BUCKETS)
            write_shortest(w->out, (double)(1ull << i) / 1e6);
        else
            fputs("+Inf", w->out);
        fprintf(w->out, "\"} %llu\n", (unsigned long long)n);
    }
    static const char *const ends[] = {"_sum", "_count"};
    for (int i = 0; i < 2; i++) {
        fprintf(w->out, "%s%s", w->family, ends[i]);
        if (label) {
            fputc('{', w->out);
            write_label(w->out, label, value, true);
            fputc('}', w->out);
        }
        fputc(' ', w->out);
        write_shortest(w->out, i ? (double)n : (double)h->sum_ns / 1e9);
        fputc('\n', w->out);
    }
}

// ---- What the core counts ----

// A counter's name and unit from its row: kvqd_fetch_ns is kvqd_fetch_seconds, in seconds.
static void write_counter(struct writer *w, const char *name, bool total, const char *what,
                          uint64_t value)
{
    static const struct {
        const char *end, *unit;
        double scale;
    } units[] = {{"_bytes", "bytes", 1}, {"_ns", "seconds", 1e-9}, {"_ms", "seconds", 1e-3}};
    char family[128], help[256];
    const char *unit = "";
    double scale = 1;
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        size_t end = strlen(units[i].end);
        if (length > end && strcmp(name + length - end, units[i].end) == 0) {
            length -= end;
            unit = units[i].unit;
            scale = units[i].scale;
        }
    }
    snprintf(family, sizeof family, "kvqd_%.*s%s%s", (int)length, name, *unit ? "_" : "", unit);
    const char *says = what;
    if (*unit && scale != 1) { // the row says what in its own unit
        const char *noun = strchr(what, ' ');
        snprintf(help, sizeof help, "seconds%s", noun ? noun : "");
        says = help;
    }
    write_one(w, family, total ? COUNTER : GAUGE, unit, (double)value * scale, says);
}

static void write_counters(struct writer *w, const struct kvq__counts *counts)
{
#define TOTAL                 true
#define MOST                  false
#define NOW                   false
#define ROW(name, kind, what) write_counter(w, #name, kind, what, counts->name);
    KVQ__COUNTER_TABLE(ROW)
#undef ROW
#undef TOTAL
#undef MOST
#undef NOW
}

// Every status has a sample, so that the first refusal is a rise.
static void write_refusals(struct writer *w, const struct kvq__snapshot *s)
{
    static const char *const doors[KVQ__HTTP_DOORS] = {"ring", "attach", "control"};
    begin_family(w, "kvqd_refusals", COUNTER, "",
                 "requests refused, by the door they came by and the status of the answer");
    for (int door = 0; door < KVQ__HTTP_DOORS; door++)
        for (int i = 1; i < KVQ__STATUSES; i++) {
            const char *labels[][2] = {
                {"door", doors[door]}, {"status", kvq_status_name(-i)}, {NULL, NULL}};
            write_sample(w, labels, (double)s->refused[door].count[i]);
        }
}

// ---- Memory ----

static void write_pools(struct writer *w, const struct kvq__snapshot *s)
{
    static const struct {
        const char *family, *help;
        size_t host, gpu;
    } rows[] = {
#define ROW(family, help, host, gpu)                                                               \
    {family, help, offsetof(struct kvq__status, host), offsetof(struct kvq__place_info, gpu)}
        ROW("kvqd_pool_bytes", "memory for caches at a place", pool_bytes, pool_bytes),
        ROW("kvqd_pool_extent_bytes", "of the pool, taken as extents", pool_extent_bytes,
            extent_bytes),
        ROW("kvqd_pool_used_bytes", "of the pool, in blocks that somebody owns", pool_used_bytes,
            used_bytes),
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *host[][2] = {{"place", "host"}, {NULL, NULL}};
        begin_family(w, rows[i].family, GAUGE, "bytes", rows[i].help);
        write_sample(w, host, (double)*(const uint64_t *)((const char *)&s->status + rows[i].host));
        for (uint32_t p = 0; p < s->n_places; p++) {
            const char *gpu[][2] = {{"place", s->places[p].place}, {NULL, NULL}};
            write_sample(w, gpu,
                         (double)*(const uint64_t *)((const char *)&s->places[p] + rows[i].gpu));
        }
    }
}

// The limits of a namespace, as labels.
static const struct {
    enum kvq__limit limit;
    const char *tier;
} tiers[] = {{KVQ__HOST_BYTES, "host"},
             {KVQ__DEVICE_BYTES, "device"},
             {KVQ__DISK_BYTES, "disk"},
             {KVQ__TABLE_BYTES, "tables"}};
enum { TIERS = sizeof tiers / sizeof *tiers };

static void write_namespaces(struct writer *w, const struct kvq__snapshot *s)
{
    begin_family(w, "kvqd_namespace_bytes", GAUGE, "bytes", "bytes of a namespace in a tier");
    for (uint32_t n = 0; n < s->n_namespaces; n++)
        for (int t = 0; t < TIERS; t++) {
            const char *labels[][2] = {
                {"namespace", s->namespaces[n].name}, {"tier", tiers[t].tier}, {NULL, NULL}};
            write_sample(w, labels, (double)s->namespaces[n].used[tiers[t].limit]);
        }
    begin_family(w, "kvqd_namespace_limit_bytes", GAUGE, "bytes",
                 "most bytes that a namespace may have in a tier, where there is a limit");
    for (uint32_t n = 0; n < s->n_namespaces; n++)
        for (int t = 0; t < TIERS; t++) {
            const char *labels[][2] = {
                {"namespace", s->namespaces[n].name}, {"tier", tiers[t].tier}, {NULL, NULL}};
            uint64_t limit = s->namespaces[n].quota.limit[tiers[t].limit];
            if (limit)
                write_sample(w, labels, (double)limit);
        }
    begin_family(w, "kvqd_namespace_sessions", GAUGE, "", "sessions of a namespace");
    for (uint32_t n = 0; n < s->n_namespaces; n++) {
        const char *labels[][2] = {{"namespace", s->namespaces[n].name}, {NULL, NULL}};
        write_sample(w, labels, (double)s->namespaces[n].used[KVQ__SESSIONS]);
    }
    begin_family(w, "kvqd_namespace_refused", COUNTER, "",
                 "requests refused since a namespace was at a limit");
    for (uint32_t n = 0; n < s->n_namespaces; n++)
        for (int t = 0; t <= TIERS; t++) {
            const char *labels[][2] = {{"namespace", s->namespaces[n].name},
                                       {"limit", t < TIERS ? tiers[t].tier : "sessions"},
                                       {NULL, NULL}};
            write_sample(
                w, labels,
                (double)s->namespaces[n].refused[t < TIERS ? tiers[t].limit : KVQ__SESSIONS]);
        }
}

static void write_prefixes(struct writer *w, const struct kvq__snapshot *s)
{
    static const struct {
        const char *family, *unit, *help;
        enum kind kind;
        size_t at;
    } rows[] = {
#define ROW(family, kind, unit, help, field)                                                       \
    {family, unit, help, kind, offsetof(struct kvq__prefix_info, field)}
        ROW("kvqd_prefix_bytes", GAUGE, "bytes", "blocks of prefixes that sessions can share",
            bytes),
        ROW("kvqd_prefix_idle_bytes", GAUGE, "bytes", "of these, blocks that no session has",
            idle_bytes),
        ROW("kvqd_prefix_lookups", COUNTER, "", "prefixes that were looked for", lookups),
        ROW("kvqd_prefix_hits", COUNTER, "", "prefixes of which something was found", hits),
        ROW("kvqd_prefix_evicted_pages", COUNTER, "",
            "pages of prefixes that nobody had and that made room for others", evicted),
        ROW("kvqd_prefix_asked_tokens", COUNTER, "",
            "tokens, in whole pages, that new sessions were to begin with", asked_tokens),
        ROW("kvqd_prefix_hit_tokens", COUNTER, "", "tokens that sessions began with", hit_tokens),
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        begin_family(w, rows[i].family, rows[i].kind, rows[i].unit, rows[i].help);
        for (uint32_t n = 0; n < s->n_prefixes; n++) {
            const char *labels[][2] = {{"namespace", s->prefixes[n].ns}, {NULL, NULL}};
            write_sample(w, labels,
                         (double)*(const uint64_t *)((const char *)&s->prefixes[n] + rows[i].at));
        }
    }
}

// ---- Quality ----

static void write_pack_errors(struct writer *w, const struct kvq__snapshot *s)
{
    begin_family(
        w, "kvqd_pack_error", SUMMARY, "",
        "relative error of packed units that were compared with their values, on the host");
    for (uint32_t i = 0; i < s->n_pack_errors; i++) {
        const struct kvq__pack_error *e = &s->pack_errors[i];
        for (int v = 0; v < 2; v++) {
            static const char *const of[] = {"k", "v"};
            fprintf(w->out, "%s_sum{", w->family);
            write_label(w->out, "format", e->format, true);
            fprintf(w->out, ",layer=\"%u\",of=\"%s\"} ", e->layer, of[v]);
            write_shortest(w->out, v ? e->v : e->k);
            fputc('\n', w->out);
            fprintf(w->out, "%s_count{", w->family);
            write_label(w->out, "format", e->format, true);
            fprintf(w->out, ",layer=\"%u\",of=\"%s\"} %llu\n", e->layer, of[v],
                    (unsigned long long)e->count);
        }
    }
}

// ---- Time ----

static void write_latencies(struct writer *w, const struct kvq__latencies *l)
{
    static const char *const ops[KVQ_OP_COUNT] = {
        [KVQ_OP_NOP] = "nop",
        [KVQ_OP_STEP_BEGIN] = "step_begin",
        [KVQ_OP_APPEND] = "append",
        [KVQ_OP_ATTEND] = "attend",
        [KVQ_OP_APPEND_ATTEND] = "append_attend",
        [KVQ_OP_STEP_END] = "step_end",
        [KVQ_OP_STEP_ABORT] = "step_abort",
        [KVQ_OP_TRUNCATE] = "truncate",
        [KVQ_OP_FORK] = "fork",
        [KVQ_OP_ACCEPT] = "accept",
        [KVQ_OP_READ] = "read",
        [KVQ_OP_STEP] = "step",
    };
    begin_family(w, "kvqd_request_seconds", HISTOGRAM, "seconds",
                 "time from taking a request off its ring until its completion");
    for (uint32_t op = 0; op < KVQ_OP_COUNT; op++)
        write_histogram(w, "op", ops[op], &l->request[op]);
    begin_family(w, "kvqd_request_wait_seconds", HISTOGRAM, "seconds",
                 "of a request's time, waiting for room, other sessions' work or its turn");
    write_histogram(w, NULL, NULL, &l->wait);
    begin_family(w, "kvqd_request_queue_seconds", HISTOGRAM, "seconds",
                 "of a request's time, until its work began");
    write_histogram(w, NULL, NULL, &l->queue);
    begin_family(w, "kvqd_pack_background_seconds", HISTOGRAM, "seconds",
                 "time that packing took, a job of up to a few blocks, while no request waited");
    write_histogram(w, NULL, NULL, &l->background);
}

// ---- The store ----

const char *const kvq__http_tasks[KVQ__TIMES] = {
    [KVQ__TIME_SAVE] = "save",     [KVQ__TIME_RESTORE] = "restore", [KVQ__TIME_FETCH] = "fetch",
    [KVQ__TIME_PREFIX] = "prefix", [KVQ__TIME_PUSH] = "push",       [KVQ__TIME_PULL] = "pull",
};

static void write_store_times(struct writer *w, const struct kvq__store_times *times)
{
    begin_family(
        w, "kvqd_store_seconds", HISTOGRAM, "seconds",
        "time that jobs of the store took which ended well, from when they were asked for");
    for (int i = 0; i < KVQ__TIMES; i++)
        write_histogram(w, "task", kvq__http_tasks[i], &times->of[i]);
}

// Every task has a sample, so that the first failure is a rise. The gauges have one once the store
// was looked at, and none where there is no store.
static void write_store(struct writer *w, const struct kvq__storage_state *s, bool has_remote)
{
    const struct {
        const char *family, *unit, *help;
        uint64_t value;
        bool there;
    } rows[] = {
        {"kvqd_storage_used_bytes", "bytes", "what the files of the store take on disk",
         s->used_bytes, true},
        {"kvqd_storage_limit_bytes", "bytes", "what they may take, where there is a limit",
         s->limit_bytes, s->limit_bytes > 0},
        {"kvqd_storage_free_bytes", "bytes", "free on the store's file system", s->free_bytes,
         true},
        {"kvqd_storage_room_bytes", "bytes",
         "what saves may still write, before anything is removed or compacted", s->room_bytes,
         true},
        {"kvqd_storage_sessions", "", "sessions that are saved, each shard counted", s->sessions,
         true},
        {"kvqd_storage_read_only", "", "1 if the store cannot be written to", s->read_only, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        begin_family(w, rows[i].family, GAUGE, rows[i].unit, rows[i].help);
        if (s->known && rows[i].there)
            write_sample(w, NULL, (double)rows[i].value);
    }
    write_one(w, "kvqd_remote_configured", GAUGE, "", has_remote, "1 if there is a remote store");
    begin_family(w, "kvqd_store_failures", COUNTER, "",
                 "jobs of the store that failed, each try counted");
    for (int i = 0; i < KVQ__TIMES; i++) {
        const char *labels[][2] = {{"task", kvq__http_tasks[i]}, {"reason", "quota"}, {NULL, NULL}};
        write_sample(w, labels, (double)s->failed[i].by_quota);
        labels[1][1] = "other";
        write_sample(w, labels, (double)(s->failed[i].count - s->failed[i].by_quota));
    }
}

void kvq__metrics_write(FILE *out, const struct kvq__snapshot *s, bool open)
{
    struct writer writer = {.out = out, .open = open}, *w = &writer;
    const char *build[][2] = {{"version", s->identity->version},
                              {"backend", s->identity->backend},
                              {"isa", s->identity->isa},
                              {NULL, NULL}};
    begin_family(w, "kvqd_build", INFO, "", "version, backend and instruction set of this daemon");
    write_sample(w, build, 1);
    write_one(w, "kvqd_uptime_seconds", GAUGE, "seconds", (double)s->uptime_ns / 1e9,
              "time since the daemon started");
    write_one(w, "kvqd_draining", GAUGE, "", s->status.draining, "1 while the daemon ends");
    write_one(w, "kvqd_sessions", GAUGE, "", s->status.sessions, "sessions in memory or parked");
    write_one(w, "kvqd_clients", GAUGE, "", s->status.clients, "clients that are attached");
    write_one(w, "kvqd_tokens", GAUGE, "", (double)s->status.tokens,
              "tokens that sessions have committed");
    write_one(w, "kvqd_workers", GAUGE, "", s->identity->workers, "threads that compute");
    write_pools(w, s);
    write_namespaces(w, s);
    write_prefixes(w, s);
    write_counters(w, &s->counts);
    write_refusals(w, s);
    write_latencies(w, &s->latencies);
    write_pack_errors(w, s);
    write_store_times(w, s->store_times);
    write_store(w, s->storage, s->has_remote);
    if (open)
        fputs("# EOF\n", out);
}
