// SPDX-License-Identifier: Apache-2.0
//
// Who may go and who waits: of names, and of those who write to the store. Steps are held here as
// long as the test likes.
#include "daemon/store/queue.h"
#include "tests/kits/unit.h"

enum { HOLDS = 24, STEPS = 20000 };

static struct kvq__names names;
static struct kvq__hold holds[HOLDS];
static uint32_t went[HOLDS], n_went; // in which order

static void hold_goes(struct kvq__hold *h)
{
    assert_true(h->held);
    assert_true(n_went < HOLDS);
    went[n_went++] = (uint32_t)(h - holds);
}

static int setup(void **state)
{
    memset(holds, 0, sizeof holds);
    kvq__names_init(&names);
    n_went = 0;
    return 0;
}

static void take(uint32_t i, enum kvq__hold_kind kind, const char *name)
{
    holds[i].kind = kind;
    kvq__name_take(&names, &holds[i], "ns", name, hold_goes);
}

static void assert_went(const char *expected)
{
    char text[HOLDS + 1] = "";
    for (uint32_t i = 0; i < n_went; i++)
        text[i] = (char)('a' + went[i]);
    assert_string_equal(text, expected);
}

// Those who look do so side by side; whoever drops waits for them, and whoever looks after that
// waits for the drop.
TEST_BETWEEN(test_drop_between_looks, setup, NULL)
{
    take(0, KVQ__HOLD_LOOK, "it");
    take(1, KVQ__HOLD_LOOK, "it");
    assert_went("ab");
    take(2, KVQ__HOLD_ALONE, "it");
    take(3, KVQ__HOLD_LOOK, "it");
    take(4, KVQ__HOLD_LOOK, "it");
    take(5, KVQ__HOLD_ALONE, "it");
    assert_went("ab");
    kvq__name_give(&names, &holds[1]);
    assert_went("ab");
    kvq__name_give(&names, &holds[0]);
    assert_went("abc");
    kvq__name_give(&names, &holds[2]);
    assert_went("abcde");
    kvq__name_give(&names, &holds[3]);
    kvq__name_give(&names, &holds[4]);
    assert_went("abcdef");
    kvq__name_give(&names, &holds[5]);
    assert_true(kvq__names_empty(&names));
}

TEST_BETWEEN(test_other_names, setup, NULL)
{
    struct kvq__hold elsewhere = {.kind = KVQ__HOLD_ALONE};
    take(0, KVQ__HOLD_ALONE, "it");
    for (uint32_t i = 1; i < HOLDS - 1; i++) {
        char name[16];
        snprintf(name, sizeof name, "it%u", i);
        take(i, KVQ__HOLD_ALONE, name);
    }
    assert_int_equal(n_went, HOLDS - 1);
    uint32_t before = n_went;
    n_went = 0;
    kvq__name_take(&names, &elsewhere, "other", "it", hold_goes); // another namespace's
    assert_true(elsewhere.held);
    assert_int_equal(before, HOLDS - 1);
}

// Whoever stops waiting lets in those who waited for it alone.
TEST_BETWEEN(test_giving_up, setup, NULL)
{
    take(0, KVQ__HOLD_LOOK, "it");
    take(1, KVQ__HOLD_ALONE, "it");
    take(2, KVQ__HOLD_LOOK, "it");
    assert_went("a");
    kvq__name_give(&names, &holds[1]);
    assert_went("ac");
    kvq__name_give(&names, &holds[1]); // it has none
    assert_went("ac");
}

static bool clash(const struct kvq__hold *a, const struct kvq__hold *b)
{
    return strcmp(a->name, b->name) == 0 &&
           (a->kind == KVQ__HOLD_ALONE || b->kind == KVQ__HOLD_ALONE);
}

static uint64_t came[HOLDS]; // when each did

static void check_holds(void)
{
    for (uint32_t i = 0; i < HOLDS; i++) {
        bool waits_for_somebody = false;
        for (uint32_t j = 0; j < HOLDS && holds[i].queued; j++) {
            if (j == i || !holds[j].queued || !clash(&holds[i], &holds[j]))
                continue;
            assert_false(holds[i].held && holds[j].held);
            waits_for_somebody |= came[j] < came[i];
        }
        if (holds[i].queued) // it goes when nobody who came before is in its way, and not before
            assert_int_equal(holds[i].held, !waits_for_somebody);
    }
}

static uint32_t below(uint32_t n)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state % n);
}

static void goes(struct kvq__hold *h)
{
}

TEST_BETWEEN(test_at_random, setup, NULL)
{
    static const char *const called[] = {"a", "b", "c"};
    for (uint64_t i = 0; i < STEPS; i++) {
        struct kvq__hold *h = &holds[below(HOLDS)];
        if (h->queued) {
            kvq__name_give(&names, h);
        } else {
            came[h - holds] = i;
            h->kind = below(3) ? KVQ__HOLD_LOOK : KVQ__HOLD_ALONE;
            kvq__name_take(&names, h, "ns", called[below(3)], goes);
        }
        check_holds();
    }
    for (uint32_t i = 0; i < HOLDS; i++)
        kvq__name_give(&names, &holds[i]);
    assert_true(kvq__names_empty(&names));
}

// ---- Turns ----

enum { TURNS = 8 };
static struct kvq__turns turns;
static struct kvq__write_turn waiting[TURNS];
static char order[TURNS + 1];

