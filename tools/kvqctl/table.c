// SPDX-License-Identifier: Apache-2.0
// Tables: what stands in a cell, by the message's own descriptor, and how wide columns are.
#include "tools/kvqctl/table.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <wchar.h>

// ---- Values ----

// The field of a message, or of one within: at *at, or NULL where there is no such message.
static const ProtobufCFieldDescriptor *find_field(const ProtobufCMessage *message, const char *path,
                                                  const void **at)
{
    for (;;) {
        char first[64]; // of several names
        size_t length = strcspn(path, ".");
        assert(length < sizeof first);
        memcpy(first, path, length);
        first[length] = 0;
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field_by_name(message->descriptor, first);
        assert(field && field->label != PROTOBUF_C_LABEL_REPEATED);
        *at = (const char *)message + field->offset;
        if (!path[length])
            return field;
        path += length + 1;
        message = *(const ProtobufCMessage *const *)*at;
        if (!message)
            return NULL;
    }
}

static struct kvq__ctl_value value_at(const ProtobufCFieldDescriptor *field, const void *at)
{
    struct kvq__ctl_value value = {0};
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
        value.is_text = true;
        value.text = *(const char *const *)at;
        break;
    case PROTOBUF_C_TYPE_BOOL:
        value.number = *(const protobuf_c_boolean *)at;
        break;
    case PROTOBUF_C_TYPE_UINT32:
        value.number = *(const uint32_t *)at;
        break;
    case PROTOBUF_C_TYPE_UINT64:
        value.number = *(const uint64_t *)at;
        break;
    case PROTOBUF_C_TYPE_INT64:
        value.number = *(const int64_t *)at;
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        value.number = *(const double *)at;
        break;
    default:
        assert(!"a column's field has another type");
    }
    return value;
}

struct kvq__ctl_value kvq__ctl_value_of(const struct kvq__ctl_column *c,
                                        const ProtobufCMessage *message)
{
    struct kvq__ctl_value value = {.is_text = c->show == KVQ__CTL_AS_TEXT};
    const void *at;
    if (c->text)
        value.text = c->text(message);
    else if (c->whole)
        value.number = c->whole(message);
    else {
        const ProtobufCFieldDescriptor *field = find_field(message, c->field, &at);
        value = field ? value_at(field, at) : value;
    }
    assert(value.is_text == (c->show == KVQ__CTL_AS_TEXT));
    if (value.is_text && !value.text)
        value.text = "";
    return value;
}

const struct kvq__ctl_column *kvq__ctl_column_of(const struct kvq__ctl_table *table,
                                                 const char *name, size_t length)
{
    for (size_t i = 0; i < table->n; i++)
        if (strlen(table->columns[i].name) == length &&
            strncmp(table->columns[i].name, name, length) == 0)
            return &table->columns[i];
    return NULL;
}

// ---- For people ----

static const char *time_text(int64_t seconds)
{
    time_t at = (time_t)seconds;
    struct tm tm;
    char text[32];
    strftime(text, sizeof text, "%Y-%m-%d %H:%M", localtime_r(&at, &tm));
    return kvq__ctl_text("%s", text);
}

static const char *number_text(enum kvq__ctl_show show, long double number)
{
    switch (show) {
    case KVQ__CTL_AS_BYTES:
        return kvq__ctl_bytes((uint64_t)number);
    case KVQ__CTL_AS_DURATION:
        return kvq__ctl_duration((uint64_t)number);
    case KVQ__CTL_AS_TIME:
        return time_text((int64_t)number);
    case KVQ__CTL_AS_1_PLACE:
        return kvq__ctl_text("%.1f", (double)number);
    case KVQ__CTL_AS_2_PLACES:
        return kvq__ctl_text("%.2f", (double)number);
    case KVQ__CTL_AS_3_PLACES:
        return kvq__ctl_text("%.3f", (double)number);
    case KVQ__CTL_AS_TIMES:
        return kvq__ctl_text("%.2fx", (double)number);
    case KVQ__CTL_AS_YES_NO:
        return number != 0 ? "yes" : "no";
    default:
        return kvq__ctl_text("%llu", (unsigned long long)number);
    }
}

static const char *cell_text(const struct kvq__ctl_column *c, const ProtobufCMessage *message)
{
    if (c->people)
        return c->people(message);
    struct kvq__ctl_value value = kvq__ctl_value_of(c, message);
    return value.is_text ? kvq__ctl_clean(value.text) : number_text(c->show, value.number);
}

// The next character of a text: its bytes, and how many of a terminal's characters it takes.
static size_t step_over(const char *text, size_t n, int *width)
{
    mbstate_t state = {0};
    wchar_t character;
    size_t step = (unsigned char)*text < 0x80 ? 0 : mbrtowc(&character, text, n, &state);
    bool plain = step == 0 || step > n; // ASCII, or bytes that are no character
    int wide = plain ? 1 : wcwidth(character);
    *width = wide > 0 ? wide : 0;
    return plain ? 1 : step;
}

size_t kvq__ctl_fitting(const char *text, int columns)
{
    size_t n = strlen(text), at = 0;
    while (at < n) {
        int width;
        size_t step = step_over(text + at, n - at, &width);
        columns -= width;
        if (columns < 0)
            break;
        at += step;
    }
    return at;
}

