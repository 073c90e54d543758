// SPDX-License-Identifier: Apache-2.0
//
// Sections [format NAME] of the configuration file. What one line says is checked at that line;
// what depends on several, when the whole file has been read.
#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/internal.h"
#include "proto/format_hint.h"
#include "proto/status.h"

enum { KEYS = KVQ_CONFIG_FORMAT_LAYERS + 1, WHY = 320, HINT = 96 };

static const char *const keys[KEYS] = {"base", "k", "v", "layers"};
static const char nowhere[] = "";

// ---- Names ----

// Whether a name is one of the table, or begins with one and '-', as those with suffixes do.
static bool is_built_in(const char *name)
{
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        size_t n = strlen(f->name);
        if (strncmp(f->name, name, n) == 0 && (name[n] == '\0' || name[n] == '-'))
            return true;
    }
    return strncmp(name, "vecinfer-", 9) == 0;
}

static struct kvq_config_format *find_own_format(struct kvq_config *config, const char *name)
{
    for (uint32_t i = 0; i < config->n_formats; i++)
        if (strcmp(config->own_formats[i].name, name) == 0)
            return &config->formats[i];
    return NULL;
}

const struct kvq__own_format *kvq__config_own_format(const struct kvq_config *config,
                                                     const char *name)
{
    size_t n = strcspn(name, "@");
    for (uint32_t i = 0; i < config->n_formats; i++) {
        const char *own = config->own_formats[i].name;
        if (strlen(own) == n && memcmp(own, name, n) == 0)
            return &config->own_formats[i];
    }
    return NULL;
}

static int check_format_name(const char *name, char *text)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strspn(name, allowed);
    if (n == 0 || name[n] || !isalnum((unsigned char)name[0]))
        return kvq__config_refuse(text, nowhere,
                                  "[format %.48s]: a name is 1 to 40 letters, digits, '.', '_' and "
                                  "'-', and begins with a letter or digit",
                                  name);
    if (is_built_in(name))
        return kvq__config_refuse(text, nowhere,
                                  "[format %.48s]: the name is a built-in format's, or begins as "
                                  "one with a suffix does; choose another, as in my-%.40s",
                                  name, name);
    return 0;
}

static struct kvq_config_format *find_or_make(struct kvq_config *config, const char *name,
                                              char *text)
{
    struct kvq_config_format *f = find_own_format(config, name);
    assert(config->n_formats <= KVQ_MAX_OWN_FORMATS);
    if (f || check_format_name(name, text))
        return f;
    if (config->n_formats == KVQ_MAX_OWN_FORMATS) {
        kvq__config_refuse(text, nowhere, "more than %d formats", KVQ_MAX_OWN_FORMATS);
        return NULL;
    }
    struct kvq__own_format *own = &config->own_formats[config->n_formats];
    f = &config->formats[config->n_formats++];
    memset(own, 0, sizeof *own);
    memset(f, 0, sizeof *f);
    snprintf(own->name, sizeof own->name, "%s", name);
    return f;
}

// ---- Rows by name ----

// "FORMAT" or "FORMAT@CODEBOOK": the row, under its whole name.
static int parse_row(const char *key, const char *name, struct kvq_format *row, char *text)
{
    char format[KVQ_FORMAT_NAME], why[WHY], hint[HINT];
    size_t n = strcspn(name, "@");
    if (strlen(name) >= sizeof format)
        return kvq__config_refuse(text, nowhere, "%s: \"%.70s..\" is longer than %d characters",
                                  key, name, KVQ_FORMAT_NAME - 1);
    snprintf(format, sizeof format, "%.*s", (int)n, name);
    if (kvq_format_parse(format, row, why, sizeof why) == 0) {
        bool books = kvq_has_centroids(row);
        snprintf(row->name, sizeof row->name, "%s", name);
        if (books || !name[n])
            return 0;
        return kvq__config_refuse(text, nowhere, "%s: format %s has no use for a codebook", key,
                                  format);
    }
    kvq_format_hint(format, NULL, 0, hint, sizeof hint);
    return kvq__config_refuse(text, nowhere, "%s: %s%s", key, why, hint);
}

// ---- layers = 0-1:k8v4, 2-31:oscar2 ----

// "N:" or "N-M:" at the front, maybe with blanks around the colon: what follows, or NULL.
static const char *take_range(const char *at, unsigned long *first, unsigned long *last)
{
    char *end;
    if (!isdigit((unsigned char)*at))
        return NULL;
    *first = *last = strtoul(at, &end, 10);
    if (*end == '-' && isdigit((unsigned char)end[1]))
        *last = strtoul(end + 1, &end, 10);
    end += strspn(end, " \t");
    return *end == ':' ? end + 1 + strspn(end + 1, " \t") : NULL;
}

// The comma that ends an element: formats such as vecinfer-k<4,10>v<8,12> hold some, too.
static const char *end_of(const char *at)
{
    unsigned long first, last;
    for (const char *comma = strchr(at, ','); comma; comma = strchr(comma + 1, ','))
        if (comma[1 + strspn(comma + 1, " \t")] == '\0' ||
            take_range(comma + 1 + strspn(comma + 1, " \t"), &first, &last))
            return comma;
    return at + strlen(at);
}

