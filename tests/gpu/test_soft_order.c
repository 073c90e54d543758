// SPDX-License-Identifier: Apache-2.0
//
// Order on the software driver: random programs over several streams, made so that events,
// timeline words, the default stream and the host order just what has to be ordered, must give what
// doing everything in turn gives, whatever the scheduler delays. The same programs without that
// order must now and then give something else, or the scheduler tries nothing.
//
//     test_soft_order [SEEDS [FIRST]]
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kits/soft_kit.h"

enum { STREAMS = 6, CELLS = 5, WORDS = 1280, STEPS = 40, EVENTS = 4, CELL_BYTES = 8 * WORDS };

#ifdef __SANITIZE_THREAD__
static unsigned seeds = 100; // which take as long
#else
static unsigned seeds = 500;
#endif
static unsigned first_seed = 1;

// How far a stream knows each stream to have come.
struct clock {
    unsigned of[STREAMS];
};

struct cell {
    uint64_t value;       // in turn
    int writer;           // the latest, -1: none
    unsigned written;     // when, on its stream
    struct clock readers; // since then
};

struct program {
    uint64_t random;
    bool ordered;
    struct kvq_gpu_stream *streams[STREAMS]; // 0: the default one; 1 and 2 block; the rest do not
    struct clock knows[STREAMS], host;
    struct cell cells[CELLS];
    struct kvq_gpu_event *events[EVENTS];
    uint64_t timeline[STREAMS];
    kvq_gpu_ptr memory, words;
    uint64_t *pinned;
};

static uint64_t draw(struct program *p, uint64_t below)
{
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    return (p->random >> 33) % below;
}

static void learn(struct clock *to, const struct clock *from)
{
    for (int i = 0; i < STREAMS; i++)
        to->of[i] = to->of[i] > from->of[i] ? to->of[i] : from->of[i];
}

// Something is given to a stream: what came before it by the rules of the default stream and by
// the host having waited.
static unsigned given(struct program *p, int s)
{
    learn(&p->knows[s], &p->host);
    if (s == 0) {
        learn(&p->knows[0], &p->knows[1]);
        learn(&p->knows[0], &p->knows[2]);
    } else if (s <= 2) {
        learn(&p->knows[s], &p->knows[0]);
    }
    return ++p->knows[s].of[s];
}

static kvq_gpu_ptr place(const struct program *p, int cell)
{
    return p->memory + (uint64_t)cell * CELL_BYTES;
}

// ---- Order ----

// Makes what is given to `s` from now on come after what was given to `t`, one way or another.
static void order(struct program *p, int s, int t)
{
    struct kvq_gpu_event *event = p->events[draw(p, EVENTS)];
    const kvq_gpu_ptr word = p->words + 8 * (uint64_t)t;
    switch (draw(p, 5)) {
    case 0:
        OK(drv.stream_sync(p->streams[t]));
        learn(&p->host, &p->knows[t]);
        return;
    case 1:
        given(p, t);
        OK(drv.event_record(event, p->streams[t]));
        OK(drv.event_sync(event));
        learn(&p->host, &p->knows[t]);
        return;
    case 2:
        given(p, t);
        OK(drv.stream_write64(p->streams[t], word, ++p->timeline[t], 0));
        given(p, s);
        OK(drv.stream_wait64(p->streams[s], word, p->timeline[t], KVQ_GPU_WAIT_AT_LEAST));
        break;
    default:
        given(p, t);
        OK(drv.event_record(event, p->streams[t]));
        given(p, s);
        OK(drv.stream_wait(p->streams[s], event, 0));
    }
    learn(&p->knows[s], &p->knows[t]);
}

static void after(struct program *p, int s, int t, unsigned when)
{
    struct clock now = p->knows[s];
    learn(&now, &p->host);
    if (p->ordered && t >= 0 && t != s && now.of[t] < when)
        order(p, s, t);
}