// How many characters of a terminal the first n bytes of a text take.
static int width_of(const char *text, size_t n)
{
    int width = 0;
    for (size_t at = 0; at < n;) {
        int wide;
        at += step_over(text + at, n - at, &wide);
        width += wide;
    }
    return width;
}

// All cells of a table, row by row, each with a NUL behind it.
struct cells {
    const struct kvq__ctl_view *view;
    char *text;
    size_t size;
    int widths[KVQ__CTL_MAX_COLUMNS];
};

static void take_cell(struct cells *cells, size_t column, const char *text, FILE *out)
{
    size_t n = strlen(text);
    int width = width_of(text, n);
    if (width > cells->widths[column])
        cells->widths[column] = width;
    fwrite_unlocked(text, 1, n + 1, out);
}

// False: out of memory.
static bool gather(struct cells *cells, ProtobufCMessage *const *elements, size_t n)
{
    const struct kvq__ctl_view *view = cells->view;
    FILE *out = open_memstream(&cells->text, &cells->size);
    if (!out)
        return false;
    for (size_t c = 0; c < view->n_columns; c++) {
        cells->widths[c] = abs(view->columns[c]->width);
        take_cell(cells, c, view->columns[c]->heading, out);
    }
    for (size_t i = 0; i < n; i++)
        for (size_t c = 0; c < view->n_columns; c++)
            take_cell(cells, c, cell_text(view->columns[c], elements[i]), out);
    bool whole = !ferror(out);
    return fclose(out) == 0 && whole;
}

static int gap_before(const struct cells *cells, size_t column)
{
    return column == 0 ? 0 : cells->view->columns[column]->apart ? 2 : 1;
}

// How far a column's widest text is above the width that the column has at least.
static int above_least(const struct cells *cells, size_t column)
{
    const struct kvq__ctl_column *c = cells->view->columns[column];
    return c->show == KVQ__CTL_AS_TEXT ? cells->widths[column] - abs(c->width) : 0;
}

// One long text would push all columns behind it out of sight: the column that is farthest above
// its least width gives a character away, until all fit.
static void fit(struct cells *cells)
{
    int width = 0;
    for (size_t c = 0; c < cells->view->n_columns; c++)
        width += gap_before(cells, c) + cells->widths[c];
    for (; width > cells->view->most; width--) {
        size_t widest = 0;
        for (size_t c = 1; c < cells->view->n_columns; c++)
            if (above_least(cells, c) > above_least(cells, widest))
                widest = c;
        if (above_least(cells, widest) <= 0)
            break;
        cells->widths[widest]--;
    }
}

static void print_blanks(int n)
{
    for (; n > 0; n--)
        putchar_unlocked(' ');
}

// What stands on the left of the last column is not filled up with blanks.
static void print_cell(const struct cells *cells, size_t column, const char *text)
{
    const struct kvq__ctl_column *c = cells->view->columns[column];
    bool last = column + 1 == cells->view->n_columns;
    size_t n = strlen(text);
    int width = cells->widths[column];
    bool cut = width_of(text, n) > width;
    n = cut ? kvq__ctl_fitting(text, width - 1) : n;
    int blanks = width - width_of(text, n) - cut;
    print_blanks(gap_before(cells, column));
    if (c->width >= 0)
        print_blanks(blanks);
    fwrite_unlocked(text, 1, n, stdout);
    if (cut)
        putchar_unlocked('~');
    if (c->width < 0 && !last)
        print_blanks(blanks);
    if (last)
        putchar_unlocked('\n');
}

void kvq__ctl_print_table(const struct kvq__ctl_view *view, ProtobufCMessage *const *elements,
                          size_t n)
{
    struct cells cells = {.view = view};
    if (gather(&cells, elements, n)) {
        if (view->most)
            fit(&cells);
        const char *at = cells.text;
        for (size_t i = 0; i < (n + 1) * view->n_columns; i++) {
            print_cell(&cells, i % view->n_columns, at);
            at += strlen(at) + 1;
        }
        if (view->table->note)
            view->table->note(elements, n);
    } else {
        fprintf(stderr, "kvqctl: no memory for a table of %zu rows\n", n);
    }
    free(cells.text);
}

// ---- For spreadsheets and scripts ----

static bool is_whole(long double number)
{
    return number == floorl(number);
}

static void print_quoted(const char *text)
{
    if (!text[strcspn(text, ",\"\r\n")]) {
        fputs(text, stdout);
        return;
    }
    putchar('"');
    for (; *text; text++) {
        if (*text == '"')
            putchar('"');
        putchar(*text);
    }
    putchar('"');
}

void kvq__ctl_print_csv(const struct kvq__ctl_view *view, ProtobufCMessage *const *elements,
                        size_t n)
{
    for (size_t c = 0; c < view->n_columns; c++)
        printf("%s%s", c ? "," : "", view->columns[c]->name);
    putchar('\n');
    for (size_t i = 0; i < n; i++) {
        for (size_t c = 0; c < view->n_columns; c++) {
            struct kvq__ctl_value value = kvq__ctl_value_of(view->columns[c], elements[i]);
            if (c)
                putchar(',');
            if (value.is_text)
                print_quoted(value.text);
            else if (view->columns[c]->show == KVQ__CTL_AS_YES_NO)
                fputs(value.number != 0 ? "true" : "false", stdout);
            else
                printf("%.*Lg", is_whole(value.number) ? 20 : 15, value.number);
        }
        putchar('\n');
    }
}
