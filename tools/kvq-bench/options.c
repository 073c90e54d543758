// SPDX-License-Identifier: Apache-2.0
//
// The command line of kvq-bench.
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/cache.h"

enum { OWN_OPTIONS = 5 }; // commands from here on read their options themselves (main.c)
static const char *const commands[] = {"attend", "shared", "pack",    "ring",
                                       "step",   "hop",    "storage", "quality"};
enum { COMMANDS = sizeof commands / sizeof *commands };

static const char help[] =
    " [OPTION]...\n"
    "\n"
    "  attend  decode attention of one layer, one query token, over a cache that is larger\n"
    "          than the last level cache; needs no daemon\n"
    "  shared  the same for a batch of sessions that read one cache, as when several samples\n"
    "          are drawn from one prompt, beside as many with a cache each; needs no daemon\n"
    "  pack    storing and packing 128 tokens of one layer; needs no daemon\n"
    "  ring    the round trip of a request that does nothing, checked like any other, to a\n"
    "          kvqd that is started for it and ended after\n"
    "  step    attention of a decode step of 32 layers, through a kvqd that is started for it, "
    "and\n"
    "          in this program's own context over the same kvqd's memory; one thread each\n"
    "  hop     what attention on a GPU costs through the daemon; has options of its own, see\n"
    "          kvq-bench hop --help\n"
    "  storage saving and restoring a session against dd; has options of its own, see\n"
    "          kvq-bench storage --help\n"
    "  quality what formats do to keys, values, outputs and a model; has options of its own,\n"
    "          see kvq-bench quality --help\n"
    "\n"
    "  --format F,..     formats, also composed ones (default f16,kvq2,oscar2,oscar3,oscar4); f16 "
    "is\n"
    "                    always the baseline\n"
    "  --tokens N,..     cached tokens (default 4096,32768; shared: 8192)\n"
    "  --threads T,..    threads, each on a CPU of its own (default 1, and all CPUs)\n"
    "  --q-heads N       query heads (default 32)\n"
    "  --kv-heads N      KV heads (default 8)\n"
    "  --head-dim N      1 to 256 (default 128); for pack and --peer 64, 128 or 256\n"
    "  --queries N       attend, without --peer: query tokens of a call, all of which see all\n"
    "                    cached tokens (default 1, up to 4096); with more a walk is one layer\n"
    "  --path P,..       exact, fast (default both; formats without a fast path have one row)\n"
    "  --isa I           c, avx2, avx512 or amx: the most to use (default the best the CPU has;\n"
    "                    amx with KVQ_CPU_MASK=amx in the environment alone)\n"
    "  --reps N          timed walks of each row; the table has their median (default 7)\n"
    "  --walk N          MiB that a walk of attend reads at least (default 4 times the last level\n"
    "                    cache, so that it comes from memory)\n"
    "  --sessions S,..   ring: sessions in a request (default 1,64); shared: in a batch (16)\n"
    "  --idle N          ring: other clients that are connected and idle (default 0, up to 1000)\n"
    "  --peer LIB,..     attend: a ggml library to time beside us (libggml.so, or libggml-base.so\n"
    "                    and libggml-cpu.so, or a folder that holds them; default none)\n"
    "  --kvqd PATH       ring, step: the daemon to start (default the one beside this program)\n"
    "  --json            an array of objects instead of the table\n"
    "  --help            this text\n"
    "  --version         the version\n"
    "\n"
    "An option that a command does not use is refused. pack is given fp16, and refuses bf16.\n"
    "\n"
    "Columns of attend:\n"
    "  us         microseconds a layer\n"
    "  GB/s       cache bytes read a second\n"
    "  floor      that as a share of what the same threads read with the widest loads\n"
    "  vs f16     how many times faster than f16, timed by turns in the same run\n"
    "  vs peer    how many times faster than the peer's f16 cache with every head in one piece\n"
    "  B/tok/head bytes a token and KV head, K and V together, with all parameters\n"
    "  bits       bits a value, with all parameters\n"
    "  error      relative error against double precision over the same cache\n"
    "\n"
    "Rows of a peer: the path is how its cache lies in memory. heads: every head's tokens in one\n"
    "piece. tokens: every token's heads in one piece, as llama.cpp has it. Below them stands how\n"
    "many times faster each row of ours is, as the median of pairs timed by turns.\n"
    "\n"
    "Modes of ring: spin, both sides wait awake on a CPU of their own; sleep, both sleep and are\n"
    "woken; one-core, both share one CPU.\n"
    "\n"
    "Exit status: 0 done, 1 a benchmark failed, 2 the command line is wrong.\n";

