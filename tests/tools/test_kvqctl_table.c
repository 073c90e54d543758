// SPDX-License-Identifier: Apache-2.0
//
// Lists of kvqctl as tables of columns: what --columns, --sort and --filter choose, that any name
// stays one cell, for people and as comma-separated values, and units of numbers.
#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tools/kvqctl/table.h"

enum { N = 4 };

static Kvq__Session sessions[N];
static ProtobufCMessage *elements[N];
static char text[1 << 16];

static char *mutable(const char *words)
{
    return (char *)(uintptr_t)words;
}

static int setup(void **state)
{
    static const char *const names[N] = {"b", "a, \"quoted\"", "会话", ""};
    (void)state;
    setlocale(LC_CTYPE, "C.UTF-8");
    for (size_t i = 0; i < N; i++) {
        kvq__session__init(&sessions[i]);
        sessions[i].namespace_ = mutable("team");
        sessions[i].name = mutable(names[i]);
        sessions[i].id = 40 + i;
        sessions[i].tokens = 10 * (i % 2);
        sessions[i].packed_bytes = i << 30;
        sessions[i].idle_ms = 60000 * i;
        sessions[i].bits_per_value = 3.0625;
        sessions[i].pinned = i == 2;
        elements[i] = &sessions[i].base;
    }
    return 0;
}

// The view of these options; complaints are in `text`.
static int view_of(const struct kvq__ctl *ctl, struct kvq__ctl_view *view)
{
    FILE *real = stderr;
    memset(text, 0, sizeof text);
    stderr = fmemopen(text, sizeof text, "w");
    assert_non_null(stderr);
    int result = kvq__ctl_take_view(ctl, &kvq__ctl_sessions, view);
    fclose(stderr);
    stderr = real;
    return result;
}

// How many pass one filter, or -1 if it is refused.
static int passing(const char *filter)
{
    struct kvq__ctl ctl = {.filters = {1, {filter}}};
    struct kvq__ctl_view view;
    ProtobufCMessage *left[N];
    memcpy(left, elements, sizeof left);
    return view_of(&ctl, &view) ? -1 : (int)kvq__ctl_apply_view(&view, left, N);
}

// Rows of so many characters at most; 0: of any number.
static const char *printed_within(const struct kvq__ctl *ctl, int most)
{
    struct kvq__ctl_view view;
    ProtobufCMessage *left[N];
    FILE *real = stdout;
    memcpy(left, elements, sizeof left);
    assert_int_equal(view_of(ctl, &view), 0);
    view.most = most;
    size_t n = kvq__ctl_apply_view(&view, left, N);
    memset(text, 0, sizeof text);
    stdout = fmemopen(text, sizeof text, "w");
    assert_non_null(stdout);
    (ctl->csv ? kvq__ctl_print_csv : kvq__ctl_print_table)(&view, left, n);
    fclose(stdout);
    stdout = real;
    return text;
}

static const char *printed(const struct kvq__ctl *ctl)
{
    return printed_within(ctl, 0);
}

static void test_cells(void **state)
{
    (void)state;
    assert_string_equal(printed(&(struct kvq__ctl){.columns = "name,tokens", .sort = "name"}),
                        "NAME                    TOKENS\n"
                        "#43                         10\n"
                        "a, \"quoted\"                 10\n"
                        "b                            0\n"
                        "会话                         0\n");
    assert_string_equal(printed(&(struct kvq__ctl){
                            .columns = "name,memory,bits,pinned", .sort = "-memory", .csv = true}),
                        "name,memory,bits,pinned\n"
                        "#43,3221225472,3.0625,false\n"
                        "会话,2147483648,3.0625,true\n"
                        "\"a, \"\"quoted\"\"\",1073741824,3.0625,false\n"
                        "b,0,3.0625,false\n");
}

// A cell that is wider than its column moves the whole column, and only that.
static void test_long_names(void **state)
{
    char name[101] = "";
    (void)state;
    memset(name, 'x', 100);
    sessions[0].name = name;
    const char *line = printed(&(struct kvq__ctl){.columns = "name,id"});
    for (size_t length; (length = strcspn(line, "\n")); line += length + 1)
        if (strncmp(line, "会话", strlen("会话")) != 0)
            assert_int_equal(length, 100 + 1 + 8);
    sessions[0].name = mutable("b");
}

