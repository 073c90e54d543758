// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl prints as JSON: to the last digit, and a list one element after the other, so that a
// long one takes no more memory at a time than a short one. Counted, not timed.
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cJSON.h>
#include <cmocka.h>

#include "tools/kvqctl/kvqctl.h"

enum { MANY = 500 };

static size_t held, most;

static void *count_in(size_t bytes)
{
    void *memory = malloc(bytes);
    held += memory ? malloc_usable_size(memory) : 0;
    most = held > most ? held : most;
    return memory;
}

static void count_out(void *memory)
{
    held -= memory ? malloc_usable_size(memory) : 0;
    free(memory);
}

static Kvq__Session sessions[MANY];
static ProtobufCMessage *elements[MANY];
static char text[4 << 20];

// The most bytes that printing so many took at a time; what was printed is in `text`.
static size_t print_many(size_t n)
{
    FILE *real = stdout;
    held = most = 0;
    stdout = fmemopen(text, sizeof text, "w");
    assert_non_null(stdout);
    kvq__ctl_print_json_array(elements, n);
    fclose(stdout);
    stdout = real;
    assert_int_equal(held, 0);
    return most;
}

static int setup(void **state)
{
    cJSON_Hooks hooks = {count_in, count_out};
    (void)state;
    cJSON_InitHooks(&hooks);
    for (size_t i = 0; i < MANY; i++) {
        kvq__session__init(&sessions[i]);
        sessions[i].name = (char *)(uintptr_t) "a \"name\"";
        sessions[i].id = UINT64_MAX - i;
        sessions[i].tokens = (1ull << 53) + 1;
        sessions[i].bits_per_value = 2.5;
        elements[i] = &sessions[i].base;
    }
    return 0;
}

static void test_list(void **state)
{
    (void)state;
    size_t few = print_many(2), many = print_many(MANY);
    assert_true(few > 0 && many <= few);
    cJSON *list = cJSON_Parse(text);
    assert_int_equal(cJSON_GetArraySize(list), MANY);
    const cJSON *last = cJSON_GetArrayItem(list, MANY - 1);
    assert_string_equal(cJSON_GetObjectItem(last, "name")->valuestring, "a \"name\"");
    assert_true(cJSON_GetObjectItem(last, "bits_per_value")->valuedouble == 2.5);
    cJSON_Delete(list);
}

static void test_digits(void **state)
{
    (void)state;
    print_many(1);
    assert_non_null(strstr(text, "18446744073709551615"));
    assert_non_null(strstr(text, "9007199254740993"));
    Kvq__SavedEntry saved = KVQ__SAVED_ENTRY__INIT; // it has the only fields with a sign
    ProtobufCMessage *one[] = {&saved.base};
    saved.saved_at = INT64_MIN;
    saved.used_at = -70;
    FILE *real = stdout;
    stdout = fmemopen(text, sizeof text, "w");
    assert_non_null(stdout);
    kvq__ctl_print_json_array(one, 1);
    fclose(stdout);
    stdout = real;
    assert_non_null(strstr(text, "\"saved_at\":\t-9223372036854775808,"));
    assert_non_null(strstr(text, "\"used_at\":\t-70\n"));
    assert_non_null(strstr(text, "\"tokens\":\t0,"));
    print_many(0);
    assert_string_equal(text, "[]\n");
}

// What a terminal would obey is no part of a name, whatever stands around it.
static void test_clean(void **state)
{
    static const char *const rows[][2] = {
        {"a\033[31m\tb\177", "a?[31m?b?"},
        {"a\u202eb\u202ac", "a?b?c"},
        {"\u2066a\u2069", "?a?"},
        {"\u200e\u200f\u061c", "???"},
        {"a\xc2\x80\xc2\x9b\x33\x31m\xc2\x9f", "a??31m?"},
        {"\u00a0\u00e9\u2014\u2029\u202f\u2065\u206a\u4f1a\u061b",
         "\u00a0\u00e9\u2014\u2029\u202f\u2065\u206a\u4f1a\u061b"},
        {"\xe2", "\xe2"},
        {"\xe2\x80", "\xe2\x80"},
        {"\xc2", "\xc2"},
        {"", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_string_equal(kvq__ctl_clean(rows[i][0]), rows[i][1]);
    assert_string_equal(kvq__ctl_clean(NULL), "");
    char name[600]; // longer than what is printed of a text
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(strlen(kvq__ctl_clean(name)), 511);
}

// JSON is for programs, and exact.
static void test_json_is_exact(void **state)
{
    (void)state;
    sessions[0].name = (char *)(uintptr_t) "a\u202eb";
    print_many(1);
    assert_non_null(strstr(text, "\"a\u202eb\""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_list, setup),
        cmocka_unit_test_setup(test_digits, setup),
        cmocka_unit_test(test_clean),
        cmocka_unit_test_setup(test_json_is_exact, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
