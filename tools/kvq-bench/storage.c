// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench storage: saving and restoring a large session against dd on the same file system, by
// turns in one run.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "storage/store.h"
#include "tools/kvq-bench/bench.h"

static const char help[] =
    "Usage: kvq-bench storage [OPTION]...\n"
    "\n"
    "Saves a session to a store and restores it, by turns with dd of as many bytes (bs=4M,\n"
    "oflag=direct conv=fsync; iflag=direct) on the same file system. Needs no daemon. Takes the\n"
    "bytes on disk once, and removes them.\n"
    "\n"
    "  --dir PATH        where to work: a folder that is made and removed (default\n"
    "                    kvq-bench-storage in the current one)\n"
    "  --bytes N         of the session, in whole blocks (default 4294967296)\n"
    "  --block-bytes N   of a block (default 262144)\n"
    "  --reps N          pairs, whose median is shown (default 5)\n"
    "  --json            an array of objects instead of the table\n"
    "  --help            this text\n"
    "\n"
    "Columns: GB/s of ours, GB/s of dd, and ours as a share of dd's.\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 the command line is wrong.\n";

extern char **environ;

enum { BATCH = 1024, SOURCE_BYTES = 256 << 20, MAX_REPS = 101, PATH = 1024 };

struct run {
    char dir[PATH];
    uint64_t bytes, block_bytes, reps;
    bool json;
    uint8_t *memory;
    char text[KVQ_TEXT_BYTES];
    double ours[2][MAX_REPS], dd[2][MAX_REPS]; // seconds; save, restore
};

static int complain(struct run *r, const char *what)
{
    fprintf(stderr, "kvq-bench: %s: %s\n", what, r->text[0] ? r->text : strerror(errno));
    return -1;
}

// ---- The command line ----

static int read_number(const char *name, const char *text, uint64_t low, uint64_t high, uint64_t *v)
{
    char *end;
    errno = 0;
    *v = strtoull(text, &end, 10);
    if (end != text && *end == '\0' && !errno && *text != '-' && *v >= low && *v <= high)
        return 0;
    fprintf(stderr, "kvq-bench: --%s is \"%s\"; give a number from %llu to %llu\n", name, text,
            (unsigned long long)low, (unsigned long long)high);
    return -1;
}

static int read_option(struct run *r, int option, const char *text)
{
    switch (option) {
    case 'd':
        snprintf(r->dir, sizeof r->dir, "%.1000s", text);
        return 0;
    case 'b':
        return read_number("bytes", text, 1 << 20, 1ull << 44, &r->bytes);
    case 'k':
        return read_number("block-bytes", text, 1, SOURCE_BYTES, &r->block_bytes);
    case 'r':
        return read_number("reps", text, 1, MAX_REPS, &r->reps);
    case 'j':
        r->json = true;
        return 0;
    case 'h':
        fputs(help, stdout);
        return 1;
    default:
        fprintf(stderr, "Try kvq-bench storage --help.\n");
        return -1;
    }
}