static void before_reading(struct program *p, int s, int cell)
{
    after(p, s, p->cells[cell].writer, p->cells[cell].written);
}

static void before_writing(struct program *p, int s, int cell)
{
    before_reading(p, s, cell);
    for (int t = 0; t < STREAMS; t++)
        after(p, s, t, p->cells[cell].readers.of[t]);
}

static void has_written(struct program *p, int s, int cell, unsigned when)
{
    p->cells[cell].writer = s;
    p->cells[cell].written = when;
    memset(&p->cells[cell].readers, 0, sizeof p->cells[cell].readers);
}

// ---- Steps ----

struct mix {
    uint64_t *to;
    const uint64_t *from;
};

static void do_mix(void *what)
{
    const struct mix *m = what;
    for (int i = 0; i < WORDS; i++)
        m->to[i] = m->to[i] * 31 + m->from[i];
}

// `mixes` holds what host functions are given, until all is done.
static void step(struct program *p, struct mix *mix, uint64_t *pinned)
{
    const int s = (int)draw(p, STREAMS), to = (int)draw(p, CELLS);
    const int from = (to + 1 + (int)draw(p, CELLS - 1)) % CELLS;
    const unsigned kind = (unsigned)draw(p, 4), value = (unsigned)draw(p, 1000);
    struct kvq_gpu_stream *const on = p->streams[s];
    before_writing(p, s, to);
    if (kind < 2)
        before_reading(p, s, from);
    const unsigned when = given(p, s);
    switch (kind) {
    case 0:
        OK(drv.copy_device(place(p, to), place(p, from), CELL_BYTES, on));
        p->cells[to].value = p->cells[from].value;
        break;
    case 1:
        *mix = (struct mix){(uint64_t *)place(p, to), (const uint64_t *)place(p, from)};
        OK(drv.launch_host(on, do_mix, mix));
        p->cells[to].value = p->cells[to].value * 31 + p->cells[from].value;
        break;
    case 2:
        OK(drv.fill32(place(p, to), value, 2 * WORDS, on));
        p->cells[to].value = value | (uint64_t)value << 32;
        break;
    default:
        for (int i = 0; i < WORDS; i++)
            pinned[i] = value;
        OK(drv.copy_in(place(p, to), pinned, CELL_BYTES, on));
        p->cells[to].value = value;
    }
    if (kind < 2)
        p->cells[from].readers.of[s] = when;
    has_written(p, s, to, when);
}

static void begin(struct program *p, uint64_t seed, bool ordered)
{
    memset(p, 0, sizeof *p);
    p->random = seed * 0x9e3779b97f4a7c15u + 1;
    p->ordered = ordered;
    for (int i = 0; i < CELLS; i++)
        p->cells[i].writer = -1;
    for (int i = 1; i < STREAMS; i++)
        OK(drv.stream_create(&p->streams[i], i <= 2 ? 0 : KVQ_GPU_STREAM_OWN));
    for (int i = 0; i < EVENTS; i++)
        OK(drv.event_create(&p->events[i], KVQ_GPU_EVENT_UNTIMED));
    OK(drv.memory_alloc(&p->memory, CELLS * CELL_BYTES));
    OK(drv.memory_alloc(&p->words, 4096));
    OK(drv.host_alloc((void **)&p->pinned, STEPS * CELL_BYTES, 0));
    OK(drv.fill8(p->memory, 0, CELLS * CELL_BYTES, NULL));
    OK(drv.fill8(p->words, 0, 4096, NULL));
    OK(drv.context_sync());
    soft_seed(seed);
}

