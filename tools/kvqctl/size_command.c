// SPDX-License-Identifier: Apache-2.0
// size: what sessions will take of memory, by the functions that the daemon keeps them by.
#include <cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/sizes.h"
#include "proto/format_hint.h"
#include "proto/json.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/model.h"

enum { SESSIONS = 3, MOST_FORMATS = 32 }; // of the limits of the command line; of --format

struct answer {
    const char *name; // as it was given, with its codebooks
    struct kvq_format format;
    struct kvq_shape shape;
    struct kvq_session_bytes one;
    uint64_t total, sessions;
    uint64_t next_page; // what its next 128 tokens take when they begin
};

// All options that are missing, "" if none is. In one of the buffers of kvq__ctl_text.
static const char *missing(const struct kvq__ctl_shape *asked)
{
    bool model = asked->model != NULL;
    return kvq__ctl_text("%s%s%s%s%s", asked->format ? "" : " --format NAME",
                         model || asked->layers ? "" : " --layers N",
                         model || asked->kv_heads ? "" : " --kv-heads N",
                         model || asked->head_dim ? "" : " --head-dim N",
                         asked->tokens ? "" : " --tokens N");
}

static int say_missing(const struct kvq__ctl_shape *asked, const char *lacks)
{
    bool shape = !asked->model && !(asked->layers && asked->kv_heads && asked->head_dim);
    fprintf(stderr,
            "kvqctl: size needs%s%s\n"
            "As in kvqctl size --model DIR --format kvq2 --tokens 32768 --sessions 8\n"
            "kvqctl size --help says more.\n",
            lacks,
            shape ? ". --model DIR (with a config.json) stands for the layers' numbers" : "");
    return KVQ_EXIT_USAGE;
}

// A name without its codebooks. What format list has as a source may hold one in the middle, as in
// vecinfer-2@mine+oscar2:sink=64. False: it is too long.
static bool without_books(const char *name, char plain[KVQ_FORMAT_NAME])
{
    size_t used = 0;
    for (bool book = false; *name; name++) {
        book = *name == '@' || (book && *name != '+' && *name != ':');
        if (!book && used + 1 == KVQ_FORMAT_NAME)
            return false;
        if (!book)
            plain[used++] = *name;
    }
    plain[used] = 0;
    return true;
}

// Codebooks change no size: they are left out.
static int find_format(const char *name, struct kvq_format *format, char *why, size_t n)
{
    char plain[KVQ_FORMAT_NAME];
    if (without_books(name, plain))
        return kvq_format_parse(plain, format, why, n);
    snprintf(why, n, "format name %.20s... is longer than %d bytes", name, KVQ_FORMAT_NAME - 1);
    return -1;
}

static int check_books(const char *name, const struct kvq_format *format, char *why, size_t n)
{
    const char *book = strchr(name, '@');
    if (!book || kvq_has_centroids(format))
        return 0;
    snprintf(why, n, "format %s has no use for a codebook; leave out '%.*s'", format->name,
             (int)strcspn(book, "+:"), book);
    return -1;
}

// The one that was meant may also be of a daemon's configuration.
static void add_known_formats(const char *name, char *why, size_t n)
{
    size_t used = strlen(why);
    kvq_format_hint(name, NULL, 0, why + used, n - used);
    used = strlen(why);
    snprintf(why + used, n - used,
             "\nkvqctl format list shows the formats. size asks no daemon: for a format of the "
             "daemon's configuration pass what that list shows under IS, or else under SOURCE, as "
             "in --format oscar4+kivi2:sink=64.");
}

// Its bytes with so many tokens more than were asked for.
static struct kvq_session_bytes bytes_of(const struct answer *a, const struct kvq__ctl_shape *asked,
                                         const struct kvq__ctl_model *model, uint64_t more)
{
    return kvq_session_bytes_of(&a->format, &a->shape, model->windows, model->layers,
                                asked->tokens + more, asked->rollback);
}

static int work_out(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model,
                    struct answer *a, char *why, size_t n)
{
    if (find_format(a->name, &a->format, why, n)) {
        add_known_formats(a->name, why, n);
        return -1;
    }
    if (check_books(a->name, &a->format, why, n))
        return -1;
    a->shape = (struct kvq_shape){.q_heads = (uint16_t)model->kv_heads,
                                  .kv_heads = (uint16_t)model->kv_heads,
                                  .dtype = a->format.raw_dtype ? a->format.raw_dtype : KVQ_F16,
                                  .scale = 1};
    kvq_shape_set_dims(&a->shape, (uint16_t)model->head_dim, (uint16_t)model->head_dim);
    if (kvq_shape_check(&a->shape, &a->format, why, n))
        return -1;
    a->one = bytes_of(a, &ctl->shape, model, 0);
    a->total = a->one.packed + a->one.window + a->one.books;
    a->next_page = 0;
    for (uint64_t more = 1; more <= KVQ_BLOCK_TOKENS; more++) {
        struct kvq_session_bytes then = bytes_of(a, &ctl->shape, model, more);
        uint64_t total = then.packed + then.window + then.books;
        a->next_page = total > a->total + a->next_page ? total - a->total : a->next_page;
    }
    a->sessions = ctl->quota.limit[SESSIONS] ? ctl->quota.limit[SESSIONS] : 1;
    uint64_t larger = a->total > a->one.plain ? a->total : a->one.plain;
    if (a->sessions <= UINT64_MAX / larger)
        return 0;
    snprintf(why, n,
             "%" PRIu64 " sessions take more bytes than a 64-bit number holds; ask for "
             "fewer",
             a->sessions);
    return -1;
}

