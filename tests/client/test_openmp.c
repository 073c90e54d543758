// SPDX-License-Identifier: Apache-2.0
//
// Items on the threads of an OpenMP runtime: what the runtime's GOMP_parallel is asked for, and
// that every item runs once, however many threads it has.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client/kvq.h"
#include "proto/sync.h"

enum { MOST = 8, ITEMS = 100 };

static unsigned team; // threads of the fake runtime
static uint32_t regions;

struct body {
    void (*run)(void *arg);
    void *arg;
};

static void *run_body(void *context)
{
    const struct body *b = context;
    b->run(b->arg);
    return NULL;
}

// As a runtime's: each thread of the team runs the body once, the caller among them.
static void fake_parallel(void (*run)(void *arg), void *arg, unsigned threads, unsigned flags)
{
    pthread_t others[MOST];
    struct body body = {run, arg};
    regions++;
    assert_int_equal(threads, 0); // as many as the engine's own regions have
    assert_int_equal(flags, 0);
    for (unsigned i = 1; i < team; i++)
        assert_int_equal(pthread_create(&others[i], NULL, run_body, &body), 0);
    run(arg);
    for (unsigned i = 1; i < team; i++)
        pthread_join(others[i], NULL);
}

static void count_item(void *arg, uint32_t i)
{
    uint32_t *counts = arg;
    assert_true(i < ITEMS);
    kvq_word_add(&counts[i], 1);
}

static void test_every_item_once(void **state)
{
    void (*run)(void (*)(void *), void *, unsigned, unsigned) = fake_parallel;
    void *address;
    (void)state;
    memcpy(&address, &run, sizeof address);
    regions = 0;
    for (team = 1; team <= MOST; team++)
        for (uint32_t n = 1; n <= ITEMS; n += 33) {
            uint32_t counts[ITEMS] = {0};
            kvq_local_openmp(address, n, count_item, counts);
            for (uint32_t i = 0; i < ITEMS; i++)
                assert_int_equal(counts[i], i < n);
        }
    assert_int_equal(regions, MOST * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_item_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
