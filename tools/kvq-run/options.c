// SPDX-License-Identifier: Apache-2.0
//
// One table of options for parsing and for the help.
#include "tools/kvq-run/options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvq.h"
#include "kernels/kernels.h"

enum kind { STRING, COUNT, BIG, REAL, FLAG, ATTENTION, ROTATION };
enum { G = 1 << COMMAND_GENERATE, P = 1 << COMMAND_PERPLEXITY, L = 1 << COMMAND_LOGITS };

struct option_row {
    const char *name, *value, *help;
    uint8_t commands, kind;
    size_t offset;
    double least, most;
};

#define AT(field) offsetof(struct options, field)

static const struct option_row rows[] = {
    {"model", "DIR", "directory with config.json and *.safetensors ($KVQ_MODEL)", G | P | L, STRING,
     AT(model), 0, 0},
    {"format", "F", "format of the cache: f16, bf16, kvq2, oscar2, oscar3, oscar4, .. (kvq2)",
     G | P | L, STRING, AT(format), 0, 0},
    {"attention", "KIND", "default (the daemon's choice), exact or fast", G | P | L, ATTENTION,
     AT(attention), 0, 0},
    {"v-rotation", "KIND",
     "who rotates V: engine (in the weights), daemon or none (engine where the "
     "format's paper does)",
     G | P | L, ROTATION, AT(v_rotation), 0, 0},
    {"in-context", NULL, "attend in this process, over the daemon's memory", G | P | L, FLAG,
     AT(in_context), 0, 0},
    {"runtime-dir", "DIR", "where kvqd listens (else $KVQ_RUNTIME_DIR, else as kvqctl)", G | P | L,
     STRING, AT(runtime_dir), 0, 0},
    {"prompt", "TEXT", "text of the prompt", G | L, STRING, AT(prompt), 0, 0},
    {"prompt-file", "FILE", "file with the text of the prompt", G | L, STRING, AT(prompt_file), 0,
     0},
    {"ids", "LIST", "token ids of the prompt, separated by commas", G | L, STRING, AT(ids), 0, 0},
    {"tokens", "N", "tokens to generate (256)", G, COUNT, AT(tokens), 0, 1 << 24},
    {"temperature", "T", "of the sampling; 0: the likeliest token (0.8)", G, REAL, AT(temperature),
     0, 100},
    {"top-p", "P", "sample from the likeliest tokens with this share of probability (0.95)", G,
     REAL, AT(top_p), 0, 1},
    {"seed", "N", "seed of the sampling (1)", G, BIG, AT(seed), 0, 9e15},
    {"session", "NAME", "named session; goes on behind its tokens if it exists", G, STRING,
     AT(session), 0, 0},
    {"namespace", "NS", "namespace of the session (uid-N)", G, STRING, AT(ns), 0, 0},
    {"prefix", NULL, "share the prefix of the prompt with other sessions", G, FLAG, AT(prefix), 0,
     0},
    {"wait-room", "S", "seconds to wait for the daemon's memory (0: fail at once)", G, BIG,
     AT(wait_room), 0, 1e6},
    {"keep", NULL, "keep the named session when this program ends", G, FLAG, AT(keep), 0, 0},
    {"against", "F", "reference format (f16)", P, STRING, AT(against), 0, 0},
    {"text", "FILE", "held-out text", P, STRING, AT(text), 0, 0},
    {"bytes", "N", "read at most N bytes of the text (262144; 0: all)", P, BIG, AT(bytes), 0, 1e15},
    {"context", "N", "tokens of one session, from an empty cache (4096)", P, COUNT, AT(context), 2,
     1 << 24},
    {"pause-at", "N", "after N bytes of text: save both sessions, wait for a line, connect again",
     P, COUNT, AT(pause_at), 1, 1 << 30},
    {"step", "N", "tokens of one step (16)", P, COUNT, AT(step), 1, 512},
    {"top", "N", "show the N likeliest tokens (8)", L, COUNT, AT(top), 1, 1 << 20},
    {"capture", "FILE", "write the appended K, V and Q to a file", G | P, STRING, AT(capture), 0,
     0},
    {"capture-tokens", "N", "capture at most N tokens (8192; 0: all)", G | P, BIG,
     AT(capture_tokens), 0, 9e15},
    {"json", NULL, "one JSON object on standard output", G | P | L, FLAG, AT(json), 0, 0},
    {"quiet", NULL, "no progress on standard error", G | P | L, FLAG, AT(quiet), 0, 0},
};
enum { N_ROWS = sizeof rows / sizeof *rows };

