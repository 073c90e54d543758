// SPDX-License-Identifier: Apache-2.0
//
// Sessions of several shards: their steps commit on all or on none, whoever leaves them when, and
// nobody waits for what cannot come.
#include <math.h>

#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { HEADS = 2, DIM = 64, N = 10, MIB = 1 << 20, BUFFER = MIB, SHARDS = 2 };

static const struct kvq__layer_row rows[] = {{4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 2}};

static struct kit kit;
static char text[KVQ_TEXT_BYTES];
static struct kvq__session_info info; // of the session that was asked for last

// A client with one shard.
struct rank {
    struct member m;
    uint64_t handle;
};
static struct rank one, two;

static struct kvq__session_spec spec_of(uint32_t shard)
{
    return (struct kvq__session_spec){.ns = "team",
                                      .name = "model",
                                      .model = "llama",
                                      .format = "f16",
                                      .shard = shard,
                                      .shards = SHARDS,
                                      .layers = rows,
                                      .n_layers = 1,
                                      .max_rollback = 20};
}

static int open_as(struct rank *r, const struct kvq__session_spec *spec,
                   struct kvq__session_info *info)
{
    text[0] = 0;
    int rc = kvq__session_open(r->m.client, spec, info, text);
    assert_true(rc == 0 || text[0]);
    return rc;
}

static void open_shard(struct rank *r, uint32_t shard)
{
    struct kvq__session_spec spec = spec_of(shard);
    assert_int_equal(open_as(r, &spec, &info), 0);
    r->handle = info.handle;
}

static void attach(struct rank *r)
{
    *r = (struct rank){0};
    assert_int_equal(member_open(&kit, &r->m, 1000, BUFFER), 0);
    member_fill(&r->m);
}

static int setup(void **state)
{
    static const uint32_t uids[] = {1000};
    struct kvq__namespace_config team = {.name = "team", .uids = uids, .n_uids = 1};
    kit_open(&kit, 7, 64 * MIB, 0);
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), 0);
    attach(&one);
    attach(&two);
    return 0;
}

static int teardown(void **state)
{
    core_check(kit.core);
    member_close(&one.m);
    member_close(&two.m);
    assert_true(kvq__core_idle(kit.core));
    kit_close(&kit);
    return 0;
}

static void open_both(void)
{
    open_shard(&one, 0);
    open_shard(&two, 1);
}

// ---- A step, call by call ----

static const struct kvq_result *result(struct rank *r)
{
    return kvq__queue_results(r->m.queue);
}

static int simple(struct rank *r, uint8_t op, uint64_t position, uint32_t n)
{
    struct kvq_entry_wire e = {.handle = r->handle, .position = position, .append = n};
    return kit_simple(&r->m, op, op == KVQ_OP_TRUNCATE ? 0 : 1, e, NULL);
}

static int begin(struct rank *r, uint64_t position, uint32_t n)
{
    return simple(r, KVQ_OP_STEP_BEGIN, position, n);
}

