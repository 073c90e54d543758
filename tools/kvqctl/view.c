// SPDX-License-Identifier: Apache-2.0
// What of a list is wanted: --columns, --sort and --filter, by the list's table.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/nearest.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

// ---- The command line ----

static int unknown_column(const struct kvq__ctl_table *table, const char *name, size_t length)
{
    char given[64];
    const struct kvq__ctl_column *best = &table->columns[0];
    snprintf(given, sizeof given, "%.*s", (int)length, name);
    for (size_t i = 1; i < table->n; i++)
        if (kvq_word_distance(given, table->columns[i].name) < kvq_word_distance(given, best->name))
            best = &table->columns[i];
    fprintf(stderr,
            "kvqctl: %s have no column '%s'; the nearest is '%s'\nThe columns are: ", table->what,
            kvq__ctl_clean(given), best->name);
    for (size_t i = 0; i < table->n; i++)
        fprintf(stderr, "%s%s", i ? ", " : "", table->columns[i].name);
    fprintf(stderr, "\n");
    return KVQ_EXIT_USAGE;
}

static int take_columns(const char *text, struct kvq__ctl_view *view)
{
    const struct kvq__ctl_table *table = view->table;
    for (size_t i = 0; i < table->n && !text; i++)
        if (!table->columns[i].extra)
            view->columns[view->n_columns++] = &table->columns[i];
    while (text) {
        size_t length = strcspn(text, ",");
        const struct kvq__ctl_column *c = kvq__ctl_column_of(table, text, length);
        if (!c)
            return unknown_column(table, text, length);
        if (view->n_columns == KVQ__CTL_MAX_COLUMNS) {
            fprintf(stderr, "kvqctl: --columns names more than %d columns; name fewer\n",
                    KVQ__CTL_MAX_COLUMNS);
            return KVQ_EXIT_USAGE;
        }
        view->columns[view->n_columns++] = c;
        text = text[length] ? text + length + 1 : NULL;
    }
    return KVQ_EXIT_OK;
}

static int take_sort(const char *text, struct kvq__ctl_view *view)
{
    if (!text)
        return KVQ_EXIT_OK;
    view->descending = *text == '-';
    text += view->descending;
    view->sort = kvq__ctl_column_of(view->table, text, strlen(text));
    return view->sort ? KVQ_EXIT_OK : unknown_column(view->table, text, strlen(text));
}

// "2026-11-25" or "2026-11-25 14:03", in local time, or seconds since 1970. A day and a minute last
// as long as they do.
static bool parse_time(const char *text, long double *number, long double *lasts)
{
    static const struct {
        const char *form;
        int seconds;
    } forms[] = {{"%Y-%m-%d %H:%M", 60},
                 {"%Y-%m-%dT%H:%M", 60},
                 {"%Y-%m-%d %H:%M:%S", 1},
                 {"%Y-%m-%d", 86400},
                 {"%s", 1}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        struct tm tm = {.tm_isdst = -1};
        const char *end = strptime(text, forms[i].form, &tm);
        if (end && !*end) {
            *number = mktime(&tm);
            *lasts = forms[i].seconds;
            return true;
        }
    }
    return false;
}

static bool parse_real(const char *text, long double *number)
{
    char *end;
    errno = 0;
    *number = strtold(text, &end);
    return !errno && end != text && !*end && isfinite(*number);
}

static bool parse_answer(const char *text, long double *number)
{
    bool yes = strcmp(text, "yes") == 0 || strcmp(text, "true") == 0;
    *number = yes;
    return yes || strcmp(text, "no") == 0 || strcmp(text, "false") == 0;
}

// What a value of a column that is shown so has to be, or NULL: it may be anything.
static const char *must_be(enum kvq__ctl_show show, const char *text, long double *number,
                           long double *lasts)
{
    uint64_t whole;
    bool good = true;
    const char *must = "a number";
    if (show == KVQ__CTL_AS_TEXT)
        return NULL;
    if (show == KVQ__CTL_AS_BYTES) {
        must = "a size, as 512 or 2gb";
        good = kvq__ctl_parse_size(text, &whole);
        *number = whole;
    } else if (show == KVQ__CTL_AS_DURATION) {
        must = "a duration with its unit, as 90s, 10min, 2h or 1d";
        good = kvq__ctl_parse_duration(text, &whole);
        *number = whole;
    } else if (show == KVQ__CTL_AS_TIME) {
        must = "a time, as 2026-11-25 or \"2026-11-25 14:03\"";
        good = parse_time(text, number, lasts);
    } else if (show == KVQ__CTL_AS_YES_NO) {
        must = "yes or no";
        good = parse_answer(text, number);
    } else {
        good = parse_real(text, number);
    }
    return good ? NULL : must;
}

static int take_filter(const char *text, struct kvq__ctl_view *view)
{
    struct kvq__ctl_filter *f = &view->filters[view->n_filters++];
    size_t length = strcspn(text, "=!<>~");
    const char *compare = text + length;
    if (length == 0 || !*compare || (*compare == '!' && compare[1] != '=')) {
        fprintf(stderr,
                "kvqctl: --filter is COLUMN=VALUE, or with !=, <, > or ~ (holds the text) between, "
                "not '%s'\n",
                kvq__ctl_clean(text));
        return KVQ_EXIT_USAGE;
    }
    f->column = kvq__ctl_column_of(view->table, text, length);
    if (!f->column)
        return unknown_column(view->table, text, length);
    f->compare = *compare;
    f->text = compare + 1 + (*compare == '!');
    const char *must = *compare == '~' && f->column->show != KVQ__CTL_AS_TEXT
                           ? "compared by =, !=, < or >"
                           : must_be(f->column->show, f->text, &f->number, &f->lasts);
    if (!must)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: --filter %s: %s is %s\n", kvq__ctl_clean(text), f->column->name, must);
    return KVQ_EXIT_USAGE;
}