enum { PART = KVQ_FORMAT_NAME }; // room for a part of a list

static bool read_number(const char *text, uint64_t low, uint64_t high, uint64_t *value)
{
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return end != text && *end == '\0' && !errno && *text != '-' && *value >= low && *value <= high;
}

static int wrong_number(const char *name, const char *text, uint64_t low, uint64_t high)
{
    fprintf(stderr, "kvq-bench: --%s is \"%s\"; give a number from %llu to %llu\n", name, text,
            (unsigned long long)low, (unsigned long long)high);
    return -1;
}

static int read_one(const char *name, const char *text, uint64_t low, uint64_t high,
                    uint32_t *value)
{
    uint64_t v;
    if (!read_number(text, low, high, &v))
        return wrong_number(name, text, low, high);
    *value = (uint32_t)v;
    return 0;
}

// Takes the next part of a list with commas from *text, cut to the room of part, into part.
static bool next_part(const char **text, char part[PART])
{
    if (!*text)
        return false;
    size_t n = strcspn(*text, ",");
    snprintf(part, PART, "%.*s", n < PART ? (int)n : PART, *text);
    *text = (*text)[n] ? *text + n + 1 : NULL;
    return true;
}

static int read_list(const char *name, const char *text, uint64_t low, uint64_t high,
                     struct bench_list *list)
{
    char part[PART];
    list->n = 0;
    while (next_part(&text, part)) {
        uint64_t v;
        if (!read_number(part, low, high, &v))
            return wrong_number(name, part, low, high);
        if (list->n == BENCH_MAX_LIST) {
            fprintf(stderr, "kvq-bench: --%s takes %d values; give fewer\n", name, BENCH_MAX_LIST);
            return -1;
        }
        list->value[list->n++] = v;
    }
    return 0;
}

// A row of the table, or a name that is composed (docs/formats.md). NULL with a sentence in text.
static const struct kvq_format *find_format(const char *name, uint32_t i, char *text, size_t n)
{
    static struct kvq_format composed[BENCH_MAX_LIST];
    const struct kvq_format *row = kvq_format_by_name(name);
    if (row || i == BENCH_MAX_LIST) {
        snprintf(text, n, "there are more than %d", BENCH_MAX_LIST);
        return i < BENCH_MAX_LIST ? row : NULL;
    }
    return kvq_format_parse(name, &composed[i], text, n) ? NULL : &composed[i];
}

static int read_formats(const char *text, struct bench_options *o)
{
    char part[PART], why[256];
    o->n_formats = 0;
    while (next_part(&text, part)) {
        const struct kvq_format *f = find_format(part, o->n_formats, why, sizeof why);
        if (!f) {
            fprintf(stderr, "kvq-bench: --format has \"%s\", but %s; give up to %d of", part, why,
                    BENCH_MAX_LIST);
            for (f = kvq_formats; f->name[0]; f++)
                fprintf(stderr, " %s", f->name);
            fprintf(stderr, "\n");
            return -1;
        }
        o->format[o->n_formats++] = f;
    }
    return 0;
}

static int read_path(const char *text, struct bench_options *o)
{
    char part[PART];
    o->exact = o->fast = false;
    while (next_part(&text, part)) {
        if (strcmp(part, "exact") == 0) {
            o->exact = true;
        } else if (strcmp(part, "fast") == 0) {
            o->fast = true;
        } else {
            fprintf(stderr, "kvq-bench: --path has \"%s\"; give exact, fast or both\n", part);
            return -1;
        }
    }
    return 0;
}

static int read_isa(const char *text, struct bench_options *o)
{
    static const char *const names[] = {"c", "avx2", "avx512", "amx"};
    for (int i = 0; i <= KVQ_ISA_BEST; i++)
        if (strcmp(text, names[i]) == 0) {
            o->isa = i;
            return 0;
        }
    fprintf(stderr, "kvq-bench: --isa is \"%s\"; give c, avx2, avx512 or amx\n", text);
    return -1;
}

