// SPDX-License-Identifier: Apache-2.0
//
// See change.h.
#include "daemon/config/change.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/internal.h"
#include "proto/status.h"

// ---- Options ----

bool kvq__config_option(const struct kvq_config *config, uint32_t number,
                        struct kvq__option_text *out)
{
    const struct kvq__option *o = &kvq__options[number];
    assert(number < KVQ_CONFIG_OPTIONS);
    if (!o->name)
        return false;
    out->name = kvq__option_name(o);
    kvq__source_name(config, number, out->source, sizeof out->source);
    out->live = o->when == KVQ_OPTION_LIVE;
    kvq__option_value(out->value, sizeof out->value, config, o);
    kvq__option_initial(out->initial, sizeof out->initial, o);
    return true;
}

int kvq__config_find(const char *name, char *text)
{
    const struct kvq__option *o = kvq__option_find(name);
    if (o)
        return (int)(o - kvq__options);
    const char *nearest = kvq__option_nearest(name);
    return kvq__config_refuse(text, "config", "%.64s is not known; %s%s", name,
                              nearest ? "the nearest is " : "kvqctl config get lists all options",
                              nearest ? nearest : "");
}

int kvq__config_set(struct kvq_config *config, const char *name, const char *value, char *text)
{
    int number = kvq__config_find(name, text);
    if (number < 0)
        return number;
    const struct kvq__option *o = &kvq__options[number];
    if (o->when != KVQ_OPTION_LIVE)
        return kvq__config_refuse(text, kvq__option_name(o),
                                  "takes effect only when kvqd starts; set it in the "
                                  "configuration and restart kvqd");
    return kvq__option_set(config, o, KVQ_FROM_COMMAND, "config set", value, text);
}

// ---- Differences ----

typedef void tell_change(void *context, const struct kvq__config_change *change);

static void compare_options(const struct kvq_config *a, const struct kvq_config *b,
                            tell_change *tell, void *context, struct kvq__config_change *c)
{
    for (const struct kvq__option *o = kvq__options; o->name; o++) {
        kvq__option_value(c->before, sizeof c->before, a, o);
        kvq__option_value(c->after, sizeof c->after, b, o);
        if (strcmp(c->before, c->after) == 0)
            continue;
        snprintf(c->name, sizeof c->name, "%s", kvq__option_name(o));
        c->live = o->when == KVQ_OPTION_LIVE;
        tell(context, c);
    }
}

static const struct kvq_config_namespace *find_section(const struct kvq_config *config,
                                                       const char *name)
{
    for (uint32_t i = 0; i < config->n_namespaces; i++)
        if (strcmp(config->namespaces[i].name, name) == 0)
            return &config->namespaces[i];
    return NULL;
}

static void tell_section(const char *kind, const char *name, const char *before, const char *after,
                         tell_change *tell, void *context, struct kvq__config_change *c)
{
    snprintf(c->name, sizeof c->name, "[%s %.128s]", kind, name);
    snprintf(c->before, sizeof c->before, "%s", before);
    snprintf(c->after, sizeof c->after, "%s", after);
    tell(context, c);
}

static void compare_keys(const struct kvq_config *a, const struct kvq_config *b,
                         const struct kvq_config_namespace *was,
                         const struct kvq_config_namespace *is, tell_change *tell, void *context,
                         struct kvq__config_change *c)
{
    const char *key;
    c->live = true;
    for (unsigned i = 0; (key = kvq__namespace_key(i)); i++) {
        kvq__namespace_value(c->before, sizeof c->before, a, was, i);
        kvq__namespace_value(c->after, sizeof c->after, b, is, i);
        if (strcmp(c->before, c->after) == 0)
            continue;
        snprintf(c->name, sizeof c->name, "[namespace %.128s] %s", is->name, key);
        tell(context, c);
    }
}

static void compare_namespaces(const struct kvq_config *a, const struct kvq_config *b,
                               tell_change *tell, void *context, struct kvq__config_change *c)
{
    for (uint32_t i = 0; i < b->n_namespaces; i++) {
        const struct kvq_config_namespace *is = &b->namespaces[i];
        const struct kvq_config_namespace *was = find_section(a, is->name);
        c->live = true;
        if (was)
            compare_keys(a, b, was, is, tell, context, c);
        else
            tell_section("namespace", is->name, "not there", "there", tell, context, c);
    }
    c->live = false;
    for (uint32_t i = 0; i < a->n_namespaces; i++)
        if (!find_section(b, a->namespaces[i].name))
            tell_section("namespace", a->namespaces[i].name, "there", "not there", tell, context,
                         c);
}