// The layers of the model, or those of the command line, which are all alike.
static int find_layers(const struct kvq__ctl_shape *asked, struct kvq__ctl_model *model, char *why,
                       size_t n)
{
    if (asked->model)
        return kvq__ctl_read_model(asked->model, asked, model, why, n);
    *model = (struct kvq__ctl_model){asked->layers, asked->kv_heads, asked->head_dim, {0}};
    for (uint32_t i = 0; i < asked->layers; i++)
        model->windows[i] = asked->window;
    return 0;
}

// How many of them have a window; *window: tokens that they see.
static uint32_t count_sliding(const struct kvq__ctl_model *model, uint32_t *window)
{
    uint32_t n = 0;
    *window = 0;
    for (uint32_t i = 0; i < model->layers; i++) {
        n += model->windows[i] > 0;
        *window = model->windows[i] ? model->windows[i] : *window;
    }
    return n;
}

// Cuts a list at its commas, in place. The paper's spelling k<4,10>v<8,12> has some of its own.
// Returns how many names there are, 0 for too many.
static size_t split_formats(char *list, const char *names[MOST_FORMATS])
{
    size_t n = 0;
    bool inside = false;
    for (names[n++] = list; *list; list++) {
        inside = *list == '<' || (inside && *list != '>');
        if (*list != ',' || inside)
            continue;
        if (n == MOST_FORMATS)
            return 0;
        *list = 0;
        names[n++] = list + 1;
    }
    return n;
}

static void add_number(cJSON *json, const char *name, uint64_t value)
{
    cJSON_AddItemToObject(json, name, kvq_json_of_whole(value));
}

static cJSON *json_of(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model,
                      const struct answer *a)
{
    uint32_t window, sliding = count_sliding(model, &window);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "format", a->name);
    add_number(json, "layers", model->layers);
    add_number(json, "sliding_layers", sliding);
    add_number(json, "sliding_window", window);
    add_number(json, "kv_heads", model->kv_heads);
    add_number(json, "head_dim", model->head_dim);
    add_number(json, "tokens", ctl->shape.tokens);
    cJSON_AddNumberToObject(json, "bits_per_value", kvq_bits_per_value(&a->format, &a->shape));
    add_number(json, "packed_bytes", a->one.packed);
    add_number(json, "window_bytes", a->one.window);
    add_number(json, "table_bytes", a->one.books);
    add_number(json, "total_bytes", a->total);
    add_number(json, "next_page_bytes", a->next_page);
    add_number(json, "f16_bytes", a->one.plain);
    cJSON_AddNumberToObject(json, "compression", (double)a->one.plain / (double)a->total);
    cJSON_AddBoolToObject(json, "larger_than_f16", a->total > a->one.plain);
    add_number(json, "sessions", a->sessions);
    add_number(json, "all_block_bytes", a->sessions * (a->one.packed + a->one.window));
    add_number(json, "all_table_bytes", a->sessions * a->one.books);
    add_number(json, "all_f16_bytes", a->sessions * a->one.plain);
    return json;
}

// An object; an array for several formats.
static void print_json(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model,
                       const struct answer *answers, size_t n)
{
    cJSON *json = n > 1 ? cJSON_CreateArray() : json_of(ctl, model, answers);
    for (size_t i = 0; n > 1 && i < n; i++)
        cJSON_AddItemToArray(json, json_of(ctl, model, &answers[i]));
    kvq__ctl_print_and_free(json);
}

static void print_session(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model)
{
    uint32_t window, sliding = count_sliding(model, &window);
    printf("a session    %s, %s", kvq__ctl_count(ctl->shape.tokens, "token"),
           kvq__ctl_count(model->layers, "layer"));
    if (sliding)
        printf(" (%s%u with a window of %s)", sliding == model->layers ? "all " : "", sliding,
               kvq__ctl_count(window, "token"));
    printf(", %s of %u\n", kvq__ctl_count(model->kv_heads, "KV head"), model->head_dim);
}

