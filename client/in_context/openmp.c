// SPDX-License-Identifier: Apache-2.0
//
// Items on the threads of an OpenMP runtime that the process has already. Its threads spin for a
// while after each region, on the very processors that threads of ours would need; given the items,
// they are awake for them instead.
//
// The runtime is reached by GOMP_parallel, the function that GNU's compiler calls for a region
// (libgomp's ABI; LLVM's and Intel's runtimes have the function too). A number of threads of 0 asks
// for as many as the engine's own regions have: with another number GNU's runtime would end threads
// that its next region must start again.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <string.h>

#include "proto/sync.h"

typedef void gomp_parallel_fn(void (*body)(void *arg), void *arg, unsigned threads, unsigned flags);

struct region {
    void (*item)(void *arg, uint32_t i);
    void *arg;
    uint32_t n;
    uint32_t taken; // a word
};

static void take_items(void *arg)
{
    struct region *r = arg;
    uint32_t i;
    while ((i = kvq_word_add(&r->taken, 1) - 1) < r->n)
        r->item(r->arg, i);
}

void kvq_local_openmp(void *gomp_parallel, uint32_t n, void (*item)(void *arg, uint32_t i),
                      void *arg)
{
    gomp_parallel_fn *run;
    struct region region = {.item = item, .arg = arg, .n = n};
    assert(gomp_parallel && item);
    static_assert(sizeof run == sizeof gomp_parallel, "POSIX");
    memcpy(&run, &gomp_parallel, sizeof run); // ISO C has no conversion
    run(take_items, &region, 0, 0);
    assert(kvq_word_load(&region.taken) >= n);
}