static const char *const commands[] = {"generate", "perplexity", "logits"};
static const char *const about[] = {
    "write text (or token ids) from a prompt, the KV cache and attention in kvqd",
    "compare a format with another, token by token, over held-out text",
    "logits of the last token of a prompt, for tests",
};

static void help_rows(uint8_t command)
{
    for (int i = 0; i < N_ROWS; i++) {
        if (!(rows[i].commands & 1 << command))
            continue;
        char left[48];
        snprintf(left, sizeof left, "--%s %s", rows[i].name, rows[i].value ? rows[i].value : "");
        printf("  %-22s %s\n", left, rows[i].help);
    }
}

void options_help(uint8_t command)
{
    if (command <= COMMAND_LOGITS) {
        printf("kvq-run %s: %s\n\nusage: kvq-run %s --model DIR [options]\n\n", commands[command],
               about[command], commands[command]);
        help_rows(command);
        return;
    }
    printf("kvq-run: runs Llama-family models with their KV cache in kvqd\n\n"
           "usage: kvq-run COMMAND [options]\n\n");
    for (int i = 0; i <= COMMAND_LOGITS; i++)
        printf("  %-12s %s\n", commands[i], about[i]);
    printf("\n'kvq-run COMMAND --help' lists a command's options.\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage, 3 no daemon there.\n");
}

static int set_number(const struct option_row *r, const char *text, struct options *o,
                      struct problem *p)
{
    char *end;
    errno = 0;
    double d = strtod(text, &end);
    bool whole = r->kind != REAL;
    if (errno || end == text || *end || !(d >= r->least && d <= r->most) ||
        (whole && d != floor(d)))
        return problem_set(p, RUN_USAGE, "--%s %s: must be a%s number from %g to %g", r->name, text,
                           whole ? " whole" : "", r->least, r->most);
    void *at = (char *)o + r->offset;
    if (r->kind == COUNT)
        *(uint32_t *)at = (uint32_t)d;
    else if (r->kind == BIG)
        *(uint64_t *)at = (uint64_t)d;
    else
        *(double *)at = d;
    return 0;
}

static int set_word(const struct option_row *r, const char *text, struct options *o,
                    struct problem *p)
{
    static const char *const attention[] = {"default", "exact", "fast"};
    static const char *const rotation[] = {"default", "engine", "daemon", "none"};
    const char *const *words = r->kind == ATTENTION ? attention : rotation;
    for (int i = 0; i < (r->kind == ATTENTION ? 3 : 4); i++)
        if (!strcmp(words[i], text)) {
            *((uint8_t *)o + r->offset) = (uint8_t)i;
            return 0;
        }
    return problem_set(p, RUN_USAGE, "--%s %s: must be %s", r->name, text,
                       r->kind == ATTENTION ? "default, exact or fast"
                                            : "default, engine, daemon or none");
}

static int set(const struct option_row *r, const char *text, struct options *o, struct problem *p)
{
    void *at = (char *)o + r->offset;
    if (r->kind == STRING)
        *(const char **)at = text;
    else if (r->kind == FLAG)
        *(bool *)at = true;
    else if (r->kind == ATTENTION || r->kind == ROTATION)
        return set_word(r, text, o, p);
    else
        return set_number(r, text, o, p);
    return 0;
}

