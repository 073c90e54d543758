// SPDX-License-Identifier: Apache-2.0
// size: what sessions will take of memory, by the functions that the daemon keeps them by.
#include <cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/sizes.h"
#include "proto/format_hint.h"
#include "proto/json.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"

enum { SESSIONS = 3 }; // of the limits of the command line

struct answer {
    struct kvq_format format;
    struct kvq_shape shape;
    struct kvq_session_bytes one;
    uint64_t total, sessions;
    uint64_t next_page; // what its next 128 tokens take when they begin
};

// All options that are missing, "" if none is. In one of the buffers of kvq__ctl_text.
static const char *missing(const struct kvq__ctl_shape *asked)
{
    return kvq__ctl_text("%s%s%s%s%s", asked->format ? "" : " --format NAME",
                         asked->layers ? "" : " --layers N", asked->kv_heads ? "" : " --kv-heads N",
                         asked->head_dim ? "" : " --head-dim N",
                         asked->tokens ? "" : " --tokens N");
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

static int work_out(const struct kvq__ctl *ctl, struct answer *a, char *why, size_t n)
{
    const struct kvq__ctl_shape *asked = &ctl->shape;
    if (find_format(asked->format, &a->format, why, n)) {
        add_known_formats(asked->format, why, n);
        return -1;
    }
    if (check_books(asked->format, &a->format, why, n))
        return -1;
    a->shape = (struct kvq_shape){.q_heads = (uint16_t)asked->kv_heads,
                                  .kv_heads = (uint16_t)asked->kv_heads,
                                  .window = asked->window,
                                  .dtype = a->format.raw_dtype ? a->format.raw_dtype : KVQ_F16,
                                  .scale = 1};
    kvq_shape_set_dims(&a->shape, (uint16_t)asked->head_dim, (uint16_t)asked->head_dim);
    if (kvq_shape_check(&a->shape, &a->format, why, n))
        return -1;
    a->one =
        kvq_session_bytes_of(&a->format, &a->shape, asked->layers, asked->tokens, asked->rollback);
    a->total = a->one.packed + a->one.window + a->one.books;
    a->next_page = 0;
    for (uint64_t n = 1; n <= KVQ_BLOCK_TOKENS; n++) {
        struct kvq_session_bytes then = kvq_session_bytes_of(&a->format, &a->shape, asked->layers,
                                                             asked->tokens + n, asked->rollback);
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

static void add_number(cJSON *json, const char *name, uint64_t value)
{
    cJSON_AddItemToObject(json, name, kvq_json_of_whole(value));
}

static void print_json(const struct kvq__ctl *ctl, const struct answer *a)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "format", ctl->shape.format);
    add_number(json, "layers", ctl->shape.layers);
    add_number(json, "kv_heads", ctl->shape.kv_heads);
    add_number(json, "head_dim", ctl->shape.head_dim);
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
    kvq__ctl_print_and_free(json);
}

static void print_answer(const struct kvq__ctl *ctl, const struct answer *a)
{
    const struct kvq__ctl_shape *s = &ctl->shape;
    const struct kvq_session_bytes *one = &a->one;
    bool larger = a->total > one->plain;
    double times = (double)one->plain / (double)a->total;
    printf("format       %s, %.3f bits per value with parameters\n", kvq__ctl_clean(s->format),
           kvq_bits_per_value(&a->format, &a->shape));
    printf("a session    %s, %s, %s of %u\n", kvq__ctl_count(s->tokens, "token"),
           kvq__ctl_count(s->layers, "layer"), kvq__ctl_count(s->kv_heads, "KV head"), s->head_dim);
    printf("packed       %s%s\n", kvq__ctl_bytes(one->packed),
           kvq_is_raw(&a->format) ? ", in 16 bits" : "");
    printf("window       %s, the newest tokens in 16 bits\n", kvq__ctl_bytes(one->window));
    printf("bookkeeping  %s\n", kvq__ctl_bytes(one->books));
    printf("total        %s, and up to %s more while its next 128 tokens come\n",
           kvq__ctl_bytes(a->total), kvq__ctl_bytes(a->next_page));
    printf("16 bits      %s for the values alone; the session is %.2f times %s\n",
           kvq__ctl_bytes(one->plain), larger ? 1 / times : times, larger ? "LARGER" : "smaller");
    printf("all          %s: %s of blocks, %s of bookkeeping; in 16 bits %s\n",
           kvq__ctl_count(a->sessions, "session"),
           kvq__ctl_bytes(a->sessions * (one->packed + one->window)),
           kvq__ctl_bytes(a->sessions * one->books), kvq__ctl_bytes(a->sessions * one->plain));
}

int kvq__ctl_size(struct kvq__ctl *ctl, char **args)
{
    struct answer answer;
    char why[512];
    const char *lacks = missing(&ctl->shape);
    (void)args;
    if (*lacks)
        return kvq__ctl_bad_usage("size needs", lacks + 1);
    if (ctl->quota.which & 1u << SESSIONS && !ctl->quota.limit[SESSIONS]) // of quota set: no limit
        return kvq__ctl_bad_usage("--sessions is at least 1 for size, not 0 or none", NULL);
    if (work_out(ctl, &answer, why, sizeof why)) {
        fprintf(stderr, "kvqctl: %s\n", why);
        return KVQ_EXIT_USAGE;
    }
    if (ctl->json)
        print_json(ctl, &answer);
    else
        print_answer(ctl, &answer);
    return KVQ_EXIT_OK;
}