static int append(struct rank *r, uint64_t position, uint32_t n)
{
    struct kvq_entry_wire e = {.handle = r->handle, .position = position, .append = n};
    struct kvq_request request = kit_header(KVQ_OP_APPEND, 1);
    int rc = 0;
    request.step = 1;
    request.k = kit_view(&r->m, 0, HEADS, DIM, KVQ_F32);
    request.v = kit_view(&r->m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    for (request.layer = 0; rc == 0 && request.layer < 2; request.layer++) {
        rc = kit_request(&r->m, &request, &e);
        rc = rc ? rc : result(r)->status;
    }
    return rc;
}

static int end(struct rank *r, uint64_t position)
{
    return simple(r, KVQ_OP_STEP_END, position, 0);
}

// One step of n tokens, but for its end.
static int fill(struct rank *r, uint64_t position, uint32_t n)
{
    int rc = begin(r, position, n);
    return rc ? rc : append(r, position, n);
}

// What has waited goes on: its status, or 1 if it waits again.
static int go_on(struct rank *r)
{
    enum kvq__progress p = kvq__request_continue(r->m.queue);
    assert_true(p == KVQ__DONE || p == KVQ__WAIT);
    if (p == KVQ__WAIT)
        return 1;
    int rc = kvq__queue_completion(r->m.queue)->status;
    return rc ? rc : result(r)->status;
}

static uint64_t tokens(struct rank *r)
{
    return kit_of(&r->m, r->handle)->tokens;
}

static void step_both(uint64_t position, uint32_t n)
{
    assert_int_equal(fill(&one, position, n), 0);
    assert_int_equal(fill(&two, position, n), 0);
    assert_int_equal(end(&one, position), 0);
    assert_int_equal(end(&two, position), 0);
    assert_int_equal(tokens(&one), position + n);
    assert_int_equal(tokens(&two), position + n);
}

// ---- Commit ----

TEST(test_commit)
{
    open_both();
    assert_int_equal(fill(&one, 0, N), 0);
    assert_int_equal(fill(&two, 0, N), 0);
    assert_int_equal(end(&one, 0), 0);
    assert_int_equal(result(&one)->value, N); // what it will have
    assert_int_equal(tokens(&one), 0);
    assert_int_equal(kit.core->n_prepared, 1);
    core_check(kit.core);
    assert_int_equal(begin(&one, N, N), 1); // waits
    assert_int_equal(go_on(&one), 1);
    assert_int_equal(end(&two, 0), 0);
    assert_int_equal(tokens(&one), N);
    assert_int_equal(tokens(&two), N);
    assert_int_equal(kit.core->n_prepared, 0);
    assert_int_equal(go_on(&one), 0); // the next step is begun
    assert_int_equal(kit.core->counts.appended_tokens, 2 * N);
}

// Readers of a shard that has ended its step see what is committed, and do not wait.
TEST(test_readers)
{
    struct kvq__session_spec spec = spec_of(0);
    open_both();
    step_both(0, N);
    spec.flags = KVQ__OPEN_READ_ONLY;
    assert_int_equal(open_as(&two, &spec, &info), 0);
    assert_int_equal(fill(&one, N, N), 0);
    assert_int_equal(end(&one, N), 0);
    struct kvq_entry_wire e = {.handle = info.handle, .position = N};
    assert_int_equal(kit_simple(&two.m, KVQ_OP_NOP, 0, e, NULL), 0);
    assert_int_equal(kit_simple(&two.m, KVQ_OP_FORK, 0, e, NULL), KVQ_E_BUSY); // as in a step
    assert_int_equal(fill(&two, N, N), 0);
    assert_int_equal(end(&two, N), 0);
    assert_int_equal(kit_simple(&two.m, KVQ_OP_NOP, 0, e, NULL), KVQ_E_POSITION);
    e.position = 2 * N;
    assert_int_equal(kit_simple(&two.m, KVQ_OP_NOP, 0, e, NULL), 0);
}

// A step that appends nothing ends like others.
TEST(test_empty_step)
{
    open_both();
    assert_int_equal(begin(&one, 0, 0), 0);
    assert_int_equal(begin(&two, 0, 0), 0);
    assert_int_equal(end(&one, 0), 0);
    assert_int_equal(begin(&one, 0, N), 1);
    assert_int_equal(end(&two, 0), 0);
    assert_int_equal(go_on(&one), 0);
}

// ---- Leaving ----

enum way { ABORT, CLOSE, DIE, TAKE_OVER, NONFINITE, INCOMPLETE, WAYS };
enum point { NOT_BEGUN, BEGUN, APPENDED, ENDED, WAITING, POINTS };

static void come_to(struct rank *r, enum point point, uint64_t position)
{
    if (point >= BEGUN)
        assert_int_equal(begin(r, position, N), 0);
    if (point >= APPENDED)
        assert_int_equal(append(r, position, N), 0);
    if (point >= ENDED)
        assert_int_equal(end(r, position), 0);
    if (point == WAITING)
        assert_int_equal(begin(r, position + N, N), 1);
}

static bool has_point(enum way way, enum point point)
{
    return way == ABORT                            ? point == BEGUN || point == APPENDED
           : way == NONFINITE || way == INCOMPLETE ? point == BEGUN
                                                   : point <= APPENDED;
}

// Rank two leaves the step that it has come to `point` of, and comes back at the old count.
static void leave(enum way way, uint64_t position)
{
    struct kvq__session_spec spec = spec_of(1);
    float *k = (float *)(void *)two.m.memory, good = k[3];
    switch (way) {
    case ABORT:
        assert_int_equal(simple(&two, KVQ_OP_STEP_ABORT, position, 0), 0);
        return;
    case CLOSE:
        assert_int_equal(kvq__session_close(two.m.client, two.handle, text), 0);
        open_shard(&two, 1);
        return;
    case DIE:
        member_close(&two.m);
        attach(&two);
        open_shard(&two, 1);
        return;
    case TAKE_OVER:
        spec.flags = KVQ__OPEN_TAKE_OVER;
        assert_int_equal(open_as(&two, &spec, &info), 0);
        two.handle = info.handle;
        return;
    case NONFINITE:
        k[3] = NAN;
        assert_int_equal(append(&two, position, N), KVQ_E_NONFINITE);
        k[3] = good;
        return;
    default:
        assert_int_equal(end(&two, position), KVQ_E_INCOMPLETE);
    }
}

// What rank one is told, which was at `point`, and that it can go on.
static void check_told(enum point point, uint64_t position)
{
    if (point == NOT_BEGUN)
        return;
    int rc = point == WAITING ? go_on(&one)
             : point == ENDED ? begin(&one, position + N, N)
                              : append(&one, position, N);
    // A step that has lost its last session is none any more.
    assert_int_equal(rc, point < ENDED ? KVQ_E_NO_STEP : KVQ_E_CANCELLED);
    if (point < ENDED)
        return;
    assert_int_equal(result(&one)->shard, 1 + 1);
    assert_int_equal(result(&one)->value, position);
}

TEST(test_leaving)
{
    uint64_t position = N;
    open_both();
    step_both(0, N);
    uint64_t used = kit.core->pools[0].used_bytes;
    for (enum way way = 0; way < WAYS; way++)
        for (enum point at = NOT_BEGUN; at <= APPENDED; at++)
            for (enum point other = NOT_BEGUN; has_point(way, at) && other < POINTS; other++) {
                come_to(&two, at, position);
                come_to(&one, other, position);
                leave(way, position);
                core_check(kit.core);
                assert_int_equal(tokens(&one), position);
                assert_int_equal(tokens(&two), position);
                assert_int_equal(kit.core->n_prepared, 0);
                assert_int_equal(kit.core->n_steps, 0);
                assert_int_equal(kit.core->pools[0].used_bytes, used);
                check_told(other, position);
            }
    step_both(position, N);
}

// Who has ended its step may go: its part of it stands, and commits with the others'.
TEST(test_gone_behind_end)
{
    struct kvq__session_spec spec = spec_of(0);
    open_both();
    for (uint64_t position = 0; position < 3 * N; position += N) {
        assert_int_equal(fill(&one, position, N), 0);
        assert_int_equal(fill(&two, position, N), 0);
        assert_int_equal(end(&one, position), 0);
        if (position == 0) {
            assert_int_equal(kvq__session_close(one.m.client, one.handle, text), 0);
        } else if (position == N) {
            member_close(&one.m);
            attach(&one);
        } else {
            spec.flags = KVQ__OPEN_TAKE_OVER;
            assert_int_equal(open_as(&two, &spec, &info), 0);
        }
        core_check(kit.core);
        assert_int_equal(kit.core->n_prepared, 1);
        if (position < 2 * N)
            open_shard(&one, 0); // whoever comes waits, too
        assert_int_equal(end(&two, position), 0);
        assert_int_equal(tokens(&two), position + N);
        if (position < 2 * N)
            assert_int_equal(tokens(&one), position + N);
    }
    assert_int_equal(kvq__session_close(two.m.client, info.handle, text), 0);
    assert_int_equal(kvq__session_close(one.m.client, one.handle, text), 0);
    // Not so if the other one goes that has yet to end its step, or to begin it.
    open_shard(&one, 0);
    assert_int_equal(fill(&one, 3 * N, N), 0);
    assert_int_equal(end(&one, 3 * N), 0);
    assert_int_equal(kvq__session_close(two.m.client, two.handle, text), 0);
    assert_int_equal(kit.core->n_prepared, 0);
    assert_int_equal(begin(&one, 4 * N, N), KVQ_E_CANCELLED);
    // And when nobody has any shard, nobody will end the step.
    assert_int_equal(fill(&one, 3 * N, N), 0);
    assert_int_equal(end(&one, 3 * N), 0);
    assert_int_equal(kvq__session_close(one.m.client, one.handle, text), 0);
    assert_int_equal(kit.core->n_prepared, 0);
    open_shard(&one, 0);
    assert_int_equal(tokens(&one), 3 * N);
}

// A step with other sessions goes on without the shard, which is told why.
TEST(test_told_in_step)
{
    struct kvq__layer_row row = rows[0];
    open_both();
    row.format = "f16";
    struct kvq_entry_wire e[2] = {{.handle = one.handle, .append = N},
                                  {.handle = kit_session(&one.m, &row, 1, 0), .append = N}};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 1);
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    assert_int_equal(fill(&two, 0, N), 0);
    assert_int_equal(simple(&two, KVQ_OP_STEP_ABORT, 0, 0), 0);
    assert_int_equal(append(&one, 0, N), KVQ_E_CANCELLED);
    assert_int_equal(result(&one)->shard, 2);
    r = kit_of_step(KVQ_OP_STEP_END, 2, 1);
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    assert_int_equal(result(&one)[0].status, KVQ_E_CANCELLED);
    assert_int_equal(result(&one)[1].status, KVQ_E_INCOMPLETE);
}