static int check_layer_range(const struct kvq__own_format *own, unsigned long first,
                             unsigned long last, char *text)
{
    if (first > last || last >= KVQ_MAX_LAYERS)
        return kvq__config_refuse(text, nowhere,
                                  "layers %lu-%lu: layers are numbered from 0 to %d, the lower "
                                  "number first",
                                  first, last, KVQ_MAX_LAYERS - 1);
    for (uint32_t i = 0; i < own->n_ranges; i++)
        if (first <= own->ranges[i].last && last >= own->ranges[i].first)
            return kvq__config_refuse(text, nowhere,
                                      "layers %lu-%lu: they overlap with %u-%u; name each layer "
                                      "once",
                                      first, last, own->ranges[i].first, own->ranges[i].last);
    if (own->n_ranges == KVQ_MAX_FORMAT_RANGES)
        return kvq__config_refuse(text, nowhere, "layers: more than %d ranges; use `base` for most",
                                  KVQ_MAX_FORMAT_RANGES);
    return 0;
}

// One element without its comma. A format of this file must stand above.
static int add_format_range(struct kvq_config *config, struct kvq__own_format *own,
                            const char *element, char *text)
{
    unsigned long first, last;
    struct kvq_format row = {0};
    const char *name = take_range(element, &first, &last);
    if (!name)
        return kvq__config_refuse(text, nowhere,
                                  "layers: \"%.64s\" is not LAYER:FORMAT or FIRST-LAST:FORMAT, as "
                                  "in 0-1:k8v4, 2-31:oscar2",
                                  element);
    int error = check_layer_range(own, first, last, text);
    if (error == 0 && find_own_format(config, name))
        snprintf(row.name, sizeof row.name, "%s", name);
    else if (error == 0)
        error = parse_row("layers", name, &row, text);
    if (error == 0)
        own->ranges[own->n_ranges++] =
            (struct kvq__layer_range){(uint32_t)first, (uint32_t)last, row};
    return error;
}

static int add_layers_option(struct kvq_config *config, struct kvq__own_format *own,
                             const char *value, char *text)
{
    char element[256];
    int error = 0;
    for (const char *at = value + strspn(value, " \t"); *at && error == 0;) {
        const char *end = end_of(at);
        int length = (int)(end - at);
        while (length && (at[length - 1] == ' ' || at[length - 1] == '\t'))
            length--;
        snprintf(element, sizeof element, "%.*s", length, at);
        error = add_format_range(config, own, element, text);
        at = *end ? end + 1 : end;
        at += strspn(at, " \t");
    }
    if (error == 0 && own->n_ranges == 0)
        error = kvq__config_refuse(text, nowhere, "layers is empty; give FIRST-LAST:FORMAT, ..");
    return error;
}

// ---- Lines ----

static int refuse_format_key(const char *section, const char *name, char *text)
{
    char why[WHY];
    struct kvq_format f = *kvq_format_by_name("oscar2");
    char change[96];
    snprintf(change, sizeof change, "%.64s=", name);
    kvq_format_change(&f, change, why, sizeof why); // says which stages there are
    return kvq__config_refuse(text, nowhere,
                              "%.64s is not known in [%.64s]; known are base, k, v, layers; and %s",
                              name, section, why);
}

// A stage is tried on a row that has all of them; whether they go together is seen at the end.
static int add_stage(struct kvq_config_format *f, const char *section, const char *name,
                     const char *value, char *text)
{
    struct kvq_format any = *kvq_format_by_name("oscar2");
    char change[160], why[WHY];
    size_t used = strlen(f->stages);
    int stage = kvq_format_stage(name, strlen(name));
    assert(used < sizeof f->stages);
    if (stage < 0)
        return refuse_format_key(section, name, text);
    if (f->stages_set & 1ull << stage)
        return kvq__config_refuse(text, nowhere, "%.64s is set twice; set it once", name);
    f->stages_set |= 1ull << stage;
    int n = snprintf(change, sizeof change, "%.40s=%.80s", name, value);
    if (strchr(value, ':') || kvq_format_change(&any, change, why, sizeof why))
        return kvq__config_refuse(text, nowhere, "%s",
                                  strchr(value, ':') ? "a stage's value holds no ':'" : why);
    if (used + (size_t)n + 1 >= sizeof f->stages)
        return kvq__config_refuse(text, nowhere, "more stages than a format has");
    snprintf(f->stages + used, sizeof f->stages - used, "%s%s", used ? ":" : "", change);
    return 0;
}

int kvq__config_format_begin(struct kvq_config *config, const char *name, char *text)
{
    return find_or_make(config, name, text) ? 0 : KVQ_E_INVALID;
}