static const struct kvq__own_format *find_same_format(const struct kvq_config *config,
                                                      const char *name)
{
    for (uint32_t i = 0; i < config->n_formats; i++)
        if (strcmp(config->own_formats[i].name, name) == 0)
            return &config->own_formats[i];
    return NULL;
}

static bool same_format(const struct kvq_config *a, const struct kvq_config *b, const char *name)
{
    char was[KVQ_FORMAT_SECTION], is[KVQ_FORMAT_SECTION];
    kvq__format_section(was, sizeof was, a, (uint32_t)(find_same_format(a, name) - a->own_formats));
    kvq__format_section(is, sizeof is, b, (uint32_t)(find_same_format(b, name) - b->own_formats));
    return strcmp(was, is) == 0;
}

// Sessions have pointers to them, so they stay as they are.
static void compare_formats(const struct kvq_config *a, const struct kvq_config *b,
                            tell_change *tell, void *context, struct kvq__config_change *c)
{
    c->live = false;
    for (uint32_t i = 0; i < b->n_formats; i++) {
        const char *name = b->own_formats[i].name;
        if (!find_same_format(a, name))
            tell_section("format", name, "not there", "there", tell, context, c);
        else if (!same_format(a, b, name))
            tell_section("format", name, "there", "another", tell, context, c);
    }
    for (uint32_t i = 0; i < a->n_formats; i++)
        if (!find_same_format(b, a->own_formats[i].name))
            tell_section("format", a->own_formats[i].name, "there", "not there", tell, context, c);
}

static void compare_control_keys(const struct kvq_config *a, const struct kvq_config *b,
                                 tell_change *tell, void *context, struct kvq__config_change *c)
{
    const char *key;
    c->live = true;
    for (uint32_t i = 0; i < b->n_keys; i++) {
        const struct kvq_config_key *is = &b->keys[i], *was = kvq__config_key_find(a, is->name);
        if (!was)
            tell_section("key", is->name, "not there", "there", tell, context, c);
        for (unsigned k = 0; was && (key = kvq__config_key_key(k)); k++) {
            kvq__config_key_value(c->before, sizeof c->before, was, k);
            kvq__config_key_value(c->after, sizeof c->after, is, k);
            if (strcmp(c->before, c->after) == 0)
                continue;
            snprintf(c->name, sizeof c->name, "[key %.128s] %s", is->name, key);
            tell(context, c);
        }
    }
    for (uint32_t i = 0; i < a->n_keys; i++)
        if (!kvq__config_key_find(b, a->keys[i].name))
            tell_section("key", a->keys[i].name, "there", "not there", tell, context, c);
}

void kvq__config_compare(const struct kvq_config *before, const struct kvq_config *after,
                         tell_change *tell, void *context)
{
    struct kvq__config_change change;
    compare_options(before, after, tell, context, &change);
    compare_namespaces(before, after, tell, context, &change);
    compare_formats(before, after, tell, context, &change);
    compare_control_keys(before, after, tell, context, &change);
}

// ---- Merging ----

int kvq__config_merge(struct kvq_config *next, const struct kvq_config *running, char *text)
{
    uint32_t n = next->n_namespaces; // those that stay are put behind
    for (uint32_t i = 0; i < running->n_namespaces; i++) {
        const struct kvq_config_namespace *ns = &running->namespaces[i];
        if (find_section(next, ns->name))
            continue;
        if (n == KVQ_MAX_NAMESPACES)
            return kvq__config_refuse(text, next->file,
                                      "its namespaces and those that are no more in it are more "
                                      "than %d together; restart kvqd",
                                      KVQ_MAX_NAMESPACES);
        next->namespaces[n++] = *ns;
    }
    next->n_namespaces = n;
    for (const struct kvq__option *o = kvq__options; o->name; o++) {
        if (o->when == KVQ_OPTION_LIVE)
            continue;
        memcpy((char *)next + o->offset, (const char *)running + o->offset, o->size);
        next->source[o - kvq__options] = running->source[o - kvq__options];
        memcpy(next->source_file[o - kvq__options], running->source_file[o - kvq__options],
               sizeof *next->source_file);
    }
    return 0;
}

void kvq__config_adopt(struct kvq_config *running, const struct kvq_config *next)
{
    for (const struct kvq__option *o = kvq__options; o->name; o++)
        if (o->when == KVQ_OPTION_LIVE)
            memcpy((char *)running + o->offset, (const char *)next + o->offset, o->size);
    memcpy(running->source, next->source, sizeof running->source);
    memcpy(running->source_file, next->source_file, sizeof running->source_file);
    running->n_more_files = next->n_more_files;
    memcpy(running->namespaces, next->namespaces, sizeof running->namespaces);
    running->n_namespaces = next->n_namespaces;
    memcpy(running->keys, next->keys, sizeof running->keys);
    running->n_keys = next->n_keys;
}
