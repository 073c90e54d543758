// SPDX-License-Identifier: Apache-2.0
//
// Lists as tables of columns: what a cell is and how it is shown stands in a row of such a table,
// and --columns, --sort, --filter and --csv follow from the rows.
#ifndef KVQ_TOOLS_KVQCTL_TABLE_H
#define KVQ_TOOLS_KVQCTL_TABLE_H

#include "tools/kvqctl/kvqctl.h"

enum kvq__ctl_show {
    KVQ__CTL_AS_TEXT,
    KVQ__CTL_AS_NUMBER,
    KVQ__CTL_AS_BYTES,    // "1.5 GiB"
    KVQ__CTL_AS_DURATION, // of milliseconds: "3 h 12 min"
    KVQ__CTL_AS_TIME,     // of seconds since 1970: "2026-11-25 14:03"
    KVQ__CTL_AS_1_PLACE,  // behind the point
    KVQ__CTL_AS_2_PLACES,
    KVQ__CTL_AS_3_PLACES,
    KVQ__CTL_AS_TIMES, // "4.25x"
    KVQ__CTL_AS_YES_NO,
};

struct kvq__ctl_column {
    const char *name, *heading;
    const char *field; // of the message, or "used.host_bytes" of one within
    enum kvq__ctl_show show;
    int width;  // at least so many characters; negative: the text stands on the left
    bool apart; // two blanks stand before it, not one
    bool extra; // shown only where --columns names it
    // Left out, unless --columns names it, where the daemon tells nothing but empty cells, 0 or no
    // in it: of all elements, also those that no filter lets through, so that two answers have the
    // same columns. For what daemons of earlier releases do not tell, and for texts.
    bool fades;
    // In place of the field, if it takes more than one; in one of the buffers of kvq__ctl_text.
    uint64_t (*whole)(const ProtobufCMessage *message);
    const char *(*text)(const ProtobufCMessage *message);
    // In place of `show`, where people read it.
    const char *(*people)(const ProtobufCMessage *message);
};

struct kvq__ctl_table {
    const struct kvq__ctl_column *columns;
    size_t n;
    const char *what;                // the elements, in words
    const char *none, *of_namespace; // printed for an empty list, the latter behind --namespace
    // Behind the table, or NULL.
    void (*note)(ProtobufCMessage *const *elements, size_t n);
};
#define KVQ__CTL_TABLE(COLUMNS, WHAT, NONE, OF_NAMESPACE)                                          \
    .columns = (COLUMNS), .n = sizeof(COLUMNS) / sizeof *(COLUMNS), .what = (WHAT),                \
    .none = (NONE), .of_namespace = (OF_NAMESPACE)

extern const struct kvq__ctl_table kvq__ctl_clients, kvq__ctl_formats, kvq__ctl_prefixes,
    kvq__ctl_quotas, kvq__ctl_remote_sessions, kvq__ctl_saved_sessions, kvq__ctl_sessions;

// One cell as it is compared.
struct kvq__ctl_value {
    bool is_text;
    long double number; // holds every uint64_t and double
    const char *text;
};
struct kvq__ctl_value kvq__ctl_value_of(const struct kvq__ctl_column *c,
                                        const ProtobufCMessage *message);
// A column by its name, or NULL.
const struct kvq__ctl_column *kvq__ctl_column_of(const struct kvq__ctl_table *table,
                                                 const char *name, size_t length);

// What of a list is wanted: columns, order, elements.
enum { KVQ__CTL_MAX_COLUMNS = 64 };
struct kvq__ctl_filter {
    const struct kvq__ctl_column *column;
    char compare; // one of = ! < > ~
    const char *text;
    long double number, lasts; // of a time: for so many seconds
};
struct kvq__ctl_view {
    const struct kvq__ctl_table *table;
    size_t n_columns, n_filters;
    const struct kvq__ctl_column *columns[KVQ__CTL_MAX_COLUMNS];
    struct kvq__ctl_filter filters[KVQ__CTL_MAX_FILTERS];
    const struct kvq__ctl_column *sort; // NULL: the order that the daemon gave
    bool descending;
    int most; // characters of a row, where texts give way to the other columns; 0: no limit
};
// The view that the command line asks for. An exit status, with the complaint printed.
int kvq__ctl_take_view(const struct kvq__ctl *ctl, const struct kvq__ctl_table *table,
                       struct kvq__ctl_view *view);
// Takes out what the filters do not let through, and sorts. Returns how many are left.
size_t kvq__ctl_apply_view(const struct kvq__ctl_view *view, ProtobufCMessage **elements, size_t n);

// Takes out the columns that fade and have nothing in any of these, which are the whole list.
void kvq__ctl_fade_columns(struct kvq__ctl_view *view, ProtobufCMessage *const *elements, size_t n);

// Columns, headings first. Each cell is at least as wide as its column says and as the widest one
// of that column is. Where view->most is less than that, texts are cut, down to their columns'
// widths, with a ~ at the end.
void kvq__ctl_print_table(const struct kvq__ctl_view *view, ProtobufCMessage *const *elements,
                          size_t n);
// How many bytes of the text fit into so many characters of a terminal.
size_t kvq__ctl_fitting(const char *text, int columns);
// As RFC 4180 quotes, with names of columns first, and numbers as --json has them.
void kvq__ctl_print_csv(const struct kvq__ctl_view *view, ProtobufCMessage *const *elements,
                        size_t n);

// A whole number with b, kb, mb, gb or tb (powers of 1,024) behind it. False: it is none.
bool kvq__ctl_parse_size(const char *text, uint64_t *bytes);
// A whole number of milliseconds, or one with ms, s, min, h or d behind it. False: it is none.
bool kvq__ctl_parse_duration(const char *text, uint64_t *ms);

#endif