static int read_options(struct run *r, int argc, char **argv)
{
    static const struct option options[] = {
        {"dir", required_argument, NULL, 'd'},
        {"bytes", required_argument, NULL, 'b'},
        {"block-bytes", required_argument, NULL, 'k'},
        {"reps", required_argument, NULL, 'r'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    int option, status = 0;
    while (!status && (option = getopt_long(argc, argv, "", options, NULL)) != -1)
        status = read_option(r, option, optarg);
    if (!status && optind != argc) {
        fprintf(stderr, "kvq-bench: \"%s\" is no option of storage\n", argv[optind]);
        status = -1;
    }
    if (!status && r->bytes < r->block_bytes) {
        fprintf(stderr, "kvq-bench: --bytes %llu is less than a block of %llu; give more\n",
                (unsigned long long)r->bytes, (unsigned long long)r->block_bytes);
        status = -1;
    }
    r->bytes = r->bytes / r->block_bytes * r->block_bytes;
    return status;
}

// ---- dd ----

// Seconds that it took; negative: it failed. It reads all that it has written: the end of a file
// may be no whole sector, which can be read up to and not asked for.
static double run_dd(struct run *r, bool write)
{
    char in[PATH + 16], out[PATH + 16], count[40];
    snprintf(in, sizeof in, "if=%s%s", write ? "/dev/zero" : r->dir, write ? "" : "/dd");
    snprintf(out, sizeof out, "of=%s%s", write ? r->dir : "/dev/null", write ? "/dd" : "");
    snprintf(count, sizeof count, "count=%llu", (unsigned long long)r->bytes);
    char *reads[] = {"dd", in, out, "bs=4M", "iflag=direct", "status=none", NULL};
    char *writes[] = {
        "dd",           in,           out,           "bs=4M", count, "iflag=count_bytes",
        "oflag=direct", "conv=fsync", "status=none", NULL};
    pid_t child;
    int status;
    double start = bench_seconds();
    if (posix_spawnp(&child, "dd", NULL, NULL, write ? writes : reads, environ) != 0)
        return complain(r, "dd");
    if (waitpid(child, &status, 0) != child || status != 0)
        return complain(r, "dd failed");
    return bench_seconds() - start;
}

static int time_dd(struct run *r, uint64_t rep)
{
    char path[PATH + 16];
    snprintf(path, sizeof path, "%s/dd", r->dir);
    for (int i = 0; i < 2; i++) {
        r->dd[i][rep] = run_dd(r, i == 0);
        if (r->dd[i][rep] < 0)
            return -1;
    }
    return unlink(path);
}

// ---- The store ----

static uint8_t *block_bytes(const struct run *r, uint64_t i)
{
    uint64_t blocks = SOURCE_BYTES / r->block_bytes;
    return r->memory + i % blocks * r->block_bytes;
}

static int save(struct run *r, struct kvq_store *store)
{
    const struct kvq_store_meta meta = {
        .space = "bench", .name = "session", .shards = 1, .tokens = 1};
    struct kvq_save *save;
    int rc = kvq_save_begin(store, &save, r->text, sizeof r->text);
    if (rc)
        return rc;
    rc = kvq_save_session(save, &meta, r->text, sizeof r->text);
    for (uint64_t i = 0; i < r->bytes / r->block_bytes && rc == 0; i++) {
        const struct kvq_place place = {(uint32_t)(i % 32), (uint32_t)(i / 32), 1, 0};
        uint64_t id;
        rc = kvq_save_put(save, &place, block_bytes(r, i), r->block_bytes, &id, r->text,
                          sizeof r->text);
    }
    if (rc == 0)
        return kvq_save_commit(&save, r->text, sizeof r->text);
    kvq_save_abort(&save);
    return rc;
}

static int by_place(const void *a, const void *b)
{
    const struct kvq_stored *x = a, *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static int restore(struct run *r, struct kvq_store *store)
{
    struct kvq_store_session session;
    struct kvq_stored *blocks = NULL;
    size_t n = 0;
    int rc = kvq_store_find(store, "bench", "session", 0, &session, r->text, sizeof r->text);
    if (rc == 0)
        rc = kvq_store_blocks(store, &session, &blocks, &n, r->text, sizeof r->text);
    if (n)
        qsort(blocks, n, sizeof *blocks, by_place);
    for (size_t i = 0, done = 0; i < n && rc == 0; i += done) {
        void *out[BATCH];
        size_t some = n - i < BATCH ? n - i : BATCH;
        for (size_t j = 0; j < some; j++)
            out[j] = block_bytes(r, i + j);
        rc = kvq_store_read_many(store, blocks + i, out, some, &done, r->text, sizeof r->text);
    }
    free(blocks);
    return rc;
}

static int time_store(struct run *r, const char *folder, uint64_t rep)
{
    const struct kvq_store_options options = {0};
    struct kvq_store *store;
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++) { // opened again in between, as after a restart
        rc = kvq_store_open(folder, &options, &store, NULL, r->text, sizeof r->text);
        double start = bench_seconds();
        if (rc == 0)
            rc = i == 0 ? save(r, store) : restore(r, store);
        r->ours[i][rep] = bench_seconds() - start;
        kvq_store_close(&store);
    }
    return rc ? complain(r, "the store") : 0;
}

// Removes what a store has in a folder, and the folder.
static int remove_one(void *context, const char *name)
{
    char path[PATH + 300];
    snprintf(path, sizeof path, "%s/%s", (const char *)context, name);
    return unlink(path) < 0 ? -errno : 0;
}

static void remove_folder(char *folder)
{
    struct kvq_io *io = kvq_io_posix();
    (void)io->list(io, folder, remove_one, folder);
    (void)rmdir(folder);
}

// ---- All of it ----

static void print_row(struct run *r, struct bench_output *out, int which)
{
    static const char *const names[] = {"save", "restore"};
    double share[MAX_REPS], ours[MAX_REPS], dd[MAX_REPS], gb = (double)r->bytes / 1e9;
    uint32_t n = (uint32_t)r->reps;
    for (uint32_t i = 0; i < n; i++) {
        ours[i] = gb / r->ours[which][i];
        dd[i] = gb / r->dd[which][i];
        share[i] = r->dd[which][i] / r->ours[which][i];
    }
    double middle = bench_median(share, n);
    double a = bench_median(ours, n), b = bench_median(dd, n);
    bench_note(out, "%-8s %9.2f %9.2f %8.2f  (%.2f to %.2f; ours %.2f to %.2f, dd %.2f to %.2f)",
               names[which], a, b, middle, share[0], share[n - 1], ours[0], ours[n - 1], dd[0],
               dd[n - 1]);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "what", names[which]);
    cJSON_AddNumberToObject(row, "bytes", (double)r->bytes);
    cJSON_AddNumberToObject(row, "gb_per_s", a);
    cJSON_AddNumberToObject(row, "dd_gb_per_s", b);
    cJSON_AddNumberToObject(row, "share_of_dd", middle);
    cJSON_AddNumberToObject(row, "least_share", share[0]);
    cJSON_AddNumberToObject(row, "most_share", share[n - 1]);
    cJSON_AddItemToArray(out->rows, row);
}

static int run_pairs(struct run *r)
{
    char folder[PATH + 16];
    int rc = 0;
    snprintf(folder, sizeof folder, "%s/store", r->dir);
    for (uint64_t i = 0; i < r->reps && rc == 0; i++) {
        rc = i % 2 ? time_store(r, folder, i) : time_dd(r, i);
        remove_folder(folder);
        if (rc == 0)
            rc = i % 2 ? time_dd(r, i) : time_store(r, folder, i);
        remove_folder(folder);
    }
    return rc;
}

int storage_main(int argc, char **argv)
{
    struct run r = {
        .dir = "kvq-bench-storage", .bytes = 4ull << 30, .block_bytes = 262144, .reps = 5};
    struct bench_output out;
    int rc = read_options(&r, argc, argv);
    if (rc)
        return rc > 0 ? 0 : 2;
    r.memory = malloc(SOURCE_BYTES);
    if (!r.memory || mkdir(r.dir, 0700) < 0)
        return complain(&r, r.dir), free(r.memory), 1;
    for (size_t i = 0; i < SOURCE_BYTES; i += 8) // no file system may take it for zeros
        memcpy(r.memory + i, &(uint64_t){i * 0x9e3779b97f4a7c15u}, 8);
    bench_output_open(&out, r.json);
    bench_note(&out, "%llu bytes in blocks of %llu, %llu pairs in %s\n",
               (unsigned long long)r.bytes, (unsigned long long)r.block_bytes,
               (unsigned long long)r.reps, r.dir);
    bench_note(&out, "%-8s %9s %9s %8s", "", "GB/s", "dd GB/s", "share");
    rc = run_pairs(&r);
    for (int i = 0; i < 2 && rc == 0; i++)
        print_row(&r, &out, i);
    bench_output_close(&out);
    remove_folder(r.dir);
    free(r.memory);
    return rc ? 1 : 0;
}