// Where rows have an end, texts give way, and numbers do not: down to the width of their columns,
// the longest ones first. A cut has a mark, and halves no character.
static void test_cut_names(void **state)
{
    char name[101] = "";
    struct kvq__ctl ctl = {.columns = "name,id,namespace,tokens", .sort = "id"};
    (void)state;
    memset(name, 'x', 100);
    sessions[0].name = name;
    sessions[1].name = mutable("会话会话会话会话会话会话");
    sessions[2].namespace_ = mutable("the-other-people");
    assert_string_equal(printed_within(&ctl, 56),
                        "NAME                        ID NAMESPACE          TOKENS\n"
                        "xxxxxxxxxxxxxxxxxxxx~       40 team                    0\n"
                        "会话会话会话会话会话~       41 team                   10\n"
                        "会话                        42 the-other-peop~         0\n"
                        "#43                         43 team                   10\n");
    const char *least = "NAME                       ID NAMESPACE         TOKENS\n"
                        "xxxxxxxxxxxxxxxxxxx~       40 team                   0\n"
                        "会话会话会话会话会~        41 team                  10\n"
                        "会话                       42 the-other-peo~         0\n"
                        "#43                        43 team                  10\n";
    assert_string_equal(printed_within(&ctl, 54), least);
    assert_string_equal(printed_within(&ctl, 1), least);
    sessions[0].name = mutable("b");
    sessions[1].name = mutable("a, \"quoted\"");
    sessions[2].namespace_ = mutable("team");
}

// Equals stay in the order that they came in, whichever way it is sorted.
static void test_equals(void **state)
{
    (void)state;
    assert_string_equal(
        printed(&(struct kvq__ctl){.columns = "id", .sort = "-tokens", .csv = true}),
        "id\n41\n43\n40\n42\n");
    assert_string_equal(printed(&(struct kvq__ctl){.columns = "id", .sort = "tokens", .csv = true}),
                        "id\n40\n42\n41\n43\n");
}

static void test_filters(void **state)
{
    static const struct {
        const char *filter;
        int pass;
    } rows[] = {
        {"memory>1gb", 2},    {"memory<1gb", 1}, {"memory=2 GB", 1},  {"memory!=2gib", 3},
        {"idle>1min", 2},     {"idle<120s", 2},  {"idle=60000ms", 1}, {"name~quoted", 1},
        {"name=#43", 1},      {"name!=b", 3},    {"bits=3.06", 4},    {"bits>3.06", 0},
        {"pinned=yes", 1},    {"pinned=no", 3},  {"memory>1gx", -1},  {"idle>1parsec", -1},
        {"pinned=maybe", -1}, {"tokens~1", -1},  {"tokens=", -1},     {"=3", -1},
        {"tokens", -1},       {"tokens!3", -1},  {"nothing=3", -1},   {"idle>60", -1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (passing(rows[i].filter) != rows[i].pass)
            fail_msg("%s: %d", rows[i].filter, passing(rows[i].filter));
}

static void test_all_filters_hold(void **state)
{
    struct kvq__ctl ctl = {.filters = {2, {"tokens=10", "memory>2gb"}}, .columns = "id", .csv = 1};
    (void)state;
    assert_string_equal(printed(&ctl), "id\n43\n");
}

static void test_unknown_column(void **state)
{
    struct kvq__ctl_view view;
    (void)state;
    assert_int_equal(view_of(&(struct kvq__ctl){.columns = "name,toks"}, &view), KVQ_EXIT_USAGE);
    assert_non_null(strstr(text, "no column 'toks'; the nearest is 'tokens'"));
    assert_non_null(strstr(text, "namespace, name, tokens, format,"));
    assert_int_equal(view_of(&(struct kvq__ctl){.sort = "-idl"}, &view), KVQ_EXIT_USAGE);
    assert_non_null(strstr(text, "no column 'idl'; the nearest is 'id'"));
}

static void test_sizes(void **state)
{
    uint64_t value;
    (void)state;
    assert_true(kvq__ctl_parse_size("10gb", &value) && value == 10ull << 30);
    assert_true(kvq__ctl_parse_size("10GiB", &value) && value == 10ull << 30);
    assert_true(kvq__ctl_parse_size("7", &value) && value == 7);
    assert_true(kvq__ctl_parse_duration("2h", &value) && value == 7200000);
    assert_false(kvq__ctl_parse_size("", &value) || kvq__ctl_parse_size("-1", &value) ||
                 kvq__ctl_parse_size("1.5gb", &value) ||
                 kvq__ctl_parse_size("99999999tb", &value) || kvq__ctl_parse_size("1s", &value) ||
                 kvq__ctl_parse_duration("1gb", &value));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cells),          cmocka_unit_test(test_long_names),
        cmocka_unit_test(test_cut_names),      cmocka_unit_test(test_equals),
        cmocka_unit_test(test_filters),        cmocka_unit_test(test_all_filters_hold),
        cmocka_unit_test(test_unknown_column), cmocka_unit_test(test_sizes),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