static void turn_comes(struct kvq__write_turn *t)
{
    assert_ptr_equal(turns.now, t);
    order[strlen(order)] = (char)('a' + (t - waiting));
}

static void turn_begins(struct kvq__write_turn *t)
{
    order[strlen(order)] = (char)('a' + (t - waiting));
}

static void end_turn(void)
{
    kvq__turn_end(&turns, turns.now);
}

// The first n wait. `most` may write at a time, `share` of one namespace.
static void wait_anew(uint32_t most, uint32_t share, const char *const ns[TURNS], uint32_t n,
                      void (*comes)(struct kvq__write_turn *t))
{
    memset(waiting, 0, sizeof waiting);
    memset(order, 0, sizeof order);
    kvq__turns_init(&turns, most, share);
    for (uint32_t i = 0; i < n; i++)
        kvq__turn_wait(&turns, &waiting[i], ns[i], comes);
}

// One namespace with a long queue does not keep the others waiting: they have every other turn.
PLAIN_TEST(test_turns)
{
    static const char *const ns[TURNS] = {"x", "x", "x", "x", "x", "y", "z", "y"};
    wait_anew(1, 1, ns, TURNS, turn_comes);
    assert_string_equal(order, "a");
    assert_int_equal(turns.n, TURNS - 1);
    while (turns.now)
        end_turn();
    assert_string_equal(order, "abfgchde");
    assert_int_equal(turns.n, 0);
    kvq__turn_wait(&turns, &waiting[0], "x", turn_comes);
    assert_ptr_equal(turns.now, &waiting[0]);
    end_turn();
}

// Whoever waits no more, as the first of its namespace or behind it, leaves all others their order.
PLAIN_TEST(test_leaving)
{
    static const char *const ns[TURNS] = {"x", "x", "x", "x", "y", "x", "y", "x"};
    wait_anew(1, 1, ns, TURNS, turn_comes);
    assert_ptr_equal(kvq__turn_after(&turns, "x", NULL), &waiting[1]);
    assert_ptr_equal(kvq__turn_after(&turns, "x", &waiting[1]), &waiting[2]);
    assert_ptr_equal(kvq__turn_after(&turns, "x", &waiting[2]), &waiting[3]);
    assert_null(kvq__turn_after(&turns, "x", &waiting[7]));
    assert_null(kvq__turn_after(&turns, "z", NULL));
    kvq__turn_leave(&turns, &waiting[1]); // the first, with others behind it
    kvq__turn_leave(&turns, &waiting[5]); // one of these
    assert_ptr_equal(kvq__turn_after(&turns, "x", NULL), &waiting[2]);
    assert_ptr_equal(kvq__turn_after(&turns, "x", &waiting[3]), &waiting[7]);
    end_turn();
    assert_string_equal(order, "ac"); // whose namespace came first
    kvq__turn_leave(&turns, &waiting[4]);
    kvq__turn_leave(&turns, &waiting[6]); // the last of its namespace
    assert_int_equal(turns.n, 2);
    kvq__turn_wait(&turns, &waiting[1], "x", turn_comes);
    while (turns.now)
        end_turn();
    assert_string_equal(order, "acdhb");
    assert_int_equal(turns.n + turns.under_way, 0);
}

// Several at a time: the one who came to the end makes room for the next namespace's first.
PLAIN_TEST(test_several_turns)
{
    static const char *const ns[TURNS] = {"x", "x", "x", "x", "x", "x", "x", "y"};
    wait_anew(2, 2, ns, TURNS, turn_begins);
    assert_string_equal(order, "ab");
    kvq__turn_end(&turns, &waiting[1]);
    assert_string_equal(order, "abc");
    kvq__turn_end(&turns, &waiting[0]);
    assert_string_equal(order, "abch");
    assert_int_equal(turns.under_way, 2);
    while (turns.under_way)
        kvq__turn_end(&turns, &waiting[order[strlen(order) - turns.under_way] - 'a']);
    assert_string_equal(order, "abchdefg");
}

// What one namespace reads, however slowly, leaves room for the others.
PLAIN_TEST(test_room_for_others)
{
    static const char *const ns[TURNS] = {"x", "x", "x", "y", "x", "y", "z", "y"};
    wait_anew(3, 2, ns, 3, turn_begins);
    assert_string_equal(order, "ab"); // nobody else waits, and still
    for (uint32_t i = 3; i < TURNS; i++)
        kvq__turn_wait(&turns, &waiting[i], ns[i], turn_begins);
    assert_string_equal(order, "abd");
    kvq__turn_end(&turns, &waiting[3]); // x has come first, and has its share
    assert_string_equal(order, "abdf");
    kvq__turn_end(&turns, &waiting[5]);
    assert_string_equal(order, "abdfg");
    kvq__turn_end(&turns, &waiting[0]);
    assert_string_equal(order, "abdfgc");
    kvq__turn_end(&turns, &waiting[6]);
    assert_string_equal(order, "abdfgch");
    kvq__turn_end(&turns, &waiting[7]);
    assert_string_equal(order, "abdfgch"); // only x waits
    kvq__turn_end(&turns, &waiting[1]);
    assert_string_equal(order, "abdfgche");
    kvq__turn_end(&turns, &waiting[2]);
    kvq__turn_end(&turns, &waiting[4]);
    assert_int_equal(turns.under_way + turns.n, 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