int kvq__config_format_line(struct kvq_config *config, const char *section, const char *name,
                            const char *value, char *text)
{
    struct kvq_config_format *f = find_or_make(config, section + strlen("format "), text);
    struct kvq_format row;
    int key = 0;
    if (!f)
        return KVQ_E_INVALID;
    while (key < KEYS && !kvq__same_name(keys[key], name))
        key++;
    if (key == KEYS)
        return add_stage(f, section, name, value, text);
    assert((size_t)(f - config->formats) < config->n_formats);
    if (key == KVQ_CONFIG_FORMAT_LAYERS)
        return add_layers_option(config, &config->own_formats[f - config->formats], value, text);
    if (f->names[key][0])
        return kvq__config_refuse(text, nowhere, "%s is set twice; set it once", keys[key]);
    int error = parse_row(keys[key], value, &row, text);
    if (error == 0)
        snprintf(f->names[key], sizeof f->names[key], "%s", value);
    return error;
}

// ---- The whole ----

// K of `k` and V of `v`, whose codebooks must be one.
static int join_stages(struct kvq_format *row, const char *k, const char *v, char *text)
{
    struct kvq_format second;
    char why[WHY];
    if (parse_row("k", k, row, text) || parse_row("v", v, &second, text))
        return KVQ_E_INVALID;
    if (strcmp(k, v) == 0)
        return 0;
    const char *books[] = {strchr(k, '@'), strchr(v, '@')};
    if (books[0] && books[1] && strcmp(books[0], books[1]) != 0)
        return kvq__config_refuse(text, nowhere, "a layer has one codebook, not %s and %s",
                                  books[0] + 1, books[1] + 1);
    if (kvq_format_join(row, &second, why, sizeof why))
        return kvq__config_refuse(text, nowhere, "%s", why);
    return 0;
}

// Under the format's own name, with the codebook that its parts name.
static int set_name(struct kvq__own_format *own, const char *k, const char *v, char *text)
{
    const char *book = strchr(k, '@') ? strchr(k, '@') : strchr(v, '@');
    size_t length = strlen(own->name), more = strlen(book ? book : "");
    if (length + more >= sizeof own->rest.name)
        return kvq__config_refuse(text, nowhere, "the name with %s is longer than %d characters",
                                  book, KVQ_FORMAT_NAME - 1);
    memcpy(own->rest.name, own->name, length + 1);
    memcpy(own->rest.name + length, book ? book : "", more + 1);
    return 0;
}

static int compose(struct kvq_config_format *f, struct kvq__own_format *own, char *text)
{
    char why[WHY];
    const char *base = f->names[KVQ_CONFIG_FORMAT_BASE], *k = f->names[KVQ_CONFIG_FORMAT_K];
    const char *v = f->names[KVQ_CONFIG_FORMAT_V];
    assert(own->name[0]);
    own->has_rest = *base || *k || *v;
    if (!own->has_rest && (f->stages[0] || own->n_ranges == 0))
        return kvq__config_refuse(text, nowhere,
                                  "it says neither `base` nor `k` and `v`; stages change a format");
    if (!own->has_rest)
        return 0;
    k = *k ? k : base;
    v = *v ? v : base;
    if (!*k || !*v)
        return kvq__config_refuse(text, nowhere, "it has `%s` alone; give `%s`, too, or `base`",
                                  *k ? "k" : "v", *k ? "v" : "k");
    int error = join_stages(&own->rest, k, v, text);
    error = error ? error : set_name(own, k, v, text);
    snprintf(f->composition, sizeof f->composition, "%s%s%s%s%s", k, strcmp(k, v) ? "+" : "",
             strcmp(k, v) ? v : "", f->stages[0] ? ":" : "", f->stages);
    own->rest.source = f->composition;
    if (error == 0 && f->stages[0] &&
        kvq_format_change(&own->rest, f->stages, why, sizeof why) != 0)
        error = kvq__config_refuse(text, nowhere, "%s", why);
    if (error == 0 && kvq_format_check(&own->rest, why, sizeof why) != 0)
        error = kvq__config_refuse(text, nowhere, "%s", why);
    return error;
}

// Ranges that name a format of this file get its row.
static int link_ranges(struct kvq_config *config, struct kvq__own_format *own, char *text)
{
    assert(own->n_ranges <= KVQ_MAX_FORMAT_RANGES);
    for (uint32_t i = 0; i < own->n_ranges; i++) {
        struct kvq_format *row = &own->ranges[i].row;
        const struct kvq_config_format *f = find_own_format(config, row->name);
        if (!f)
            continue;
        const struct kvq__own_format *other = &config->own_formats[f - config->formats];
        if (other->n_ranges)
            return kvq__config_refuse(text, nowhere,
                                      "layers: %s differs from layer to layer itself; name what "
                                      "each layer has",
                                      row->name);
        *row = other->rest;
    }
    return 0;
}

int kvq__config_formats_end(struct kvq_config *config, uint32_t first, const char **failed,
                            char *text)
{
    int error = 0;
    for (uint32_t i = first; i < config->n_formats && error == 0; i++) {
        *failed = config->own_formats[i].name;
        error = compose(&config->formats[i], &config->own_formats[i], text);
    }
    for (uint32_t i = first; i < config->n_formats && error == 0; i++) {
        *failed = config->own_formats[i].name;
        error = link_ranges(config, &config->own_formats[i], text);
    }
    return error;
}