// Words that are not what they should be.
static unsigned end(struct program *p)
{
    unsigned wrong = 0;
    OK(drv.context_sync());
    soft_seed(0);
    for (int i = 0; i < CELLS; i++)
        for (int j = 0; j < WORDS; j++)
            wrong += ((const uint64_t *)place(p, i))[j] != p->cells[i].value;
    for (int i = 1; i < STREAMS; i++)
        OK(drv.stream_destroy(p->streams[i]));
    for (int i = 0; i < EVENTS; i++)
        OK(drv.event_destroy(p->events[i]));
    OK(drv.memory_free(p->memory));
    OK(drv.memory_free(p->words));
    OK(drv.host_free(p->pinned));
    return wrong;
}

static unsigned run(uint64_t seed, bool ordered)
{
    static struct mix mixes[STEPS];
    struct program p;
    begin(&p, seed, ordered);
    for (int i = 0; i < STEPS; i++)
        step(&p, &mixes[i], p.pinned + i * WORDS);
    return end(&p);
}

static void test_order_holds(void **state)
{
    for (uint64_t seed = first_seed; seed < first_seed + seeds; seed++)
        if (run(seed, true))
            fail_msg("seed %llu: repeat it with test_soft_order 1 %llu", (unsigned long long)seed,
                     (unsigned long long)seed);
    (void)state;
}

static void test_disorder_shows(void **state)
{
    unsigned wrong = 0;
#if defined(__SANITIZE_THREAD__)
    skip(); // races are what this is about
#endif
    for (uint64_t seed = 1; seed <= 40; seed++)
        wrong += run(seed, false) != 0;
    assert_true(wrong >= 10);
    (void)state;
}

// ---- How many orders there are ----

enum { RACERS = 4 };
static struct {
    int order[RACERS], n;
} finish;

static void arrive(void *number)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    finish.order[finish.n++] = (int)(intptr_t)number;
    pthread_mutex_unlock(&lock);
}

static unsigned race(uint64_t seed)
{
    struct kvq_gpu_stream *streams[RACERS];
    unsigned code = 0;
    finish.n = 0;
    for (int i = 0; i < RACERS; i++)
        OK(drv.stream_create(&streams[i], KVQ_GPU_STREAM_OWN));
    soft_seed(seed);
    for (int i = 0; i < RACERS; i++)
        OK(drv.launch_host(streams[i], arrive, (void *)(intptr_t)i));
    OK(drv.context_sync());
    soft_seed(0);
    for (int i = 0; i < RACERS; i++) {
        code = code * RACERS + (unsigned)finish.order[i];
        OK(drv.stream_destroy(streams[i]));
    }
    return code;
}

// Of the 24 orders of four streams' work, more than a few come up.
static void test_many_orders(void **state)
{
    bool seen[256] = {false};
    unsigned different = 0;
    for (uint64_t seed = 1; seed <= 120; seed++) {
        const unsigned code = race(seed);
        different += !seen[code];
        seen[code] = true;
    }
    assert_true(different >= 6);
    (void)state;
}

// The same program sleeps now and then with a seed, and never without one.
static void test_seeds_delay(void **state)
{
    const volatile uint32_t *naps = &soft_control()->naps;
    kvq_gpu_ptr at;
    OK(drv.memory_alloc(&at, 4096));
    for (unsigned seed = 0; seed < 2; seed++) {
        const uint32_t slept = *naps;
        soft_seed(seed);
        for (unsigned i = 0; i < 64; i++)
            OK(drv.fill32(at, i, 1024, NULL));
        OK(drv.context_sync());
        soft_seed(0);
        assert_true(seed ? *naps - slept >= 4 : *naps == slept);
    }
    OK(drv.memory_free(at));
    (void)state;
}

static void test_nothing_left(void **state)
{
    const struct kvq_soft_counts now = soft_counts();
    assert_int_equal(now.allocations + now.streams + now.events + now.host + now.bytes, 0);
    (void)state;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_holds),  cmocka_unit_test(test_disorder_shows),
        cmocka_unit_test(test_many_orders),  cmocka_unit_test(test_seeds_delay),
        cmocka_unit_test(test_nothing_left),
    };
    seeds = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : seeds;
    first_seed = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : first_seed;
    soft_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
