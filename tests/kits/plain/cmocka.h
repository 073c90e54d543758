// SPDX-License-Identifier: Apache-2.0
//
// What the tests of kernels use of cmocka, for machines that have a GPU and no cmocka: same names,
// same meaning, same exit status. Used by a build with KVQ_KERNELS_ONLY that does not find cmocka.
#ifndef KVQ_TESTS_PLAIN_CMOCKA_H
#define KVQ_TESTS_PLAIN_CMOCKA_H

#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*plain_fixture)(void **state);

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#ifndef __cplusplus
typedef struct CMUnitTest CMUnitTest;
#endif

enum plain_end { PLAIN_PASSED, PLAIN_FAILED, PLAIN_SKIPPED };

// One program is one source file that includes this and runs tests, and perhaps others that only
// assert; weak symbols let them share where a test ends.
__attribute__((weak)) jmp_buf plain_escape;
__attribute__((weak)) const char *plain_filter;

__attribute__((weak)) void cmocka_set_test_filter(const char *pattern)
{
    plain_filter = pattern;
}

__attribute__((weak, noreturn)) void plain_leave(int end)
{
    longjmp(plain_escape, end);
}

__attribute__((weak, noreturn, format(printf, 3, 4))) void plain_fail(const char *file, int line,
                                                                      const char *format, ...)
{
    va_list list;
    va_start(list, format);
    printf("[  ERROR   ] ");
    vprintf(format, list);
    printf("\n[   LINE   ] %s:%d\n", file, line);
    va_end(list);
    plain_leave(PLAIN_FAILED);
}

static inline bool plain_same(const void *a, const void *b, size_t n, const char *file, int line,
                              bool want)
{
    if ((memcmp(a, b, n) == 0) != want)
        plain_fail(file, line, "%zu bytes are %s", n, want ? "not the same" : "the same");
    return true;
}

static inline void plain_equal(unsigned long long a, unsigned long long b, const char *file,
                               int line, bool want)
{
    if ((a == b) != want)
        plain_fail(file, line, "%#llx %s %#llx", a, want ? "!=" : "==", b);
}

static inline void plain_strings(const char *a, const char *b, const char *file, int line,
                                 bool want)
{
    if ((strcmp(a, b) == 0) != want)
        plain_fail(file, line, "\"%s\" %s \"%s\"", a, want ? "!=" : "==", b);
}

// Not inlined: what a function that calls setjmp keeps in registers may be lost.
__attribute__((weak, noinline)) int plain_run_one(void (*run)(void **state), void **state)
{
    const int end = setjmp(plain_escape);
    if (end == 0)
        run(state);
    return end;
}

__attribute__((weak, noinline)) int plain_run_fixture(plain_fixture fixture, void **state)
{
    if (setjmp(plain_escape) != 0)
        return -1;
    return fixture ? fixture(state) : 0;
}

static inline int plain_run(const struct CMUnitTest *tests, size_t n, plain_fixture before,
                            plain_fixture after)
{
    static const char *const words[] = {"       OK ", "  FAILED  ", "  SKIPPED "};
    void *state = NULL;
    size_t counts[3] = {0, 0, 0};
    if (plain_run_fixture(before, &state) != 0) {
        printf("[  FAILED  ] before the first test\n");
        return 1;
    }
    for (size_t i = 0; i < n; i++) {
        if (plain_filter && fnmatch(plain_filter, tests[i].name, 0) != 0)
            continue;
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(stdout);
        const int end = plain_run_one(tests[i].run, &state);
        printf("[%s] %s\n", words[end], tests[i].name);
        counts[end]++;
    }
    if (plain_run_fixture(after, &state) != 0) {
        printf("[  FAILED  ] after the last test\n");
        counts[PLAIN_FAILED]++;
    }
    printf("[==========] %zu passed, %zu failed, %zu skipped\n", counts[PLAIN_PASSED],
           counts[PLAIN_FAILED], counts[PLAIN_SKIPPED]);
    return (int)counts[PLAIN_FAILED];
}

#define PLAIN_HERE __FILE__, __LINE__
#define cmocka_unit_test(function)                                                                 \
    {                                                                                              \
#function, function                                                                        \
    }
#define cmocka_run_group_tests(tests, before, after)                                               \
    plain_run(tests, sizeof(tests) / sizeof(tests[0]), before, after)
#define cmocka_run_group_tests_name(name, tests, before, after)                                    \
    cmocka_run_group_tests(tests, before, after)
#define skip()                        plain_leave(PLAIN_SKIPPED)
#define print_message(...)            printf(__VA_ARGS__)
#define fail_msg(...)                 plain_fail(PLAIN_HERE, __VA_ARGS__)
#define assert_true(c)                ((c) ? (void)0 : plain_fail(PLAIN_HERE, "not so: %s", #c))
#define assert_null(p)                assert_true((p) == NULL)
#define assert_non_null(p)            assert_true((p) != NULL)
#define assert_ptr_equal(a, b)        assert_true((const void *)(a) == (const void *)(b))
#define assert_string_equal(a, b)     plain_strings(a, b, PLAIN_HERE, true)
#define assert_string_not_equal(a, b) plain_strings(a, b, PLAIN_HERE, false)
#define assert_int_equal(a, b)                                                                     \
    plain_equal((unsigned long long)(a), (unsigned long long)(b), PLAIN_HERE, true)
#define assert_int_not_equal(a, b)                                                                 \
    plain_equal((unsigned long long)(a), (unsigned long long)(b), PLAIN_HERE, false)
#define assert_memory_equal(a, b, n)     (void)plain_same(a, b, n, PLAIN_HERE, true)
#define assert_memory_not_equal(a, b, n) (void)plain_same(a, b, n, PLAIN_HERE, false)

#endif