int kvq__ctl_take_view(const struct kvq__ctl *ctl, const struct kvq__ctl_table *table,
                       struct kvq__ctl_view *view)
{
    *view = (struct kvq__ctl_view){.table = table};
    int result = take_columns(ctl->columns, view);
    if (result == KVQ_EXIT_OK)
        result = take_sort(ctl->sort, view);
    for (size_t i = 0; i < ctl->filters.n && result == KVQ_EXIT_OK; i++)
        result = take_filter(ctl->filters.texts[i], view);
    return result;
}

// ---- Elements ----

static int compare(const struct kvq__ctl_value *a, const struct kvq__ctl_value *b)
{
    if (a->is_text)
        return strcmp(a->text, b->text);
    return a->number < b->number ? -1 : a->number > b->number;
}

// To the places that people see: they type what they have seen.
static long double as_shown(enum kvq__ctl_show show, long double number)
{
    long double times = show == KVQ__CTL_AS_1_PLACE                                 ? 10
                        : show == KVQ__CTL_AS_2_PLACES || show == KVQ__CTL_AS_TIMES ? 100
                        : show == KVQ__CTL_AS_3_PLACES                              ? 1000
                                                                                    : 0;
    return times > 0 ? rintl(number * times) / times : number;
}

static bool passes(const struct kvq__ctl_filter *f, const ProtobufCMessage *element)
{
    struct kvq__ctl_value value = kvq__ctl_value_of(f->column, element);
    struct kvq__ctl_value other = {.is_text = value.is_text, .text = f->text};
    if (f->compare == '~')
        return strstr(value.text, f->text) != NULL;
    value.number = as_shown(f->column->show, value.number);
    other.number = as_shown(f->column->show, f->number);
    int order = compare(&value, &other);
    bool within = order > 0 && value.number < other.number + f->lasts;
    switch (f->compare) {
    case '<':
        return order < 0;
    case '>':
        return order > 0 && !within;
    case '!':
        return order != 0 && !within;
    default:
        return order == 0 || within;
    }
}

static bool passes_all(const struct kvq__ctl_view *view, const ProtobufCMessage *element)
{
    for (size_t i = 0; i < view->n_filters; i++)
        if (!passes(&view->filters[i], element))
            return false;
    return true;
}

// An element with what it is sorted by; text is copied, since a column's own text is overwritten.
struct key {
    struct kvq__ctl_value value;
    size_t at; // in the order that the daemon gave, which decides between equals
    ProtobufCMessage *element;
    char *copy;
};

static int by_key(const void *a, const void *b)
{
    const struct key *x = a, *y = b;
    int order = compare(&x->value, &y->value);
    return order ? order : x->at < y->at ? -1 : 1;
}

static int by_key_down(const void *a, const void *b)
{
    const struct key *x = a, *y = b;
    int order = compare(&y->value, &x->value);
    return order ? order : x->at < y->at ? -1 : 1;
}

static void sort(const struct kvq__ctl_view *view, ProtobufCMessage **elements, size_t n)
{
    struct key *keys = calloc(n ? n : 1, sizeof *keys);
    bool whole = keys != NULL;
    for (size_t i = 0; i < n && whole; i++) {
        struct key *key = &keys[i];
        *key = (struct key){kvq__ctl_value_of(view->sort, elements[i]), i, elements[i], NULL};
        if (key->value.is_text)
            key->value.text = key->copy = strdup(key->value.text);
        whole = !key->value.is_text || key->copy;
    }
    if (whole)
        qsort(keys, n, sizeof *keys, view->descending ? by_key_down : by_key);
    else
        fprintf(stderr, "kvqctl: no memory to sort %zu elements\n", n);
    for (size_t i = 0; i < n && keys; i++) {
        if (whole)
            elements[i] = keys[i].element;
        free(keys[i].copy);
    }
    free(keys);
}

size_t kvq__ctl_apply_view(const struct kvq__ctl_view *view, ProtobufCMessage **elements, size_t n)
{
    size_t left = 0;
    for (size_t i = 0; i < n; i++)
        if (passes_all(view, elements[i]))
            elements[left++] = elements[i];
    if (view->sort)
        sort(view, elements, left);
    return left;
}

static bool is_blank(const struct kvq__ctl_column *c, ProtobufCMessage *const *elements, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct kvq__ctl_value value = kvq__ctl_value_of(c, elements[i]);
        if (value.is_text ? *value.text != 0 : value.number != 0)
            return false;
    }
    return true;
}

void kvq__ctl_fade_columns(struct kvq__ctl_view *view, ProtobufCMessage *const *elements, size_t n)
{
    size_t left = 0;
    for (size_t i = 0; i < view->n_columns; i++)
        if (!view->columns[i]->fades || !is_blank(view->columns[i], elements, n))
            view->columns[left++] = view->columns[i];
    view->n_columns = left;
}
