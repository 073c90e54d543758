// SPDX-License-Identifier: Apache-2.0
//
// Every interleaving of the ring and its sleep flags. The functions of proto/ring.h run here as
// they are, but on words whose loads, stores and fences are handed to a scheduler that tries each
// order in which they, and the CPUs' store buffers, could act. A lost wake-up is a state in which
// nobody can go on though somebody waits.
//
// The machine: each thread has a store buffer; relaxed stores leave it in any order (those to one
// word in theirs), a release store leaves last of those before it, a fence waits until it is empty.
// The same checker must find the hang in protocols that are known to be broken, else it proves
// nothing.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define KVQ_RING_MODEL
static uint32_t kvq_word_load(const uint32_t *word);
static uint32_t kvq_word_load_acquire(const uint32_t *word);
static void kvq_word_store(uint32_t *word, uint32_t value);
static void kvq_word_store_release(uint32_t *word, uint32_t value);
static void kvq_word_fence(void);

#include "proto/ring.h"
#include "tests/kits/unit.h"

enum {
    MAX_THREADS = 3, // thread 0 consumes and sleeps, the others produce
    RING_SLOTS = 4,
    BUFFERED = 8,
    STACK = 64 * 1024,
    MAX_DEPTH = 400,
    VISITED = 1 << 21,
};

// Ways to get it wrong; NONE is the protocol.
enum mistake {
    NONE,
    PUBLISHER_WITHOUT_FENCE,
    SLEEPER_WITHOUT_FENCE,
    SLEEPER_WITHOUT_SECOND_LOOK,
    PUBLISHER_CLEARS_FLAG,
    DRAIN_BEFORE_SLEEP,
};

struct store {
    uint32_t *word;
    uint32_t value;
    bool release;
};

struct thread {
    ucontext_t context;
    struct store buffer[BUFFERED];
    int buffered;
    uint64_t history; // hash of every value it has read: stands for its local state
    bool at_fence, at_wait, done;
};

struct ring {
    uint8_t slots[RING_SLOTS * KVQ_SLOT_BYTES];
    uint32_t tail, head, event;
};

struct choice {
    int taken, options;
};

static struct {
    enum mistake mistake;
    int producers, messages;
    struct ring rings[MAX_THREADS - 1];
    uint32_t flag;
    struct thread threads[MAX_THREADS];
    int current;
    ucontext_t scheduler;
    const char *failure;
} model;

static uint8_t stacks[MAX_THREADS][STACK];
static struct choice path[MAX_DEPTH];
static uint64_t *visited;

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

static void found(const char *what)
{
    model.failure = what;
}

// ---- What the threads do with memory: each step waits until the scheduler picks it ----

static struct thread *step(void)
{
    struct thread *me = &model.threads[model.current];
    swapcontext(&me->context, &model.scheduler);
    me->history = mix(me->history, 1);
    return me;
}

static uint32_t kvq_word_load(const uint32_t *word)
{
    struct thread *me = step();
    uint32_t value = *word;
    for (int i = 0; i < me->buffered; i++)
        if (me->buffer[i].word == word)
            value = me->buffer[i].value;
    me->history = mix(me->history, value);
    return value;
}

static uint32_t kvq_word_load_acquire(const uint32_t *word)
{
    return kvq_word_load(word);
}

static void buffer_store(uint32_t *word, uint32_t value, bool release)
{
    struct thread *me = step();
    if (me->buffered == BUFFERED)
        found("the model's store buffer is too small");
    else
        me->buffer[me->buffered++] = (struct store){word, value, release};
}

static void kvq_word_store(uint32_t *word, uint32_t value)
{
    buffer_store(word, value, false);
}

static void kvq_word_store_release(uint32_t *word, uint32_t value)
{
    buffer_store(word, value, true);
}

static void kvq_word_fence(void)
{
    struct thread *me = &model.threads[model.current];
    if (model.mistake == (model.current ? PUBLISHER_WITHOUT_FENCE : SLEEPER_WITHOUT_FENCE))
        return;
    me->at_fence = true;
    step();
    me->at_fence = false;
}

static bool event_set(void)
{
    for (int i = 0; i < model.producers; i++)
        if (model.rings[i].event)
            return true;
    return false;
}

