// SPDX-License-Identifier: Apache-2.0
//
// Requests side by side: a server that answers nobody until all of them are there shows that they
// are sent so, and what it answers then, what becomes of each when one of them fails.
#include "storage/remote_internal.h"
#include "tests/store/remote_check.h"

enum { LANES = 4, NEVER_MS = 600000 };

// GETs of the keys "0", "1" .., and the first byte of what came for each.
struct gets {
    uint32_t n, next, taken;
    uint32_t again;              // how often the first good answer is refused
    uint32_t lane_of[LANES + 1]; // which request a lane has
    char key[LANES][8], got[8];
};

static int make_get(void *context, uint32_t lane, struct kvq__request *request)
{
    struct gets *g = context;
    assert_true(lane < LANES);
    if (g->next == g->n)
        return 1;
    g->lane_of[lane] = g->next;
    snprintf(g->key[lane], sizeof g->key[lane], "%u", g->next++);
    *request =
        (struct kvq__request){.method = "GET", .key = g->key[lane], .max = 100, .watched = true};
    return 0;
}

static int take_get(void *context, uint32_t lane, struct kvq__answer *answer)
{
    struct gets *g = context;
    if (g->again > 0) {
        g->again--;
        return 1;
    }
    assert_int_equal(answer->bytes, 1);
    g->got[g->lane_of[lane]] = answer->body[0];
    g->taken++;
    return 0;
}

// Runs n GETs over so many connections against a server that waits for as many.
static int run_gets(struct gets *g, const struct script_reply *replies, int count, int at_first,
                    uint32_t lanes)
{
    script_start_together(&server, replies, count, at_first);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    o.connections = LANES;
    o.stall_ms = NEVER_MS;
    open_with(&o);
    text[0] = '\0';
    struct kvq__call call = {.remote = remote, .text = text, .n = sizeof text};
    struct kvq__requests all = {.context = g, .make = make_get, .take = take_get, .lanes = lanes};
    return kvq__requests(&call, &all);
}

static const struct script_reply a = {.bytes = "a", .end = SCRIPT_BODY};

PLAIN_TEST(they_stand_side_by_side)
{
    struct gets g = {.n = LANES + 3};
    assert_int_equal(run_gets(&g, &a, 1, LANES, LANES), 0);
    end();
    assert_int_equal(g.taken, LANES + 3);
    assert_string_equal(g.got, "aaaaaaa");
    assert_int_equal(server.n_asked, LANES + 3);
}

PLAIN_TEST(one_that_fails_for_now_is_sent_again)
{
    const struct script_reply replies[] = {a, {.bytes = BUSY}, a, {.bytes = ""}, a};
    struct gets g = {.n = LANES};
    assert_int_equal(run_gets(&g, replies, 5, LANES, LANES), 0);
    end();
    assert_int_equal(g.taken, LANES);
    assert_string_equal(g.got, "aaaa");
    assert_int_equal(server.n_asked, LANES + 2);
    assert_int_equal(test_clock.waits, 2);
}

PLAIN_TEST(a_bad_answer_is_fetched_again)
{
    struct gets g = {.n = LANES, .again = 2};
    assert_int_equal(run_gets(&g, &a, 1, LANES, LANES), 0);
    end();
    assert_int_equal(g.taken, LANES);
    assert_int_equal(server.n_asked, LANES + 2);
    assert_int_equal(test_clock.waits, 2);
}

// The other one, which never ends, is broken off, and the remote serves the next call.
PLAIN_TEST(one_that_fails_breaks_the_other_off)
{
    const struct script_reply replies[] = {
        {.bytes = "HTTP/1.1 403 No\r\n\r\n"}, {.bytes = OK, .end = SCRIPT_HANG}, a};
    struct gets g = {.n = 2};
    void *data = NULL;
    size_t bytes = 0;
    assert_int_equal(run_gets(&g, replies, 3, 2, 2), KVQ_E_PERMISSION);
    assert_says(text, "check the keys");
    assert_int_equal(g.taken, 0);
    assert_int_equal(kvq_remote_get(remote, "k", 9, &data, &bytes, NULL, text, sizeof text), 0);
    assert_int_equal(bytes, 1);
    free(data);
    end();
}

PLAIN_TEST(one_that_keeps_failing_has_an_end)
{
    const struct script_reply replies[] = {a, {.bytes = BUSY}};
    struct gets g = {.n = 2};
    assert_int_equal(run_gets(&g, replies, 2, 2, 2), KVQ_E_REMOTE);
    assert_says(text, "after 4 tries");
    end();
    assert_int_equal(server.n_asked, 5);
    assert_int_equal(test_clock.waits, 3);
}

// Parts that are larger than usual share the memory that a transfer may have.
PLAIN_TEST(memory_bounds_them)
{
    struct kvq_remote r = {.lanes = 8};
    assert_int_equal(kvq__lanes_of(&r, 1), 8);
    assert_int_equal(kvq__lanes_of(&r, KVQ_REMOTE_MAX_BUFFERS / 8), 8);
    assert_int_equal(kvq__lanes_of(&r, KVQ_REMOTE_MAX_BUFFERS / 8 + 1), 7);
    assert_int_equal(kvq__lanes_of(&r, KVQ_REMOTE_MAX_BUFFERS), 1);
    assert_int_equal(kvq__lanes_of(&r, 8ull * KVQ_REMOTE_MAX_BUFFERS), 1);
}

int main(void)
{
    return run_all(NULL, NULL);
}
