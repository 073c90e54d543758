// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench quality: the command line.
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

// One BLAS thread: runs share the machine.
extern void openblas_set_num_threads(int n);

static const char help[] =
    "Usage: kvq-bench quality PART --results FILE [OPTION]...\n"
    "\n"
    "What formats do to keys, values, logits, outputs and a model. tools/quality.sh runs all "
    "parts\n"
    "and makes docs/quality/small-model.md of the results.\n"
    "\n"
    "  formats     bits a value, and bytes at 1K, 4K, 32K and 128K tokens\n"
    "  synthetic   errors on seeded caches, with queries aimed at keys\n"
    "  captured    errors on K, V and Q of a model over a text (or of --capture FILE)\n"
    "  perplexity  the model over the text: perplexity, KL from f16, same likeliest token\n"
    "  recall      facts asked for again, by distance\n"
    "\n"
    "  --results FILE    one JSON object a line is added for each measurement; what the file has\n"
    "                    already, of files that hold the same, is not measured again\n"
    "  --methods M,..    formats; NAME:stage=value:.. for formats with stages changed; dropped\n"
    "                    and int2-token, the controls (default: all formats of the table, and the\n"
    "                    controls)\n"
    "  --model DIR       config.json and *.safetensors\n"
    "  --text FILE       held-out text; token ids for models whose vocabulary is not bytes\n"
    "  --capture FILE    captured: K, V and Q from kvq-run --capture instead\n"
    "  --book-text FILE  what codebooks are trained on (default: --text from --book-from on; the\n"
    "                    method's name gets @ and the name of the file in the results)\n"
    "  --book-from N     (200000)\n"
    "  --items FILE      recall: what tools/model/recall.py writes\n"
    "  --outliers F      put function-preserving outliers of this factor into the weights (1)\n"
    "  --tokens N        of the caches of synthetic and captured (4160)\n"
    "  --queries N       of each KV head (16)\n"
    "  --seed N          the first seed of synthetic (1)\n"
    "  --seeds N         how many (3)\n"
    "  --head-dim N      of formats and synthetic, 4 to 256 (128); others than 64, 128 and 256\n"
    "                    are stored, as kvqd does, with zeros behind\n"
    "  --budget B        bits a value for comparison at equal bytes (3.5)\n"
    "  --from N          tokens of the text to skip (0)\n"
    "  --bytes N         perplexity: tokens of the text (32768)\n"
    "  --context N       perplexity: tokens from an empty cache (4096)\n"
    "  --step N          perplexity: tokens of one step (32)\n"
    "  --help            this text\n"
    "\n"
    "Exit status: 0 done, 1 a measurement failed, 2 the command line is wrong.\n";

struct part {
    const char *name;
    int (*run)(const struct quality_options *o, struct quality_results *r);
    bool model;
};

static const struct part parts[] = {
    {"formats", quality_part_formats, false},  {"synthetic", quality_part_synthetic, false},
    {"captured", quality_part_captured, true}, {"perplexity", quality_part_perplexity, true},
    {"recall", quality_part_recall, true},
};

// ---- Options ----

static int wrong(const char *name, const char *text, const char *what)
{
    fprintf(stderr, "kvq-bench: --%s %s: %s\n", name, text, what);
    return -1;
}

static int read_number(const char *name, const char *text, double least, double most, double *value)
{
    char *end, what[80];
    errno = 0;
    *value = strtod(text, &end);
    snprintf(what, sizeof what, "give a number from %g to %g", least, most);
    return errno || end == text || *end || !(*value >= least && *value <= most)
               ? wrong(name, text, what)
               : 0;
}

static int read_count(const char *name, const char *text, uint32_t least, uint32_t most,
                      uint32_t *value)
{
    double x;
    if (read_number(name, text, least, most, &x))
        return -1;
    *value = (uint32_t)x;
    return x == floor(x) ? 0 : wrong(name, text, "give a whole number");
}

static int add_method(struct quality_options *o, const char *name)
{
    char text[400];
    if (o->n_methods == QUALITY_MAX_METHODS)
        return wrong("methods", name, "there are too many");
    if (quality_method_parse(name, &o->method[o->n_methods], text, sizeof text))
        return wrong("methods", name, text);
    o->n_methods++;
    return 0;
}

static bool has_shape(const struct kvq_format *f)
{
    bool books = kvq_has_centroids(f);
    return !books && f->raw_dtype != KVQ_BF16;
}

static int add_all(struct quality_options *o)
{
    int rc = add_method(o, "dropped");
    if (rc == 0)
        rc = add_method(o, "int2-token");
    for (const struct kvq_format *f = kvq_formats; f->name[0] && rc == 0; f++)
        rc = has_shape(f) ? add_method(o, f->name) : 0;
    return rc;
}

static int read_methods(struct quality_options *o, const char *text)
{
    char *copy = strdup(text), *rest = NULL;
    int rc = copy ? 0 : wrong("methods", text, "no memory");
    for (char *name = copy ? strtok_r(copy, ",", &rest) : NULL; name && rc == 0;
         name = strtok_r(NULL, ",", &rest))
        rc = strcmp(name, "all") == 0 ? add_all(o) : add_method(o, name);
    free(copy);
    return rc;
}