// "5.05 times smaller" than the values in 16 bits.
static const char *compared(const struct answer *a)
{
    double times = (double)a->one.plain / (double)a->total;
    bool larger = a->total > a->one.plain;
    return kvq__ctl_text("%.2f times %s", larger ? 1 / times : times,
                         larger ? "LARGER" : "smaller");
}

static void print_answer(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model,
                         const struct answer *a)
{
    const struct kvq_session_bytes *one = &a->one;
    printf("format       %s, %.3f bits per value with parameters\n", kvq__ctl_clean(a->name),
           kvq_bits_per_value(&a->format, &a->shape));
    print_session(ctl, model);
    printf("packed       %s%s\n", kvq__ctl_bytes(one->packed),
           kvq_is_raw(&a->format) ? ", in 16 bits" : "");
    printf("window       %s, the newest tokens in 16 bits\n", kvq__ctl_bytes(one->window));
    printf("bookkeeping  %s\n", kvq__ctl_bytes(one->books));
    printf("total        %s, and up to %s more while its next 128 tokens come\n",
           kvq__ctl_bytes(a->total), kvq__ctl_bytes(a->next_page));
    printf("16 bits      %s for the values alone; the session is %s\n", kvq__ctl_bytes(one->plain),
           compared(a));
    printf("all          %s: %s of blocks, %s of bookkeeping; in 16 bits %s\n",
           kvq__ctl_count(a->sessions, "session"),
           kvq__ctl_bytes(a->sessions * (one->packed + one->window)),
           kvq__ctl_bytes(a->sessions * one->books), kvq__ctl_bytes(a->sessions * one->plain));
}

// A row for each format.
static void print_rows(const struct kvq__ctl *ctl, const struct kvq__ctl_model *model,
                       const struct answer *answers, size_t n)
{
    size_t width = 0;
    uint64_t sessions = answers[0].sessions;
    for (size_t i = 0; i < n; i++)
        width = strlen(answers[i].name) > width ? strlen(answers[i].name) : width;
    print_session(ctl, model);
    printf("16 bits      %s for the values alone; of %s %s\n\n",
           kvq__ctl_bytes(answers[0].one.plain), kvq__ctl_count(sessions, "session"),
           kvq__ctl_bytes(sessions * answers[0].one.plain));
    printf("%-*s  %6s  %10s  %10s  %11s  %10s  %10s  %s\n", (int)width, "FORMAT", "BITS", "PACKED",
           "WINDOW", "BOOKKEEPING", "TOTAL", "ALL BLOCKS", "AGAINST 16 BITS");
    for (size_t i = 0; i < n; i++) {
        const struct answer *a = &answers[i];
        const struct kvq_session_bytes *one = &a->one;
        printf("%-*s  %6.3f  %10s  %10s  %11s  %10s  %10s  %s\n", (int)width,
               kvq__ctl_clean(a->name), kvq_bits_per_value(&a->format, &a->shape),
               kvq__ctl_bytes(one->packed), kvq__ctl_bytes(one->window), kvq__ctl_bytes(one->books),
               kvq__ctl_bytes(a->total), kvq__ctl_bytes(sessions * (one->packed + one->window)),
               compared(a));
    }
}

static int answer_all(const struct kvq__ctl *ctl, char *list)
{
    struct kvq__ctl_model model;
    struct answer answers[MOST_FORMATS];
    const char *names[MOST_FORMATS];
    char why[1024];
    size_t n = split_formats(list, names);
    if (n == 0)
        return kvq__ctl_bad_usage(
            kvq__ctl_text("--format names more than %d formats; name fewer", MOST_FORMATS), NULL);
    int failed = find_layers(&ctl->shape, &model, why, sizeof why);
    for (size_t i = 0; i < n && !failed; i++) {
        answers[i].name = names[i];
        failed = work_out(ctl, &model, &answers[i], why, sizeof why);
    }
    if (failed) {
        fprintf(stderr, "kvqctl: %s\n", why);
        return KVQ_EXIT_USAGE;
    }
    if (ctl->json)
        print_json(ctl, &model, answers, n);
    else if (n == 1)
        print_answer(ctl, &model, answers);
    else
        print_rows(ctl, &model, answers, n);
    return KVQ_EXIT_OK;
}

int kvq__ctl_size(struct kvq__ctl *ctl, char **args)
{
    const char *lacks = missing(&ctl->shape);
    (void)args;
    if (*lacks)
        return say_missing(&ctl->shape, lacks);
    if (ctl->quota.which & 1u << SESSIONS && !ctl->quota.limit[SESSIONS]) // of quota set: no limit
        return kvq__ctl_bad_usage("--sessions is at least 1 for size, not 0 or none", NULL);
    char *list = strdup(ctl->shape.format);
    int result = list ? answer_all(ctl, list) : KVQ_EXIT_FAILED;
    if (!list)
        fprintf(stderr, "kvqctl: no memory for the names of formats\n");
    free(list);
    return result;
}