static int read_option(struct bench_options *o, int option, const char *text)
{
    switch (option) {
    case 'f':
        return read_formats(text, o);
    case 'n':
        return read_list("tokens", text, 1, 1u << 24, &o->tokens);
    case 't':
        return read_list("threads", text, 1, KVQ_POOL_MAX_THREADS, &o->threads);
    case 'q':
        return read_one("q-heads", text, 1, 1024, &o->q_heads);
    case 'k':
        return read_one("kv-heads", text, 1, 1024, &o->kv_heads);
    case 'd':
        return read_one("head-dim", text, 1, KVQ_MAX_HEAD_DIM, &o->head_dim);
    case 'u':
        return read_one("queries", text, 1, 4096, &o->queries);
    case 'p':
        return read_path(text, o);
    case 'i':
        return read_isa(text, o);
    case 'r':
        return read_one("reps", text, 1, BENCH_MAX_REPS, &o->reps);
    case 'w':
        return read_one("walk", text, 1, 1u << 20, &o->walk_mib);
    case 's':
        return read_list("sessions", text, 1, 1024, &o->sessions);
    case 'l':
        return read_one("idle", text, 0, 1000, &o->idle);
    case 'b':
        o->kvqd = text;
        return 0;
    case 'g':
        o->peer = text;
        return 0;
    case 'j':
        o->json = true;
        return 0;
    case 'h':
        printf("Usage: kvq-bench ");
        for (size_t i = 0; i < COMMANDS; i++)
            printf("%s%s", i ? "|" : "", commands[i]);
        fputs(help, stdout);
        return 1;
    case 'v':
        puts("kvq-bench " KVQ_VERSION);
        return 1;
    default:
        fprintf(stderr, "Try kvq-bench --help.\n");
        return -1;
    }
}

static int read_defaults(struct bench_options *o)
{
    *o = (struct bench_options){.q_heads = 32,
                                .kv_heads = 8,
                                .head_dim = 128,
                                .queries = 1,
                                .exact = true,
                                .fast = true,
                                .isa = KVQ_ISA_BEST,
                                .reps = 7};
    char threads[32];
    long cpus = bench_cpus();
    if (cpus > KVQ_POOL_MAX_THREADS)
        cpus = KVQ_POOL_MAX_THREADS;
    snprintf(threads, sizeof threads, cpus > 1 ? "1,%ld" : "%ld", cpus);
    int error = read_formats("f16,kvq2,oscar2,oscar3,oscar4", o);
    if (!error)
        error = read_list("threads", threads, 1, KVQ_POOL_MAX_THREADS, &o->threads);
    return error;
}

struct kvq_shape bench_shape(const struct bench_options *o, uint8_t dtype)
{
    struct kvq_shape s = {.q_heads = (uint16_t)o->q_heads,
                          .kv_heads = (uint16_t)o->kv_heads,
                          .dtype = dtype,
                          .scale = 1.0f / sqrtf((float)o->head_dim)};
    kvq_shape_set_dims(&s, (uint16_t)o->head_dim, (uint16_t)o->head_dim);
    return s;
}

static int check_shape(const struct bench_options *o)
{
    struct kvq_shape shape = bench_shape(o, KVQ_F16);
    char text[256];
    if ((o->peer || strcmp(o->command, "pack") == 0) && kvq_row_dim(&shape) < shape.k_dim) {
        fprintf(stderr,
                "kvq-bench: --head-dim %u: pack and --peer are for heads without zeros behind "
                "them; give 64, 128 or 256\n",
                o->head_dim);
        return -1;
    }
    for (uint32_t i = 0; i < o->n_formats; i++) {
        if (strcmp(o->command, "pack") == 0 && o->format[i]->raw_dtype == KVQ_BF16) {
            fprintf(stderr, "kvq-bench: pack is given fp16; leave %s out\n", o->format[i]->name);
            return -1;
        }
        shape.dtype = o->format[i]->raw_dtype ? o->format[i]->raw_dtype : KVQ_F16;
        if (kvq_shape_check(&shape, o->format[i], text, sizeof text)) {
            fprintf(stderr, "kvq-bench: %s\n", text);
            return -1;
        }
    }
    return 0;
}

static int refuse_command(const char *given)
{
    fprintf(stderr, "kvq-bench: ");
    if (given)
        fprintf(stderr, "\"%s\" is no command; ", given);
    fprintf(stderr, "give one command, ");
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(stderr, "%s%s", i == 0 ? "" : i + 1 < COMMANDS ? ", " : " or ", commands[i]);
    fprintf(stderr, "; see kvq-bench --help\n");
    return -1;
}