static int parse_rows(int argc, char **argv, struct options *o, struct problem *p)
{
    struct option list[N_ROWS + 2] = {0};
    int n = 0;
    for (int i = 0; i < N_ROWS; i++)
        if (rows[i].commands & 1 << o->command)
            list[n++] = (struct option){
                rows[i].name, rows[i].value ? required_argument : no_argument, NULL, 1000 + i};
    list[n] = (struct option){"help", no_argument, NULL, 'h'};
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, ":h", list, NULL)) != -1;) {
        if (c == 'h') {
            options_help(o->command);
            o->command = COMMAND_HELP;
            return 0;
        }
        if (c < 1000)
            return problem_set(p, RUN_USAGE, "%s: %s; see 'kvq-run %s --help'", argv[optind - 1],
                               c == ':' ? "its value is missing" : "no such option",
                               commands[o->command]);
        if (set(&rows[c - 1000], optarg, o, p))
            return -1;
    }
    if (optind < argc)
        return problem_set(p, RUN_USAGE, "'%s' is no option; see 'kvq-run %s --help'", argv[optind],
                           commands[o->command]);
    return 0;
}

static int check(const struct options *o, struct problem *p)
{
    if (!o->model)
        return problem_set(p, RUN_USAGE, "--model DIR is missing (or set KVQ_MODEL)");
    if (!!o->prompt + !!o->prompt_file + !!o->ids > 1)
        return problem_set(p, RUN_USAGE, "give one of --prompt, --prompt-file and --ids");
    if (o->command == COMMAND_PERPLEXITY && !o->text)
        return problem_set(p, RUN_USAGE, "--text FILE is missing");
    if (o->capture && o->v_rotation == KVQ_V_ROTATION_ENGINE)
        return problem_set(p, RUN_USAGE,
                           "--capture takes V as the model makes it; use --v-rotation "
                           "daemon or none with it");
    if (o->keep && !o->session)
        return problem_set(p, RUN_USAGE, "--keep needs --session NAME");
    return 0;
}

static bool rotates(const char *format, bool *raw)
{
    struct kvq_format f;
    char text[256];
    if (kvq_format_parse(format, &f, text, sizeof text))
        return *raw = false; // a name of the daemon's configuration
    *raw = kvq_is_raw(&f);
    return kvq_v_rotation_by_paper(&f) == KVQ_V_ROT_DAEMON;
}

bool options_fold(const struct options *o, uint32_t head_dim)
{
    bool raw, with = o->command == COMMAND_PERPLEXITY;
    if (o->v_rotation)
        return o->v_rotation == KVQ_V_ROTATION_ENGINE;
    if (o->capture || !rotates(o->format, &raw) || kvq_stored_dim(head_dim) != head_dim)
        return false;
    return !with || rotates(o->against, &raw) || raw;
}

int options_parse(int argc, char **argv, struct options *o, struct problem *p)
{
    *o = (struct options){
        .model = getenv("KVQ_MODEL"),
        .format = "kvq2",
        .against = "f16",
        .tokens = 256,
        .temperature = 0.8,
        .top_p = 0.95,
        .seed = 1,
        .bytes = 256 * 1024,
        .context = 4096,
        .step = 16,
        .top = 8,
        .capture_tokens = 8192,
    };
    const char *word = argc > 1 ? argv[1] : "--help";
    if (!strcmp(word, "--help") || !strcmp(word, "-h") || !strcmp(word, "help")) {
        o->command = COMMAND_HELP;
        options_help(COMMAND_HELP);
        return 0;
    }
    if (!strcmp(word, "--version")) {
        o->command = COMMAND_VERSION;
        return 0;
    }
    uint8_t i = 0;
    while (i <= COMMAND_LOGITS && strcmp(word, commands[i]))
        i++;
    if (i > COMMAND_LOGITS)
        return problem_set(p, RUN_USAGE, "'%s' is no command; see 'kvq-run --help'", word);
    o->command = i;
    if (parse_rows(argc - 1, argv + 1, o, p))
        return -1;
    return o->command == COMMAND_HELP ? 0 : check(o, p);
}
