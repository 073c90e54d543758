// SPDX-License-Identifier: Apache-2.0
//
// cmocka, for tests and their kits: the headers that it wants before it, it, and what of the C
// library most of them use, which they need not include again.
#ifndef KVQ_TESTS_UNIT_H
#define KVQ_TESTS_UNIT_H

#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

// Every test gets a state that few look at, and a stand-in for a function gets what that is given.
#pragma GCC diagnostic ignored "-Wunused-parameter"

// ---- Tests ----

// TEST_BETWEEN(test_x, before, after) { ... } is a test, which run_all() runs between these two
// (NULL: nothing). With a semicolon in the body's place, a test that stands above runs once more.
// Those of a file run in the order in which they stand there.
#define TEST_BETWEEN(name, before, after) UNIT_TEST(name, before, after, __LINE__)
// Between the file's, or its kit's, setup and teardown.
#define TEST(name) TEST_BETWEEN(name, setup, teardown)
// Between nothing.
#define PLAIN_TEST(name) TEST_BETWEEN(name, NULL, NULL)

#define UNIT_TEST(name, before, after, line) UNIT_TEST_AT(name, before, after, line)
#define UNIT_TEST_AT(name, before, after, line)                                                    \
    static void name(void **state);                                                                \
    __attribute__((constructor(1000 + line))) static void unit_add_##line(void)                    \
    {                                                                                              \
        unit_add((struct CMUnitTest)cmocka_unit_test_setup_teardown(name, before, after));         \
    }                                                                                              \
    static void name(void **state)

struct unit_tests {
    struct CMUnitTest all[64]; // those behind the last one have no name
    size_t n;
};

static inline struct unit_tests *unit_tests(void)
{
    static struct unit_tests tests;
    return &tests;
}

static inline void unit_add(struct CMUnitTest test)
{
    struct unit_tests *tests = unit_tests();
    if (tests->n == sizeof tests->all / sizeof *tests->all)
        abort();
    tests->all[tests->n++] = test;
}

// Whether they fail. Before and after all of them; NULL: nothing.
static inline int run_all(int (*before)(void **state), int (*after)(void **state))
{
    struct unit_tests *tests = unit_tests();
    return cmocka_run_group_tests(tests->all, before, after);
}

// ---- What they say ----

// A value with one member changed: WITH(request, count = 3).
#define WITH(value, change)                                                                        \
    ({                                                                                             \
        __typeof__(value) with_ = (value);                                                         \
        with_.change;                                                                              \
        with_;                                                                                     \
    })

// Whether what takes minutes is asked for: KVQ_FULL=1.
static inline bool long_tier(void)
{
    const char *wanted = getenv("KVQ_FULL");
    return wanted && strcmp(wanted, "1") == 0;
}

static inline void assert_says(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("\"%s\" does not say \"%s\"", text, words);
}

#endif