static void event_write(struct ring *ring)
{
    step();
    ring->event = 1;
}

static void event_drain(void)
{
    for (int i = 0; i < model.producers; i++)
        model.rings[i].event = 0;
}

static void event_wait(void)
{
    struct thread *me = &model.threads[model.current];
    me->at_wait = true;
    step();
    me->at_wait = false;
    event_drain();
}

// ---- The two kinds of thread ----

static void produce(struct ring *ring)
{
    struct kvq_ring_tx tx = {ring->slots, RING_SLOTS, 0, 0, &ring->tail, &ring->head};
    for (int i = 0; i < model.messages; i++) {
        uint32_t room, payload = (uint32_t)i + 100;
        if (kvq_ring_room(&tx, &room) || room == 0) {
            found("an honest consumer's head was refused");
            return;
        }
        kvq_ring_write(&tx, 0, &payload, sizeof payload);
        kvq_ring_publish(&tx, 1);
        if (kvq_ring_sleeps(&model.flag)) {
            event_write(ring);
            if (model.mistake == PUBLISHER_CLEARS_FLAG)
                kvq_word_store(&model.flag, 0);
        }
    }
}

// Takes what the rings hold. Returns the number of messages.
static int take(struct kvq_ring_rx *rx)
{
    int taken = 0;
    for (int i = 0; i < model.producers; i++) {
        uint32_t ready, payload;
        if (kvq_ring_poll(&rx[i], &ready)) {
            found("an honest producer's tail was refused");
            return -1;
        }
        for (; ready > 0; ready--, taken++) {
            kvq_ring_copy(&rx[i], 0, &payload, sizeof payload);
            if (payload != rx[i].head + 100)
                found("a message came out of order");
            kvq_ring_consume(&rx[i], 1);
        }
    }
    return taken;
}

static void consume(void)
{
    struct kvq_ring_rx rx[MAX_THREADS - 1];
    int left = model.producers * model.messages;
    for (int i = 0; i < model.producers; i++)
        rx[i] = (struct kvq_ring_rx){model.rings[i].slots, RING_SLOTS,          0, 0,
                                     &model.rings[i].head, &model.rings[i].tail};
    while (left > 0 && !model.failure) {
        int taken = take(rx);
        left -= taken;
        if (taken)
            continue;
        kvq_ring_sleep_begin(&model.flag);
        taken = model.mistake == SLEEPER_WITHOUT_SECOND_LOOK ? 0 : take(rx);
        left -= taken;
        if (model.mistake == DRAIN_BEFORE_SLEEP) {
            step();
            event_drain();
        }
        if (!taken)
            event_wait();
        kvq_ring_sleep_end(&model.flag);
    }
}

static void thread_main(void)
{
    int self = model.current;
    if (self == 0)
        consume();
    else
        produce(&model.rings[self - 1]);
    model.threads[self].done = true;
    swapcontext(&model.threads[self].context, &model.scheduler);
}

// ---- The scheduler ----

static void restart(void)
{
    memset(model.rings, 0, sizeof model.rings);
    memset(model.threads, 0, sizeof model.threads);
    model.flag = 0;
    for (int i = 0; i <= model.producers; i++) {
        struct thread *t = &model.threads[i];
        getcontext(&t->context);
        t->context.uc_stack.ss_sp = stacks[i];
        t->context.uc_stack.ss_size = STACK;
        makecontext(&t->context, thread_main, 0);
        model.current = i;
        swapcontext(&model.scheduler, &t->context); // up to its first step
    }
}

static bool runnable(const struct thread *t)
{
    return !t->done && !(t->at_fence && t->buffered) && !(t->at_wait && !event_set());
}

// May the store leave the buffer now, with those before it still inside?
static bool may_leave(const struct thread *t, int index)
{
    for (int i = 0; i < index; i++)
        if (t->buffer[index].release || t->buffer[i].word == t->buffer[index].word)
            return false;
    return true;
}

static void leave(struct thread *t, int index)
{
    *t->buffer[index].word = t->buffer[index].value;
    t->buffered--;
    memmove(&t->buffer[index], &t->buffer[index + 1],
            (size_t)(t->buffered - index) * sizeof t->buffer[0]);
}

