// SPDX-License-Identifier: Apache-2.0
//
// Which format each layer of a session has: by a name of the table, by one that is composed of
// such names and stages, or by one of the configuration, which may differ from layer to layer.
// Composed formats belong to the session that asked for them, so they need no limit of their own.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/state.h"
#include "kernels/choice.h"
#include "proto/format_hint.h"

// ---- Names ----

void kvq__formats_hint(const struct kvq__core *core, const char *name, char *out, size_t room)
{
    const char *own[KVQ_MAX_OWN_FORMATS];
    assert(core->config.n_formats <= KVQ_MAX_OWN_FORMATS);
    for (uint32_t i = 0; i < core->config.n_formats; i++)
        own[i] = core->config.formats[i].name;
    out[0] = '\0';
    if (name)
        kvq_format_hint(name, own, core->config.n_formats, out, room);
    else
        kvq_format_choices(own, core->config.n_formats, out, room);
}

const struct kvq__own_format *kvq__own_format(const struct kvq__core *core, const char *name)
{
    size_t n = strcspn(name, "@");
    for (uint32_t i = 0; i < core->config.n_formats; i++) {
        const struct kvq__own_format *f = &core->config.formats[i];
        if (strlen(f->name) == n && memcmp(f->name, name, n) == 0)
            return f;
    }
    return NULL;
}

// Appends to a name, which then must still be one.
static int append_name(struct kvq_format *row, const char *text, char *why, size_t n)
{
    size_t length = strlen(row->name);
    if (length + strlen(text) >= sizeof row->name) {
        snprintf(why, n, "format %s%s: the name is longer than %d bytes; use a shorter one",
                 row->name, text, KVQ_FORMAT_NAME - 1);
        return KVQ_E_FORMAT;
    }
    snprintf(row->name + length, sizeof row->name - length, "%s", text);
    return 0;
}

// ---- Rows ----

// A format of the configuration. A codebook behind its name serves the rows that name none.
static int own_row(const struct kvq__own_format *own, const char *name, uint32_t layer,
                   struct kvq_format *row, char *why, size_t n)
{
    const struct kvq_format *found = own->has_rest ? &own->rest : NULL;
    for (uint32_t i = 0; i < own->n_ranges; i++)
        if (layer >= own->ranges[i].first && layer <= own->ranges[i].last)
            found = &own->ranges[i].row;
    if (!found) {
        snprintf(why, n,
                 "format %s says nothing of layer %u; add it to `layers` in the configuration, or "
                 "a `base` for all others",
                 own->name, layer);
        return KVQ_E_FORMAT;
    }
    *row = *found;
    const char *book = strchr(name, '@');
    return book && kvq_has_centroids(row) && !strchr(row->name, '@')
               ? append_name(row, book, why, n)
               : 0;
}

// The format of a name "FORMAT" or "FORMAT@CODEBOOK", under its whole name.
static int parsed_row(const char *name, struct kvq_format *row, char *why, size_t n)
{
    char format[KVQ_FORMAT_NAME];
    snprintf(why, n, "format name %.20s... is longer than %d bytes", name, KVQ_FORMAT_NAME - 1);
    if (strlen(name) >= sizeof format)
        return KVQ_E_FORMAT;
    snprintf(format, sizeof format, "%.*s", (int)strcspn(name, "@"), name);
    if (kvq_format_parse(format, row, why, n))
        return KVQ_E_FORMAT;
    snprintf(row->name, sizeof row->name, "%s", name);
    return 0;
}

// Takes the outliers away; the name says so, in words that mean the same.
static int without_outliers(const struct kvq__core *core, struct kvq_format *row, char *why,
                            size_t n)
{
    char rest[KVQ_FORMAT_NAME];
    bool stages = strchr(row->name, ':') || kvq__own_format(core, row->name);
    size_t at = strcspn(row->name, stages ? "@" : "+@");
    assert(row->outliers);
    snprintf(rest, sizeof rest, "%s", row->name + at);
    row->name[at] = '\0';
    row->outliers = 0;
    int rc = append_name(row, stages ? ":outliers=0" : "-o0", why, n);
    return rc < 0 ? rc : append_name(row, rest, why, n);
}

int kvq__format_of_layer(const struct kvq__core *core, const char *name, uint32_t layer,
                         struct kvq_format *row, char *why, size_t n)
{
    const struct kvq__own_format *own = kvq__own_format(core, name);
    int rc = own ? own_row(own, name, layer, row, why, n) : parsed_row(name, row, why, n);
    if (rc == 0 && row->outliers && layer < row->plain_layers)
        rc = without_outliers(core, row, why, n);
    return rc;
}

