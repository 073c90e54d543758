// SPDX-License-Identifier: Apache-2.0
//
// The command line of `kvq-bench hop`.
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/hop.h"

static const char help[] =
    "Usage: kvq-bench hop [OPTION]...\n"
    "\n"
    "Measures what attention through the daemon costs for sessions on a GPU, against the same\n"
    "kernel that this program launches itself over the same bytes. Needs a GPU, and starts a kvqd\n"
    "of its own.\n"
    "\n"
    "  --format F        format of the caches (default oscar2), of the table, without codebooks,\n"
    "                    sinks (as kvq2 has), outliers and factors of the prompt\n"
    "  --tokens N,..     cached tokens of each session (default 4096,32768)\n"
    "  --sessions S,..   sessions in a request (default 1,16)\n"
    "  --layers N        layers of the sessions (default 32)\n"
    "  --q-heads N       query heads (default 32)\n"
    "  --kv-heads N      KV heads (default 8)\n"
    "  --head-dim N      64, 128 or 256 (default 128)\n"
    "  --reps N          timed rounds over all layers; the table has their median (default 15)\n"
    "  --driver PATH     the GPU's driver (default KVQ_GPU_DRIVER, else libcuda.so.1); with the\n"
    "                    software driver the benchmark times nothing\n"
    "  --kvqd PATH       the daemon to start (default the one beside this program)\n"
    "  --json            an array of objects instead of the table\n"
    "  --help            this text\n"
    "\n"
    "Requests:\n"
    "  least      attention to one token of one head: the round trip alone\n"
    "  attend     attention of all sessions, one query token each, layer by layer\n"
    "  step       a decode step: begin, append and attend in each layer, end\n"
    "\n"
    "Modes. local: launches by this program. words, events, host: through the daemon, by how the\n"
    "streams wait for each other (protocol.md in share/doc/kvqd). in-context: attention in this\n"
    "process over the daemon's memory. replayed: the same from a captured graph. The table says "
    "why\n"
    "a mode cannot run here.\n"
    "\n"
    "Columns:\n"
    "  us         microseconds a layer, from the first call to the end of the last call's work\n"
    "  host us    the part until the last call returned\n"
    "  extra      us minus that of local\n"
    "  vs local   us divided by that of local\n"
    "All modes take turns in one run. The outputs of attend must be local's to the bit.\n"
    "\n"
    "The output says whether MPS runs; run the benchmark with and without MPS.\n"
    "\n"
    "Exit status: 0 done, 1 failed or outputs differ, 2 the command line is wrong, 77 no GPU.\n";

static bool read_list(const char *text, uint64_t high, struct bench_list *list)
{
    list->n = 0;
    for (;; text++) {
        char *end;
        uint64_t v = strtoull(text, &end, 10);
        if (end == text || *text == '-' || v == 0 || v > high || list->n == BENCH_MAX_LIST)
            return false;
        list->value[list->n++] = v;
        text = end;
        if (*text != ',')
            return *text == '\0';
    }
}

static bool read_one(const char *text, uint64_t high, uint32_t *value)
{
    struct bench_list list;
    if (!read_list(text, high, &list) || list.n != 1)
        return false;
    *value = (uint32_t)list.value[0];
    return true;
}

static bool take(struct hop_options *o, int option, const char *text)
{
    switch (option) {
    case 'n':
        return read_list(text, 65536, &o->tokens);
    case 's':
        return read_list(text, 1024, &o->sessions);
    case 'l':
        return read_one(text, 256, &o->layers);
    case 'q':
        return read_one(text, 256, &o->q_heads);
    case 'k':
        return read_one(text, 256, &o->kv_heads);
    case 'd':
        return read_one(text, 256, &o->head_dim);
    case 'r':
        return read_one(text, BENCH_MAX_REPS, &o->reps);
    case 'f':
        o->format = text;
        return true;
    case 'g':
        o->driver = text;
        return true;
    case 'b':
        o->kvqd = text;
        return true;
    default:
        o->json = true;
        return true;
    }
}

static int read_all(struct hop_options *o, int argc, char **argv)
{
    static const struct option options[] = {
        {"format", required_argument, NULL, 'f'},
        {"tokens", required_argument, NULL, 'n'},
        {"sessions", required_argument, NULL, 's'},
        {"layers", required_argument, NULL, 'l'},
        {"q-heads", required_argument, NULL, 'q'},
        {"kv-heads", required_argument, NULL, 'k'},
        {"head-dim", required_argument, NULL, 'd'},
        {"reps", required_argument, NULL, 'r'},
        {"driver", required_argument, NULL, 'g'},
        {"kvqd", required_argument, NULL, 'b'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    int option, which = 0;
    while ((option = getopt_long(argc, argv, "", options, &which)) != -1) {
        if (option == 'h') {
            fputs(help, stdout);
            return 1;
        }
        if (option == '?') {
            fprintf(stderr, "Try kvq-bench hop --help.\n");
            return -1;
        }
        if (!take(o, option, optarg)) {
            fprintf(stderr,
                    "kvq-bench: --%s is \"%s\"; give positive numbers within the limits of kvqd, "
                    "tokens up to 65536\n",
                    options[which].name, optarg);
            return -1;
        }
    }
    if (optind == argc)
        return 0;
    fprintf(stderr, "kvq-bench: hop takes no \"%s\"; see kvq-bench hop --help\n", argv[optind]);
    return -1;
}

int hop_options_read(struct hop_options *o, int argc, char **argv)
{
    *o = (struct hop_options){.tokens = {{4096, 32768}, 2},
                              .sessions = {{1, 16}, 2},
                              .q_heads = 32,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .layers = 32,
                              .reps = 15,
                              .format = "oscar2",
                              .driver = getenv("KVQ_GPU_DRIVER")};
    int rc = read_all(o, argc, argv);
    if (!o->driver || !*o->driver)
        o->driver = "libcuda.so.1";
    return rc;
}