// Counts what could happen next; with `take` not negative, makes that one happen.
static int act(int take)
{
    int options = 0;
    for (int i = 0; i <= model.producers; i++) {
        struct thread *t = &model.threads[i];
        if (runnable(t) && options++ == take) {
            model.current = i;
            swapcontext(&model.scheduler, &t->context);
            return 0;
        }
        for (int b = 0; b < t->buffered; b++) {
            if (may_leave(t, b) && options++ == take) {
                leave(t, b);
                return 0;
            }
        }
    }
    return options;
}

static bool finished(void)
{
    for (int i = 0; i <= model.producers; i++)
        if (!model.threads[i].done)
            return false;
    return true;
}

// Two states with equal hashes are taken for the same; with 64 bits and under a million states the
// chance of one mistake is below one in ten million.
static uint64_t state_hash(void)
{
    uint64_t hash = mix(1, model.flag);
    for (int i = 0; i < model.producers; i++) {
        hash = mix(hash, model.rings[i].tail);
        hash = mix(hash, model.rings[i].head);
        hash = mix(hash, model.rings[i].event);
    }
    for (int i = 0; i <= model.producers; i++) {
        const struct thread *t = &model.threads[i];
        hash = mix(hash, t->history);
        hash = mix(hash, (uint64_t)t->buffered);
        for (int b = 0; b < t->buffered; b++) {
            hash = mix(hash, (uint64_t)((uint8_t *)t->buffer[b].word - (uint8_t *)&model));
            hash = mix(hash, t->buffer[b].value * 2u + t->buffer[b].release);
        }
    }
    return hash ? hash : 1;
}

static bool seen_before(uint64_t hash)
{
    size_t slot = hash % VISITED;
    for (; visited[slot]; slot = (slot + 1) % VISITED)
        if (visited[slot] == hash)
            return true;
    visited[slot] = hash;
    return false;
}

// Runs from the start along the first `depth` choices, then on by the first option each time
// until a known state or the end. Returns the length of the path.
static int run(int depth, size_t *states)
{
    restart();
    for (int i = 0; i < depth; i++)
        act(path[i].taken);
    while (!model.failure && !finished() && depth < MAX_DEPTH) {
        if (seen_before(state_hash()))
            return depth;
        ++*states;
        path[depth] = (struct choice){0, act(-1)};
        if (path[depth].options == 0) {
            found("a wake-up was lost: a thread sleeps though a message is there");
            return depth;
        }
        act(0);
        depth++;
    }
    if (depth == MAX_DEPTH)
        found("a path is longer than the model allows");
    return depth;
}

// Tries everything. NULL, or what went wrong first.
static const char *explore(enum mistake mistake, int producers, int messages, size_t *states)
{
    memset(&model, 0, sizeof model);
    model.mistake = mistake;
    model.producers = producers;
    model.messages = messages;
    *states = 0;
    visited = calloc(VISITED, sizeof *visited);
    assert_non_null(visited);
    int depth = run(0, states);
    while (!model.failure) {
        while (depth > 0 && path[depth - 1].taken + 1 >= path[depth - 1].options)
            depth--;
        if (depth == 0)
            break;
        path[depth - 1].taken++;
        assert_true(*states < VISITED / 2);
        depth = run(depth, states);
    }
    free(visited);
    return model.failure;
}

static void expect_sound(int producers, int messages)
{
    size_t states;
    const char *failure = explore(NONE, producers, messages, &states);
    print_message("%d producers, %d messages each: %zu states\n", producers, messages, states);
    if (failure)
        fail_msg("%s", failure);
    assert_true(states > 50);
}

PLAIN_TEST(test_one_producer)
{
    expect_sound(1, 1);
    expect_sound(1, 2);
    expect_sound(1, 3);
}

PLAIN_TEST(test_two_producers)
{
    expect_sound(2, 1);
}

PLAIN_TEST(test_broken_protocols_are_found)
{
    for (int mistake = PUBLISHER_WITHOUT_FENCE; mistake <= DRAIN_BEFORE_SLEEP; mistake++) {
        size_t states;
        const char *failure = explore((enum mistake)mistake, 1, 3, &states);
        if (!failure)
            fail_msg("mistake %d was not found in %zu states", mistake, states);
        assert_says(failure, "wake-up was lost");
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
