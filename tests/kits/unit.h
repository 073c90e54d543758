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

// A test between the file's, or its kit's, setup and teardown.
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

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