static int read_option(struct quality_options *o, int option, const char *text)
{
    switch (option) {
    case 'r':
        o->results = text;
        return 0;
    case 'f':
        return read_methods(o, text);
    case 'm':
        o->model = text;
        return 0;
    case 't':
        o->text = text;
        return 0;
    case 'c':
        o->capture = text;
        return 0;
    case 'i':
        o->items = text;
        return 0;
    case 'o':
        return read_number("outliers", text, 1, 1000, &o->outliers);
    case 'n':
        return read_count("tokens", text, 512, 1 << 20, &o->tokens);
    case 'q':
        return read_count("queries", text, 1, 4096, &o->queries);
    case 'S':
        return read_count("seed", text, 1, 1 << 20, &o->first_seed);
    case 's':
        return read_count("seeds", text, 1, 1000, &o->seeds);
    case 'd':
        return read_count("head-dim", text, QUALITY_LEAST_DIM, KVQ_MAX_HEAD_DIM, &o->head_dim);
    case 'B':
        return read_number("budget", text, 0.1, 16, &o->budget_bits);
    case 'F':
        return read_count("from", text, 0, 1u << 30, &o->from);
    case 'b':
        return read_count("bytes", text, 2, 1u << 30, &o->bytes);
    case 'x':
        return read_count("context", text, 2, 1 << 20, &o->context);
    case 'p':
        return read_count("step", text, 1, 512, &o->step);
    case 'k':
        o->book_text = text;
        return 0;
    case 'K':
        return read_count("book-from", text, 0, 1u << 30, &o->book_from);
    case 'h':
        fputs(help, stdout);
        return 1;
    default:
        fprintf(stderr, "Try kvq-bench quality --help.\n");
        return -1;
    }
}

static int read_options(struct quality_options *o, int argc, char **argv)
{
    static const struct option options[] = {
        {"results", required_argument, NULL, 'r'},
        {"methods", required_argument, NULL, 'f'},
        {"model", required_argument, NULL, 'm'},
        {"text", required_argument, NULL, 't'},
        {"capture", required_argument, NULL, 'c'},
        {"items", required_argument, NULL, 'i'},
        {"outliers", required_argument, NULL, 'o'},
        {"tokens", required_argument, NULL, 'n'},
        {"queries", required_argument, NULL, 'q'},
        {"seed", required_argument, NULL, 'S'},
        {"seeds", required_argument, NULL, 's'},
        {"head-dim", required_argument, NULL, 'd'},
        {"budget", required_argument, NULL, 'B'},
        {"from", required_argument, NULL, 'F'},
        {"bytes", required_argument, NULL, 'b'},
        {"context", required_argument, NULL, 'x'},
        {"step", required_argument, NULL, 'p'},
        {"book-text", required_argument, NULL, 'k'},
        {"book-from", required_argument, NULL, 'K'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    *o = (struct quality_options){.tokens = 4160,
                                  .queries = 16,
                                  .first_seed = 1,
                                  .seeds = 3,
                                  .head_dim = 128,
                                  .bytes = 32768,
                                  .context = 4096,
                                  .step = 32,
                                  .book_from = 200000,
                                  .outliers = 1,
                                  .budget_bits = 3.5};
    int option, rc = 0;
    while (rc == 0 && (option = getopt_long(argc, argv, "", options, NULL)) != -1)
        rc = read_option(o, option, optarg);
    if (rc == 0 && o->n_methods == 0)
        rc = add_all(o);
    return rc;
}

// Results tell methods apart by name: what their codebooks were trained on belongs to it.
static void name_books(struct quality_options *o)
{
    for (uint32_t i = 0; i < o->n_methods && o->book_text; i++) {
        struct quality_method *m = &o->method[i];
        size_t used = strlen(m->name);
        if (quality_wants_book(m))
            snprintf(m->name + used, sizeof m->name - used, "@%s", quality_base_name(o->book_text));
    }
}

static const struct part *find_part(int argc, char **argv)
{
    for (size_t i = 0; optind + 1 == argc && i < sizeof parts / sizeof *parts; i++)
        if (strcmp(argv[optind], parts[i].name) == 0)
            return &parts[i];
    fprintf(stderr, "kvq-bench: give one part of quality: formats, synthetic, captured, perplexity "
                    "or recall; see kvq-bench quality --help\n");
    return NULL;
}

static bool complete(const struct quality_options *o, const struct part *part)
{
    const char *lacks = NULL;
    bool recall = strcmp(part->name, "recall") == 0;
    bool captured = strcmp(part->name, "captured") == 0 && o->capture;
    if (!o->results)
        lacks = "--results FILE";
    else if (part->model && !captured && !o->model)
        lacks = "--model DIR";
    else if (part->model && !captured && !recall && !o->text)
        lacks = "--text FILE";
    else if (recall && !o->items)
        lacks = "--items FILE";
    if (lacks)
        fprintf(stderr, "kvq-bench: quality %s needs %s\n", part->name, lacks);
    return !lacks;
}

int quality_main(int argc, char **argv)
{
    static struct quality_options o;
    struct quality_results r;
    int rc = read_options(&o, argc, argv);
    if (rc)
        return rc > 0 ? 0 : 2;
    const struct part *part = find_part(argc, argv);
    if (!part || !complete(&o, part))
        return 2;
    openblas_set_num_threads(1);
    name_books(&o);
    if (!quality_results_open(&r, o.results))
        return 1;
    int status = part->run(&o, &r);
    quality_results_close(&r);
    return status;
}
