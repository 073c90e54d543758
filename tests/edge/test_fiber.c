// SPDX-License-Identifier: Apache-2.0
//
// Fibers: who runs when, what their stacks are, and what becomes of them.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/runtime/fiber.h"
#include "tests/kits/unit.h"

// With a sanitizer, which needs the address space and reports what these tests do on purpose.
#if defined(KVQ_ASAN) || defined(KVQ_TSAN)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

enum { MANY = 200 };

static struct kvq__fibers fibers;
static char said[4096]; // what fibers have said, in order

static void say(const char *what)
{
    size_t used = strlen(said);
    snprintf(said + used, sizeof said - used, "%s%s", used ? " " : "", what);
}

struct actor {
    struct kvq__fiber fiber;
    const char *name;
    uint32_t waits, ended;
    struct actor *wakes; // when it is woken; NULL: nobody
};

static int setup(void **state)
{
    said[0] = 0;
    return kvq__fibers_open(&fibers);
}

static int teardown(void **state)
{
    kvq__fibers_close(&fibers); // asserts that none is left
    return 0;
}

static void act(void *context)
{
    struct actor *a = context;
    char text[32];
    for (uint32_t i = 0; i < a->waits; i++) {
        snprintf(text, sizeof text, "%s%u", a->name, i);
        say(text);
        kvq__fiber_wait(&fibers);
        if (a->wakes)
            kvq__fiber_wake(&fibers, &a->wakes->fiber);
    }
    snprintf(text, sizeof text, "%s.", a->name);
    say(text);
}

static void has_ended(void *context)
{
    struct actor *a = context;
    assert_null(fibers.now); // on the thread's own stack
    assert_int_equal(a->fiber.state, KVQ__FIBER_NONE);
    a->ended++;
}

static void begin(struct actor *a)
{
    assert_int_equal(kvq__fiber_make(&fibers, &a->fiber), 0);
    kvq__fiber_run(&fibers, &a->fiber, act, has_ended, a);
}

TEST(runs_until_it_waits_and_on_when_woken)
{
    struct actor a = {.name = "a", .waits = 2}, b = {.name = "b"};
    begin(&a);
    assert_string_equal(said, "a0");
    assert_int_equal(a.fiber.state, KVQ__FIBER_WAITING);
    begin(&b);
    assert_string_equal(said, "a0 b.");
    assert_int_equal(b.ended, 1);
    kvq__fiber_wake(&fibers, &a.fiber);
    assert_string_equal(said, "a0 b. a1");
    kvq__fiber_wake(&fibers, &a.fiber);
    assert_string_equal(said, "a0 b. a1 a.");
    assert_int_equal(a.ended, 1);
}

// Who is woken by a fiber goes on behind it, in the order of waking: no stack stands on another.
TEST(a_fiber_that_wakes_others_goes_on_first)
{
    struct actor c = {.name = "c", .waits = 1}, b = {.name = "b", .waits = 1, .wakes = &c};
    struct actor a = {.name = "a", .waits = 2, .wakes = &b};
    begin(&c);
    begin(&b);
    begin(&a);
    said[0] = 0;
    kvq__fiber_wake(&fibers, &a.fiber); // wakes b, and says that it goes on before b does
    assert_string_equal(said, "a1 b. c.");
    a.wakes = NULL;
    kvq__fiber_wake(&fibers, &a.fiber);
    assert_int_equal(a.ended + b.ended + c.ended, 3);
}

struct starter {
    struct kvq__fiber fiber;
    struct actor first, last;
};

static void start_the_first(void *context)
{
    struct starter *s = context;
    begin(&s->first);
    say("started");
}

static void start_the_last(void *context)
{
    struct starter *s = context;
    begin(&s->last);
    say("ended");
}

// By one that runs, and by what comes once it has ended: both run behind it.
TEST(fibers_start_fibers)
{
    struct starter s = {.first = {.name = "a"}, .last = {.name = "b"}};
    assert_int_equal(kvq__fiber_make(&fibers, &s.fiber), 0);
    kvq__fiber_run(&fibers, &s.fiber, start_the_first, start_the_last, &s);
    assert_string_equal(said, "started ended a. b.");
    assert_int_equal(s.first.ended + s.last.ended, 2);
}

// Stacks are kept for the next ones, and no more of them than are worth keeping.
TEST(stacks_are_used_again)
{
    struct actor *all = calloc(MANY, sizeof *all);
    assert_non_null(all);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < MANY; i++) {
            all[i].name = "";
            all[i].waits = 1;
            begin(&all[i]);
            said[0] = 0;
        }
        assert_int_equal(fibers.n_stacks, MANY);
        assert_int_equal(fibers.n_kept, 0);
        for (uint32_t i = 0; i < MANY; i++)
            kvq__fiber_wake(&fibers, &all[(i * 7 + round) % MANY].fiber); // 7 and MANY: coprime
        assert_int_equal(fibers.n_stacks, KVQ__FIBER_STACKS_KEPT);
    }
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(all[i].ended, 3);
    free(all);
}

TEST(one_that_never_runs_gives_its_stack_back)
{
    struct kvq__fiber f = {0};
    assert_int_equal(kvq__fiber_make(&fibers, &f), 0);
    kvq__fiber_unmake(&fibers, &f);
    kvq__fiber_unmake(&fibers, &f);
    assert_int_equal(fibers.n_kept, 1);
}

TEST(without_memory_none_is_made)
{
    if (SANITIZED)
        skip();
    struct rlimit before, none;
    struct kvq__fiber f = {0};
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    none = (struct rlimit){.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_AS, &none), 0);
    int rc = kvq__fiber_make(&fibers, &f);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_true(rc < 0);
    assert_int_equal(f.state, KVQ__FIBER_NONE);
    assert_int_equal(fibers.n_stacks, 0);
}

// Touches more of the stack than there is, from the top down.
static void use_too_much(void *context)
{
    volatile char here;
    volatile char *at = &here;
    for (size_t i = 0; i < KVQ__FIBER_STACK + 4096; i += 512)
        *(at - i) = 1;
}

static void no_end(void *context)
{
}

TEST(one_that_needs_too_much_ends_the_process)
{
    int status = 0;
    if (SANITIZED)
        skip();
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct kvq__fiber f = {0};
        struct rlimit no_core = {0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGSEGV, SIG_DFL); // cmocka catches it
        if (kvq__fiber_make(&fibers, &f) == 0)
            kvq__fiber_run(&fibers, &f, use_too_much, no_end, NULL);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

int main(void)
{
    return run_all(NULL, NULL);
}
