// SPDX-License-Identifier: Apache-2.0
//
// kvq-codebook: makes the codebook files that vecinfer and million formats need, and looks at them.
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-codebook/commands.h"

static const char help[] =
    "kvq-codebook: makes codebooks of captured keys and values, for formats such as vecinfer-2\n"
    "and million-4\n"
    "\n"
    "usage: kvq-codebook make --capture FILE --format F --out FILE [options]\n"
    "       kvq-codebook show FILE [--json]\n"
    "       kvq-codebook verify FILE [--quiet]\n"
    "\n"
    "  make    smoothing factors and centroids by k-means, the same bytes for the same seed\n"
    "  show    the format and model of a codebook, how it was made, and the range of its values\n"
    "  verify  read the file and check every byte\n"
    "\n"
    "Options of make:\n"
    "  --capture FILE       captured K and V of an engine (kvq-run --capture)\n"
    "  --format F           vecinfer-4, vecinfer-2, vecinfer-k4x10v8x12, million-4, ..\n"
    "  --out FILE           the codebook; make tries at once whether it can create FILE, makes\n"
    "                       missing folders, and writes FILE when the codebook is complete\n"
    "  --scope layer|global tables for each layer, or one set for all layers (layer)\n"
    "  --heads shared|own   one set of tables for all KV heads of a layer, or one each (shared)\n"
    "  --subs shared|own    one table for all sub-vectors of a head, or one each (shared for\n"
    "                       vecinfer-*, own for million-*)\n"
    "  --seed N             seed of samples and first centroids (1)\n"
    "  --iterations N       iterations of k-means, 1 to 30 (30)\n"
    "  --samples N          most sub-vectors for one table (64 for each centroid)\n"
    "  --resume FILE        save finished layers in FILE, and go on with the layers in FILE\n"
    "  --quiet              no progress on standard error\n"
    "\n"
    "  --json    show prints one JSON object\n"
    "  --help    this text\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage.\n";

enum { CAPTURE = 1, FORMAT, OUT, SCOPE, HEADS, SUBS, SEED, ITERATIONS, SAMPLES, RESUME };
enum { JSON = 20, QUIET, HELP };

static const struct option table[] = {
    {"capture", required_argument, NULL, CAPTURE},
    {"format", required_argument, NULL, FORMAT},
    {"out", required_argument, NULL, OUT},
    {"scope", required_argument, NULL, SCOPE},
    {"heads", required_argument, NULL, HEADS},
    {"subs", required_argument, NULL, SUBS},
    {"seed", required_argument, NULL, SEED},
    {"iterations", required_argument, NULL, ITERATIONS},
    {"samples", required_argument, NULL, SAMPLES},
    {"resume", required_argument, NULL, RESUME},
    {"json", no_argument, NULL, JSON},
    {"quiet", no_argument, NULL, QUIET},
    {"help", no_argument, NULL, HELP},
    {0},
};

static bool set_number(const char *name, const char *text, uint64_t least, uint64_t most,
                       uint64_t *to)
{
    char *end;
    errno = 0;
    unsigned long long x = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && *end == '\0' && errno == 0 && x >= least && x <= most) {
        *to = x;
        return true;
    }
    fprintf(stderr, "kvq-codebook: --%s is '%s'; %llu to %llu are possible\n", name, text,
            (unsigned long long)least, (unsigned long long)most);
    return false;
}

static bool set_flag(const char *name, const char *text, const char *off, const char *on,
                     uint32_t flag, uint32_t *flags)
{
    if (strcmp(text, off) != 0 && strcmp(text, on) != 0) {
        fprintf(stderr, "kvq-codebook: --%s is '%s'; %s and %s are possible\n", name, text, off,
                on);
        return false;
    }
    *flags = (*flags & ~flag) | (strcmp(text, on) == 0 ? flag : 0);
    return true;
}

static bool set_make(int option, struct options *o, bool *subs_given)
{
    uint64_t number = 0;
    bool fine = true;
    switch (option) {
    case SCOPE:
        return set_flag("scope", optarg, "layer", "global", KVQ_CODEBOOK_GLOBAL, &o->flags);
    case HEADS:
        return set_flag("heads", optarg, "shared", "own", KVQ_CODEBOOK_OWN_HEADS, &o->flags);
    case SUBS:
        *subs_given = true;
        return set_flag("subs", optarg, "shared", "own", KVQ_CODEBOOK_OWN_SUBS, &o->flags);
    case SEED:
        return set_number("seed", optarg, 0, UINT64_MAX, &o->train.seed);
    case ITERATIONS:
        fine = set_number("iterations", optarg, 1, TRAIN_MOST_ROUNDS, &number);
        o->train.rounds = (uint32_t)number;
        return fine;
    default:
        fine = set_number("samples", optarg, 1, TRAIN_MOST_SAMPLES, &number);
        o->train.samples = (uint32_t)number;
        return fine;
    }
}

static bool set(int option, struct options *o, bool *subs_given)
{
    switch (option) {
    case CAPTURE:
        o->capture = optarg;
        return true;
    case FORMAT:
        o->format = optarg;
        return true;
    case OUT:
        o->out = optarg;
        return true;
    case RESUME:
        o->resume = optarg;
        return true;
    case JSON:
        return o->json = true;
    case QUIET:
        return o->quiet = true;
    default:
        return set_make(option, o, subs_given);
    }
}

static int wrong(const char *what)
{
    fprintf(stderr, "kvq-codebook: %s; 'kvq-codebook --help' explains\n", what);
    return EXIT_USAGE;
}

static int run_make(struct options *o, bool subs_given)
{
    if (!o->capture || !o->format || !o->out)
        return wrong("make needs --capture, --format and --out");
    if (o->resume && strcmp(o->resume, o->out) == 0)
        return wrong("--resume and --out name the same file");
    if (!subs_given && strncmp(o->format, "million", 7) == 0)
        o->flags |= KVQ_CODEBOOK_OWN_SUBS;
    return command_make(o);
}

int main(int argc, char **argv)
{
    struct options o = {.train = {.seed = 1, .rounds = TRAIN_MOST_ROUNDS}};
    bool subs_given = false;
    int option;
    while ((option = getopt_long(argc, argv, "", table, NULL)) != -1) {
        if (option == HELP)
            return fputs(help, stdout) < 0 || fflush(stdout) ? EXIT_FAILED : EXIT_DONE;
        if (option == '?')
            return wrong("that option is unknown or lacks its value");
        if (!set(option, &o, &subs_given))
            return EXIT_USAGE;
    }
    const char *command = optind < argc ? argv[optind++] : "";
    if (strcmp(command, "make") == 0 && optind == argc)
        return run_make(&o, subs_given);
    o.file = optind + 1 == argc ? argv[optind] : NULL;
    if (strcmp(command, "show") == 0 && o.file)
        return command_show(&o);
    if (strcmp(command, "verify") == 0 && o.file)
        return command_verify(&o);
    return wrong("give make, show FILE or verify FILE");
}