static int read_command(struct bench_options *o, int argc, char **argv)
{
    size_t i = 0;
    if (optind + 1 != argc)
        return refuse_command(NULL);
    while (i < COMMANDS && strcmp(argv[optind], commands[i]) != 0)
        i++;
    if (i == COMMANDS)
        return refuse_command(argv[optind]);
    if (i >= OWN_OPTIONS) {
        fprintf(stderr,
                "kvq-bench: give %s first, and its options behind it; see kvq-bench %s "
                "--help\n",
                commands[i], commands[i]);
        return -1;
    }
    o->command = commands[i];
    return 0;
}

// Options that some commands do not use; `given` has a bit for each letter.
static int check_given(const struct bench_options *o, uint32_t given)
{
    static const struct {
        char letter;
        const char *name, *commands;
    } only[] = {
        {'f', "format", "attend, shared, pack, step"},
        {'n', "tokens", "attend, shared, step"},
        {'t', "threads", "attend, shared, pack"},
        {'q', "q-heads", "attend, shared, pack, step"},
        {'k', "kv-heads", "attend, shared, pack, step"},
        {'d', "head-dim", "attend, shared, pack, step"},
        {'p', "path", "attend, shared, step"},
        {'i', "isa", "attend, shared, pack"},
        {'r', "reps", "attend, shared, pack, step"},
        {'w', "walk", "attend, shared"},
        {'s', "sessions", "ring, shared"},
        {'l', "idle", "ring"},
        {'g', "peer", "attend"},
        {'b', "kvqd", "ring, step"},
    };
    for (size_t i = 0; i < sizeof only / sizeof *only; i++)
        if (given & 1u << (only[i].letter - 'a') && !strstr(only[i].commands, o->command)) {
            fprintf(stderr, "kvq-bench: --%s is for %s, not for %s; leave it out\n", only[i].name,
                    only[i].commands, o->command);
            return -1;
        }
    return 0;
}

static int check_queries(const struct bench_options *o)
{
    bool alone = strcmp(o->command, "attend") == 0 && !o->peer;
    if (o->queries == 1 || alone)
        return 0;
    fprintf(stderr, "kvq-bench: --queries %u is for attend without --peer; leave it out\n",
            o->queries);
    return -1;
}

// What was not given and depends on the command.
static int fill_in(struct bench_options *o)
{
    bool shared = strcmp(o->command, "shared") == 0;
    int error = 0;
    if (o->tokens.n == 0)
        error = read_list("tokens", shared ? "8192" : "4096,32768", 1, 1u << 24, &o->tokens);
    if (o->queries > 1 && o->walk_mib == 0)
        o->walk_mib = 1; // a layer: products bind, and not memory
    if (!error && o->sessions.n == 0)
        error = read_list("sessions", shared ? "16" : "1,64", 1, 1024, &o->sessions);
    return error;
}

const char *bench_format_name(const struct bench_options *o, uint32_t i)
{
    return o->format[i]->name;
}

bool bench_format_is_fast(const struct bench_options *o, uint32_t i)
{
    struct kvq_shape shape = bench_shape(o, KVQ_F16);
    shape.v_rotation = (uint8_t)kvq_v_rotation_by_paper(o->format[i]); // as sessions have it
    return kvq_kernels_has_fast(kvq_kernels_get(KVQ_ISA_BEST), o->format[i], &shape);
}

int bench_options_read(struct bench_options *o, int argc, char **argv)
{
    static const struct option options[] = {
        {"format", required_argument, NULL, 'f'},
        {"tokens", required_argument, NULL, 'n'},
        {"threads", required_argument, NULL, 't'},
        {"q-heads", required_argument, NULL, 'q'},
        {"kv-heads", required_argument, NULL, 'k'},
        {"head-dim", required_argument, NULL, 'd'},
        {"queries", required_argument, NULL, 'u'},
        {"path", required_argument, NULL, 'p'},
        {"isa", required_argument, NULL, 'i'},
        {"reps", required_argument, NULL, 'r'},
        {"sessions", required_argument, NULL, 's'},
        {"peer", required_argument, NULL, 'g'},
        {"kvqd", required_argument, NULL, 'b'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'},
        {"walk", required_argument, NULL, 'w'},
        {"idle", required_argument, NULL, 'l'},
        {0},
    };
    uint32_t given = 0;
    int option, status = read_defaults(o);
    while (!status && (option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        status = read_option(o, option, optarg);
        given |= status ? 0 : 1u << (option - 'a');
    }
    if (!status)
        status = read_command(o, argc, argv);
    if (!status)
        status = check_given(o, given);
    if (!status)
        status = fill_in(o);
    if (!status)
        status = check_queries(o);
    return status ? status : check_shape(o);
}