// Of a format of the configuration, the row that has this name. NULL = none.
static const struct kvq_format *own_row_named(const struct kvq__own_format *own, const char *name)
{
    if (own->has_rest && strcmp(own->rest.name, name) == 0)
        return &own->rest;
    for (uint32_t i = 0; i < own->n_ranges; i++)
        if (strcmp(own->ranges[i].row.name, name) == 0)
            return &own->ranges[i].row;
    return NULL;
}

const struct kvq_format *kvq__format_configured(const struct kvq__core *core, const char *name)
{
    const struct kvq_format *row = NULL;
    for (uint32_t i = 0; i < core->config.n_formats && !row; i++)
        row = own_row_named(&core->config.formats[i], name);
    return row;
}

// ---- Of a session ----

const struct kvq_format *kvq__format_keep(struct kvq__session *s, const struct kvq_format *row,
                                          int *rc)
{
    const struct kvq_format *known = kvq_format_by_name(row->name);
    if (known && kvq_format_same(known, row))
        return known;
    for (uint32_t i = 0; i < s->composed.n; i++) {
        known = &s->composed.formats[i];
        if (strcmp(known->name, row->name) == 0 && kvq_format_same(known, row))
            return known;
    }
    if (!s->composed.formats)
        s->composed.formats =
            kvq__ns_allocate(s->ns, s->n_layers * sizeof *s->composed.formats, rc);
    if (!s->composed.formats)
        return NULL;
    assert(s->composed.n < s->n_layers);
    s->composed.formats[s->composed.n] = *row;
    return &s->composed.formats[s->composed.n++];
}

int kvq__formats_copy(struct kvq__session *to, const struct kvq__session *from)
{
    assert(to->n_layers == from->n_layers);
    snprintf(to->composed.name, sizeof to->composed.name, "%s", from->composed.name);
    for (uint32_t i = 0; i < from->n_layers; i++) {
        int rc = 0;
        to->layers[i].format = kvq__format_keep(to, from->layers[i].format, &rc);
        if (!to->layers[i].format)
            return rc;
    }
    return 0;
}

size_t kvq__formats_bytes(const struct kvq__session *s)
{
    return s->composed.formats ? s->n_layers * sizeof *s->composed.formats : 0;
}

void kvq__formats_free(struct kvq__session *s)
{
    kvq__ns_deallocate(s->ns, s->composed.formats, kvq__formats_bytes(s));
}

// ---- Telling ----

void kvq__formats_text(const struct kvq__session *s, char *out, size_t room)
{
    char span[24], part[KVQ_FORMAT_NAME + 32];
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t first = 0, last; first < s->n_layers; first = last + 1) {
        const struct kvq_format *f = s->layers[first].format;
        for (last = first; last + 1 < s->n_layers && s->layers[last + 1].format == f;)
            last++;
        if (first == 0 && last + 1 == s->n_layers)
            return; // one for all
        snprintf(span, sizeof span, first == last ? "%u" : "%u-%u", first, last);
        int n = snprintf(part, sizeof part, "%s%s:%s", used ? ", " : "", span, f->name);
        if (used + (size_t)n + sizeof ", .." > room) {
            snprintf(out + used, room - used, ", ..");
            return;
        }
        used += (size_t)snprintf(out + used, room - used, "%s", part);
    }
}

static void add_format(struct kvq__format_info *out, uint32_t max, uint32_t *n,
                       struct kvq__format_info info)
{
    if (*n < max)
        out[*n] = info;
    ++*n;
}

static void add_built_in(struct kvq__format_info *out, uint32_t max, uint32_t *n,
                         const struct kvq_format *f)
{
    add_format(out, max, n, (struct kvq__format_info){f->name, f, 0, UINT32_MAX, false, false});
}

uint32_t kvq__core_formats(const struct kvq__core *core, struct kvq__format_info *out, uint32_t max)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < core->config.n_formats; i++) {
        const struct kvq__own_format *own = &core->config.formats[i];
        for (uint32_t j = 0; j < own->n_ranges; j++)
            add_format(out, max, &n,
                       (struct kvq__format_info){own->name, &own->ranges[j].row,
                                                 own->ranges[j].first, own->ranges[j].last, true,
                                                 true});
        if (own->has_rest)
            add_format(out, max, &n,
                       (struct kvq__format_info){own->name, &own->rest, 0, UINT32_MAX, true,
                                                 own->n_ranges > 0});
    }
    for (const char *const *name = kvq_recommended_formats; *name; name++)
        add_built_in(out, max, &n, kvq_format_by_name(*name));
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        if (!kvq_format_is_recommended(f))
            add_built_in(out, max, &n, f);
    return n;
}