// ---- Several shards of one client ----

static struct kvq_entry_wire both[2];

static void open_both_here(void)
{
    open_shard(&one, 1);
    both[1] = (struct kvq_entry_wire){.handle = one.handle, .append = N};
    open_shard(&one, 0);
    both[0] = (struct kvq_entry_wire){.handle = one.handle, .append = N};
}

static int request(uint8_t op, uint16_t count)
{
    struct kvq_request r = kit_of_step(op, count, 1);
    r.k = kit_view(&one.m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&one.m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    int rc = kit_request(&one.m, &r, both);
    if (op == KVQ_OP_APPEND && rc == 0) {
        r.layer = 1;
        rc = kit_request(&one.m, &r, both);
    }
    return rc;
}

TEST(test_one_request)
{
    float *k = (float *)(void *)one.m.memory;
    open_both_here();
    for (uint16_t count = 0; count <= 2; count += 2) { // 0: all of the step
        assert_int_equal(request(KVQ_OP_STEP_BEGIN, 2), 0);
        assert_int_equal(request(KVQ_OP_APPEND, 2), 0);
        assert_int_equal(request(KVQ_OP_STEP_END, count), 0);
        both[0].position += N;
        both[1].position += N;
        assert_int_equal(tokens(&one), both[0].position);
        assert_int_equal(kit.core->n_prepared, 0);
    }
    // The second fails, and the first, which was fine, with it.
    assert_int_equal(request(KVQ_OP_STEP_BEGIN, 2), 0);
    assert_int_equal(request(KVQ_OP_APPEND, 1), 0);
    assert_int_equal(request(KVQ_OP_STEP_END, 2), 0);
    assert_int_equal(result(&one)[0].status, KVQ_E_CANCELLED);
    assert_int_equal(result(&one)[0].shard, 1 + 1);
    assert_int_equal(result(&one)[0].value, 2 * N);
    assert_int_equal(result(&one)[1].status, KVQ_E_INCOMPLETE);
    assert_int_equal(tokens(&one), 2 * N);
    // So with all of a step, and with an abort of both.
    assert_int_equal(request(KVQ_OP_STEP_BEGIN, 2), 0);
    assert_int_equal(request(KVQ_OP_APPEND, 1), 0);
    assert_int_equal(request(KVQ_OP_STEP_END, 0), KVQ_E_INCOMPLETE);
    assert_int_equal(request(KVQ_OP_STEP_ABORT, 2), 0);
    assert_int_equal(result(&one)[0].status, 0);
    assert_int_equal(result(&one)[1].status, 0);
    k[0] = NAN;
    assert_int_equal(request(KVQ_OP_STEP_BEGIN, 2), 0);
    assert_int_equal(request(KVQ_OP_APPEND, 2), KVQ_E_NO_STEP); // gone with its first layer
    k[0] = 0;
    core_check(kit.core);
    assert_int_equal(kit.core->n_steps, 0);
}

// One queue that asks for what only itself could let happen is refused; two may well wait.
TEST(test_one_queue)
{
    struct kvq__queue *queue;
    open_both_here();
    assert_int_equal(request(KVQ_OP_STEP_BEGIN, 2), 0);
    assert_int_equal(request(KVQ_OP_APPEND, 2), 0);
    assert_int_equal(request(KVQ_OP_STEP_END, 1), 0);
    assert_int_equal(begin(&one, N, N), KVQ_E_BUSY); // the same step's number
    struct kvq_entry_wire e = {.handle = one.handle, .position = N, .append = N};
    assert_int_equal(kit_simple(&one.m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_BUSY);
    assert_int_equal(result(&one)->shard, 1 + 1);
    assert_int_equal(kvq__queue_open(one.m.client, &queue, text), 0);
    struct kvq__queue *first = one.m.queue;
    assert_int_equal(kit_simple(&one.m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_BUSY);
    one.m.queue = queue;
    assert_int_equal(kit_simple(&one.m, KVQ_OP_STEP_BEGIN, 2, e, NULL), 1);
    kvq__queue_header(queue)->deadline_ns = kit.now + 5;
    kit_pass(&kit, 10);
    assert_int_equal(go_on(&one), KVQ_E_DEADLINE); // which undoes nothing
    one.m.queue = first;
    both[0] = both[1];
    assert_int_equal(request(KVQ_OP_STEP_END, 1), 0);
    assert_int_equal(tokens(&one), N);
    kvq__queue_close(&queue);
}

// A queue that closes in the middle of a shard's step: the other shard, which has ended its own,
// stands as before it, and what waits for the step of all is told which shard left. A shard that
// has ended its step needs its queue no longer.
TEST(test_queue_closes)
{
    open_both();
    struct kvq__queue *first = two.m.queue;
    for (uint32_t ended = 0; ended < 2; ended++) {
        assert_int_equal(kvq__queue_open(two.m.client, &two.m.queue, text), 0);
        assert_int_equal(fill(&one, 0, N), 0);
        assert_int_equal(fill(&two, 0, N), 0);
        assert_int_equal(end(ended ? &two : &one, 0), 0);
        if (!ended)
            assert_int_equal(begin(&one, N, N), 1);
        kvq__queue_close(&two.m.queue);
        two.m.queue = first;
        core_check(kit.core);
        assert_int_equal(kit.core->n_prepared, ended);
        assert_int_equal(tokens(&one), 0);
        assert_int_equal(ended ? end(&one, 0) : go_on(&one), ended ? 0 : KVQ_E_CANCELLED);
        assert_int_equal(result(&one)->shard, ended ? 0 : 1 + 1);
    }
    assert_int_equal(tokens(&one), N);
    assert_int_equal(tokens(&two), N);
}

// ---- Counts that differ ----

TEST(test_counts)
{
    open_both();
    step_both(0, N);
    assert_int_equal(fill(&one, N, N), 0);
    assert_int_equal(fill(&two, N, N + 1), 0); // not as many
    assert_int_equal(end(&one, N), 0);
    assert_int_equal(end(&two, N), KVQ_E_POSITION);
    assert_int_equal(result(&two)->shard, 1);
    assert_int_equal(result(&two)->value, 2 * N);
    assert_int_equal(begin(&one, 2 * N, N), KVQ_E_CANCELLED);
    assert_int_equal(result(&one)->shard, 2);
    core_check(kit.core);
    step_both(N, N);
    // One is shortened before the other, and even begins before.
    assert_int_equal(kit_truncate(&one.m, one.handle, 4), 0);
    assert_int_equal(fill(&one, 2 * N - 4, 5), 0);
    assert_int_equal(kit_truncate(&two.m, two.handle, 4), 0);
    assert_int_equal(fill(&two, 2 * N - 4, 5), 0);
    assert_int_equal(end(&one, 2 * N - 4), 0);
    assert_int_equal(end(&two, 2 * N - 4), 0);
    assert_int_equal(tokens(&one), 2 * N + 1);
    // One is not shortened: nothing is committed, though both would end at the same count.
    assert_int_equal(kit_truncate(&one.m, one.handle, 3), 0);
    assert_int_equal(fill(&one, 2 * N - 2, 4), 0);
    assert_int_equal(fill(&two, 2 * N + 1, 1), 0);
    assert_int_equal(end(&two, 2 * N + 1), 0);
    assert_int_equal(end(&one, 2 * N - 2), KVQ_E_POSITION);
    assert_int_equal(tokens(&one), 2 * N - 2);
    assert_int_equal(tokens(&two), 2 * N + 1);
    assert_int_equal(kvq__session_info(two.m.client, two.handle, &info, text), 0);
    assert_int_equal(info.group_tokens, 2 * N - 2);
    // Nor if both append as many.
    assert_int_equal(fill(&one, 2 * N - 2, 4), 0);
    assert_int_equal(fill(&two, 2 * N + 1, 4), 0);
    assert_int_equal(end(&one, 2 * N - 2), 0);
    assert_int_equal(end(&two, 2 * N + 1), KVQ_E_POSITION);
    assert_int_equal(result(&two)->value, 2 * N + 2); // where the other one ends
    assert_int_equal(tokens(&one), 2 * N - 2);
}

// ---- Opening ----

static void refused(struct kvq__session_spec spec, int code, const char *said)
{
    uint32_t sessions = kit.core->n_sessions;
    assert_int_equal(open_as(&two, &spec, &info), code);
    assert_says(text, said);
    assert_int_equal(kit.core->n_sessions, sessions);
    core_check(kit.core);
}

TEST(test_open)
{
    struct kvq__session_spec spec = spec_of(1);
    open_shard(&one, 0);
    assert_int_equal(begin(&one, 0, N), KVQ_E_NO_SESSION); // nobody has opened shard 1
    assert_int_equal(result(&one)->shard, 1 + 1);
    spec.shards = 4;
    refused(spec, KVQ_E_EXISTS, "2 shards, 4 are asked for");
    spec.shards = spec.shard = 0;
    refused(spec, KVQ_E_EXISTS, "2 shards, 1 are");
    refused(WITH(spec_of(1), model = "mistral"), KVQ_E_EXISTS, "model fingerprint");
    refused(WITH(spec_of(1), max_rollback = 21), KVQ_E_EXISTS, "max_rollback");
    refused(WITH(spec_of(1), prompt_tokens = 5), KVQ_E_EXISTS, "prompt_tokens");
    spec = spec_of(1);
    spec.v_rotation = KVQ__V_ENGINE;
    spec.format = "oscar2";
    refused(spec, KVQ_E_EXISTS, "v_rotation");
    spec.v_rotation = KVQ__V_DAEMON; // in layers of one format
    spec.format = "f16";
    refused(spec, KVQ_E_EXISTS, "v_rotation");
    refused(WITH(spec_of(1), on_detach = KVQ__DETACH_DROP), KVQ_E_EXISTS, "on_detach");
    refused(WITH(spec_of(1), flags = KVQ__OPEN_MUST_EXIST), KVQ_E_NO_SESSION, "with this shard");
    refused(WITH(spec_of(0), flags = KVQ__OPEN_MUST_CREATE), KVQ_E_EXISTS, "with this shard");
    spec = (struct kvq__session_spec){.ns = "team", .name = "model", .shard = 1};
    refused(spec, KVQ_E_NO_SESSION, "with this shard");
    spec = spec_of(1);
    spec.format = "oscar2"; // formats and layers are each shard's own
    assert_int_equal(open_as(&two, &spec, &info), 0);
    assert_true(info.created && info.shard == 1 && info.shards == 2);
    spec = (struct kvq__session_spec){.ns = "team", .name = "model", .shard = 1};
    spec.flags = KVQ__OPEN_READ_ONLY;
    assert_int_equal(open_as(&one, &spec, &info), 0); // as it is
    assert_int_equal(info.shard, 1);
    assert_int_equal(begin(&one, 0, N), 0);
}

// Sessions without a name are each alone, whatever they say of shards; so are forks.
TEST(test_alone)
{
    struct kvq__session_spec spec = spec_of(0);
    spec.name = NULL;
    assert_int_equal(open_as(&one, &spec, &info), 0);
    one.handle = info.handle;
    assert_int_equal(fill(&one, 0, N), 0);
    assert_int_equal(end(&one, 0), 0);
    assert_int_equal(tokens(&one), N);
    open_both();
    step_both(0, N);
    uint64_t fork = kit_fork(&one.m, one.handle, N);
    one.handle = fork;
    assert_int_equal(fill(&one, N, N), 0);
    assert_int_equal(end(&one, N), 0);
    assert_int_equal(tokens(&one), 2 * N);
}

// ---- Ends ----

TEST(test_drop)
{
    const struct kvq__peer peer = {.uid = 1000};
    struct kvq__shard_info shards[KVQ_MAX_SHARDS];
    char id[24];
    for (uint32_t way = 0; way < 3; way++) {
        open_both();
        step_both(0, N);
        assert_int_equal(fill(&two, N, N), 0);
        assert_int_equal(end(&two, N), 0);
        assert_int_equal(kvq__session_find(kit.core, &peer, "team", "model", &info, text), 0);
        assert_int_equal(kvq__session_shards(kit.core, &peer, info.id, shards), 2);
        assert_int_equal(shards[1].shard, 1);
        assert_int_equal(shards[1].tokens, N);
        assert_true(shards[1].ended && !shards[0].ended);
        assert_string_equal(shards[0].place, "host");
        snprintf(id, sizeof id, "#%u", (unsigned)shards[1].id);
        assert_int_equal(way == 0 ? kvq__session_drop(two.m.client, two.handle, text)
                                  : kvq__session_drop_named(kit.core, &peer, "team",
                                                            way == 1 ? "model" : id, text),
                         0);
        assert_int_equal(kit.core->n_sessions, 0);
        assert_int_equal(kit.core->n_prepared, 0);
        assert_int_equal(kit.core->pools[0].used_bytes, 0);
        assert_int_equal(begin(&one, N, N), KVQ_E_STALE);
    }
}

// Kept and dropped together, from when nobody has any shard.
TEST(test_detach)
{
    struct kvq__session_spec spec = spec_of(0);
    open_both();
    assert_int_equal(kvq__session_close(one.m.client, one.handle, text), 0);
    kit_tick(&kit, 2 * kit.core->config.keep_ns);
    assert_int_equal(kit.core->n_sessions, 2); // the other one is open
    assert_int_equal(kvq__session_close(two.m.client, two.handle, text), 0);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->n_sessions, 2);
    kit_tick(&kit, kit.core->config.keep_ns);
    assert_int_equal(kit.core->n_sessions, 0);
    spec.on_detach = KVQ__DETACH_DROP;
    assert_int_equal(open_as(&one, &spec, &info), 0);
    one.handle = info.handle;
    spec.shard = 1;
    assert_int_equal(open_as(&two, &spec, &info), 0);
    assert_int_equal(kvq__session_close(one.m.client, one.handle, text), 0);
    assert_int_equal(kit.core->n_sessions, 2);
    assert_int_equal(kvq__session_close(two.m.client, info.handle, text), 0);
    assert_int_equal(kit.core->n_sessions, 0);
}

// Shards by layers have other formats, whose papers differ; the engine is one.
TEST(test_rotations)
{
    struct kvq__session_spec spec = spec_of(0);
    spec.format = "k8v4";
    assert_int_equal(open_as(&one, &spec, &info), 0);
    assert_int_equal(info.v_rotation, KVQ_V_ROT_NONE);
    spec = spec_of(1);
    spec.format = "oscar2";
    spec.v_rotation = KVQ__V_ENGINE;
    refused(spec, KVQ_E_EXISTS, "v_rotation");
    spec.v_rotation = KVQ__V_BY_PAPER;
    assert_int_equal(open_as(&two, &spec, &info), 0);
    assert_int_equal(info.v_rotation, KVQ_V_ROT_DAEMON);
}

int main(void)
{
    return run_all(NULL, NULL);
}
