// SPDX-License-Identifier: Apache-2.0
//
// What bad requests get: the right code for the request or for the one entry, and nothing lost.
// Every number of a request is set to values that reach outside, overflow, or make no sense.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, DIM = 64, HEADS = 2, KV = 2 * MIB, Q_AT = MIB, OUT_AT = MIB + 65536 };
enum { LIST_AT = OUT_AT + 65536, LSE_AT = LIST_AT + 65536, BUFFER = 2 * KV };
enum { ROW = HEADS * DIM * 4, TOKENS = 200 };

static struct kit kit;
static struct member m;
static uint64_t session;

static int setup(void **state)
{
    static const struct kvq__layer_row rows[] = {
        {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = -1, .repeat = 2},
        {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = 1}};
    kit_open(&kit, 11, 64 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    session = kit_session(&m, rows, 2, 16);
    member_fill(&m);
    assert_int_equal(kit_step(&m, session, TOKENS, HEADS, DIM), 0);
    return 0;
}

static int teardown(void **state)
{
    assert_int_equal(kit_of(&m, session)->tokens, TOKENS);
    assert_int_equal(kit_of(&m, session)->refs, 0);
    return kit_teardown(state);
}

static struct kvq_entry_wire entry(uint32_t append, uint16_t queries)
{
    return (struct kvq_entry_wire){
        .handle = session, .position = TOKENS, .append = append, .queries = queries};
}

static struct kvq_request attend(void)
{
    struct kvq_request r = kit_attend(&m, 0, Q_AT, OUT_AT, 4, DIM);
    r.lse = kit_view(&m, LSE_AT, 4, 1, KVQ_F32);
    return r;
}

static struct kvq_request append(uint64_t step)
{
    struct kvq_request r = kit_of_step(KVQ_OP_APPEND, 1, step);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, KV, HEADS, DIM, KVQ_F32);
    return r;
}

// The request's status, or if it is 0, the entry's.
static int status_of(struct kvq_request r, struct kvq_entry_wire e)
{
    int rc = kit_request(&m, &r, &e);
    return rc || r.count == 0 ? rc : kvq__queue_results(m.queue)[0].status;
}

TEST(test_header)
{
    struct kvq_request good = kit_header(KVQ_OP_NOP, 1), r;
    assert_int_equal(status_of(good, entry(0, 0)), 0);
    assert_int_equal(status_of(WITH(good, op = KVQ_OP_COUNT), entry(0, 0)), KVQ_E_UNSUPPORTED);
    assert_int_equal(status_of(WITH(good, op = 255), entry(0, 0)), KVQ_E_UNSUPPORTED);
    assert_int_equal(status_of(WITH(good, pad0 = 1), entry(0, 0)), KVQ_E_INVALID);
    assert_int_equal(status_of(WITH(good, pad1 = 1), entry(0, 0)), KVQ_E_INVALID);
    r = WITH(good, signal = 1ull << 63); // without its flag
    assert_int_equal(status_of(r, entry(0, 0)), KVQ_E_INVALID);
    r = WITH(good, flags = KVQ_REQ_PAST_ONLY); // not for this operation
    assert_int_equal(status_of(r, entry(0, 0)), KVQ_E_INVALID);
    assert_int_equal(status_of(WITH(good, slots++), entry(0, 0)), KVQ_E_PROTOCOL);
    r = good;
    r.count = KVQ_MAX_BATCH + 1;
    r.slots = (uint16_t)kvq_request_slots(r.count, 0);
    assert_int_equal(status_of(r, entry(0, 0)), KVQ_E_PROTOCOL);
    for (uint8_t op = KVQ_OP_STEP_BEGIN; op < KVQ_OP_COUNT; op++) {
        bool empty_is_fine = op == KVQ_OP_STEP_END || op == KVQ_OP_STEP_ABORT;
        r = kit_header(op, 0);
        assert_int_equal(status_of(r, entry(0, 0)), empty_is_fine ? KVQ_E_NO_STEP : KVQ_E_INVALID);
    }
}

TEST(test_deadline)
{
    struct kvq_request r = attend();
    kvq__core_clock(kit.core, 1000);
    r.deadline_ns = 999;
    assert_int_equal(status_of(r, entry(0, 1)), KVQ_E_DEADLINE);
    assert_int_equal(kvq__queue_completion(m.queue)->count, 0);
    r.deadline_ns = 1000;
    assert_int_equal(status_of(r, entry(0, 1)), 0);
}

TEST(test_handles)
{
    static const uint64_t wrong[] = {0,
                                     1,
                                     1ull << 32 | 1,
                                     2ull << 32,
                                     UINT64_MAX,
                                     4096,
                                     1ull << 32 | 4096,
                                     1ull << 32 | 63,
                                     0xffffffffull};
    struct kvq_entry_wire e = entry(0, 1);
    for (uint32_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        e.handle = wrong[i];
        assert_int_equal(status_of(attend(), e), KVQ_E_STALE);
    }
    e = entry(0, 1);
    e.position = TOKENS - 1;
    assert_int_equal(status_of(attend(), e), KVQ_E_POSITION);
    assert_int_equal(kvq__queue_results(m.queue)[0].value, TOKENS);
}

// One failing entry harms no other.
TEST(test_entries_apart)
{
    struct kvq_entry_wire e[3] = {entry(0, 1), entry(0, 1), entry(0, 1)};
    e[1].handle = 77;
    e[2].q_row = UINT32_MAX;
    struct kvq_request r = attend();
    r.count = 3;
    r.slots = (uint16_t)kvq_request_slots(r.count, 0);
    assert_int_equal(kit_request(&m, &r, e), 0);
    const struct kvq_result *results = kvq__queue_results(m.queue);
    assert_int_equal(results[0].status, 0);
    assert_int_equal(results[1].status, KVQ_E_STALE);
    assert_int_equal(results[2].status, KVQ_E_BOUNDS);
}

// Breaks one view in every way.
static void break_view(struct kvq_request *r, struct kvq_wire_view *v, struct kvq_entry_wire e)
{
    struct kvq_wire_view good = *v;
    const struct {
        const char *what;
        struct kvq_wire_view view;
        int code;
    } cases[] = {
        {"as it was", good, 0},
        {"no such buffer", WITH(good, buffer = 12345), KVQ_E_BUFFER},
        {"dtype 0", WITH(good, dtype = 0), KVQ_E_DTYPE},
        {"dtype 4", WITH(good, dtype = 4), KVQ_E_DTYPE},
        {"dtype 255", WITH(good, dtype = 255), KVQ_E_DTYPE},
        {"a pad", WITH(good, pad[2] = 1), KVQ_E_INVALID},
        {"misaligned", WITH(good, offset += 1), KVQ_E_INVALID},
        {"at the buffer's end", WITH(good, offset = BUFFER - 4), KVQ_E_BOUNDS},
        {"an offset that overflows", WITH(good, offset = UINT64_MAX - 3), KVQ_E_BOUNDS},
        {"rows that overflow", WITH(good, token_stride = UINT64_MAX - 3), KVQ_E_BOUNDS},
        {"heads far apart", WITH(good, head_stride = 1ull << 39),
         v == &r->lse ? KVQ_E_INVALID : KVQ_E_BOUNDS},
        {"heads on one another, or misaligned", WITH(good, head_stride = 2), KVQ_E_INVALID},
        {"heads a value into one another", WITH(good, head_stride = good.head_stride - 4),
         KVQ_E_INVALID},
        {"as it was, again", good, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        *v = cases[i].view;
        int rc = status_of(*r, e);
        if (rc != cases[i].code)
            fail_msg("%s: %d instead of %d", cases[i].what, rc, cases[i].code);
    }
}

TEST(test_views)
{
    struct kvq_request r = attend();
    break_view(&r, &r.q, entry(0, 1));
    break_view(&r, &r.out, entry(0, 1));
    break_view(&r, &r.lse, entry(0, 1));
    r.lse.dtype = KVQ_F16;
    r.lse.head_stride = 2;
    assert_int_equal(status_of(r, entry(0, 1)), KVQ_E_DTYPE);
    r.lse = (struct kvq_wire_view){0}; // optional
    assert_int_equal(status_of(r, entry(0, 1)), 0);
    r = kit_header(KVQ_OP_READ, 1);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, KV, HEADS, DIM, KVQ_BF16);
    struct kvq_entry_wire e = entry(10, 0);
    e.position = 5;
    break_view(&r, &r.k, e);
    break_view(&r, &r.v, e);
}

// The last row that fits, and one more; rows whose product overflows 64 bits.
TEST(test_bounds)
{
    struct kvq_request r = kit_header(KVQ_OP_READ, 1);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, 0, HEADS, DIM, KVQ_BF16);
    struct kvq_entry_wire e = entry(8, 0);
    e.position = 0;
    e.row = BUFFER / ROW - 8;
    assert_int_equal(status_of(r, e), 0);
    e.row++;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    e.row = UINT32_MAX;
    e.append = UINT32_MAX;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    r.k.token_stride = r.v.token_stride = 1ull << 40;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    e.row = 1u << 24; // times 2^40 is 0 in 64 bits
    e.append = 1;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    e.append = 8;
    r.k.token_stride = r.v.token_stride = 0; // rows lie on one another
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
}

// A buffer of an odd size ends where it ends, whatever lies behind it.
TEST(test_last_byte)
{
    uint32_t odd;
    assert_int_equal(kit_buffer(&m, 10 * ROW - 1, &odd), 0);
    struct kvq_request r = kit_header(KVQ_OP_READ, 1);
    r.k = r.v = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.k.buffer = odd;
    r.v.offset = KV;
    struct kvq_entry_wire e = entry(9, 0);
    e.position = 0;
    assert_int_equal(status_of(r, e), 0);
    e.append = 10;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
}

// An entry whose output rows meet those of an entry before it fails, in whatever order rows stand.
TEST(test_outputs_of_entries)
{
    enum { N = 12, ROWS = 60 };
    for (uint32_t round = 0; round < 200; round++) {
        struct kvq_entry_wire e[N];
        uint32_t of[ROWS + 4] = {0}; // 1 + the entry that writes a row
        struct kvq_request r = attend();
        r.count = N;
        r.slots = (uint16_t)kvq_request_slots(N, 0);
        for (uint32_t i = 0; i < N; i++) {
            e[i] = entry(0, (uint16_t)(1 + kit_below(&kit, 4)));
            e[i].q_row = kit_below(&kit, ROWS);
        }
        assert_int_equal(kit_request(&m, &r, e), 0);
        for (uint32_t i = 0; i < N; i++) {
            bool meets = false;
            for (uint32_t row = e[i].q_row; row < e[i].q_row + e[i].queries; row++)
                meets |= of[row] != 0;
            for (uint32_t row = e[i].q_row; !meets && row < e[i].q_row + e[i].queries; row++)
                of[row] = 1 + i;
            int status = kvq__queue_results(m.queue)[i].status;
            assert_int_equal(status, meets ? KVQ_E_INVALID : 0);
        }
    }
}

// What a request writes overlaps neither itself nor what it reads; what takes turns does not.
TEST(test_outputs_apart)
{
    enum { Q_ROW = 4 * DIM * 4 };
    struct kvq_entry_wire e = entry(0, 4);
    struct kvq_request r = attend();
    r.out.token_stride = r.out.head_stride; // head 1 of a row is head 0 of the next
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.out.head_stride = 4 * DIM * 4; // [heads][tokens][dim]
    r.out.token_stride = DIM * 4;
    assert_int_equal(status_of(r, e), 0);
    r.out.head_stride = 3 * DIM * 4; // room for three tokens
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.out.head_stride = 2 * DIM * 4; // heads at 0, 2, 4, 6 of a row of 1: odd rows between them
    r.out.token_stride = 7 * DIM * 4;
    assert_int_equal(status_of(r, e), 0);
    r.out.token_stride = 6 * DIM * 4;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r = attend();
    r.out = r.q; // in place
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.out.offset = r.q.offset + 3 * Q_ROW;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.out.offset = r.q.offset + 4 * Q_ROW;
    assert_int_equal(status_of(r, e), 0);
    r.q.token_stride = r.out.token_stride = 2 * Q_ROW; // rows of Q and out by turns
    r.out.offset = r.q.offset + Q_ROW;
    assert_int_equal(status_of(r, e), 0);
    r.out.offset -= 4;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.q.head_stride = r.out.head_stride = 2 * DIM * 4; // heads of Q and out by turns
    r.out.offset = r.q.offset + DIM * 4;
    assert_int_equal(status_of(r, e), 0);
    r.lse.offset = r.out.offset;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r = attend();
    r.lse.offset = r.q.offset + 4 * Q_ROW - 4;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r = kit_header(KVQ_OP_READ, 1);
    r.k = r.v = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    e = entry(10, 0);
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.v.offset = 9 * ROW;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.v.offset = 10 * ROW;
    assert_int_equal(status_of(r, e), 0);
    r.k.token_stride = r.k.head_stride;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
}

// Entries may come in any order of rows: what they write and read is looked at as a whole.
TEST(test_outputs_apart_in_any_order)
{
    enum { Q_ROW = 4 * DIM * 4 };
    for (uint32_t first = 0; first < 2; first++) {
        struct kvq_entry_wire e[2] = {entry(0, 1), entry(0, 1)};
        struct kvq_request r = attend();
        e[first].q_row = 5;
        r.out.offset = r.q.offset + 4 * Q_ROW; // row 0 of out is row 4 of Q, and 5 is read
        r.count = 2;
        r.slots = (uint16_t)kvq_request_slots(r.count, 0);
        assert_int_equal(kit_request(&m, &r, e), KVQ_E_INVALID);
        r.out.offset = r.q.offset + 6 * Q_ROW;
        assert_int_equal(kit_request(&m, &r, e), 0);
    }
}

// Of two entries that write the same rows the second one fails, and the first has its output.
TEST(test_rows_of_entries_apart)
{
    struct kvq_entry_wire e[4] = {entry(0, 4), entry(0, 4), entry(0, 2), entry(0, 1)};
    const struct kvq_result *results = kvq__queue_results(m.queue);
    struct kvq_request r = attend();
    e[1].q_row = 6;
    e[2].q_row = 5; // its second row is e[1]'s
    e[3].q_row = 4; // between both
    r.count = 4;
    r.slots = (uint16_t)kvq_request_slots(r.count, 0);
    assert_int_equal(kit_request(&m, &r, e), 0);
    assert_int_equal(results[0].status, 0);
    assert_int_equal(results[1].status, 0);
    assert_int_equal(results[2].status, KVQ_E_INVALID);
    assert_int_equal(results[3].status, 0);
    r = kit_header(KVQ_OP_READ, 2);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, KV, HEADS, DIM, KVQ_F32);
    for (uint32_t i = 0; i < 2; i++) {
        e[i] = entry(8, 0);
        e[i].row = 7 * i;
    }
    assert_int_equal(kit_request(&m, &r, e), 0);
    assert_int_equal(results[0].status, 0);
    assert_int_equal(results[1].status, KVQ_E_INVALID);
}

TEST(test_numbers_of_attend)
{
    struct kvq_request r = attend();
    assert_int_equal(status_of(r, entry(0, 0)), KVQ_E_INVALID);
    assert_int_equal(status_of(r, entry(0, KVQ_MAX_QUERY_TOKENS + 1)), KVQ_E_LIMIT);
    assert_int_equal(status_of(r, entry(1, 1)), KVQ_E_NO_STEP); // a step's tokens, and no step
    r.layer = 3;
    assert_int_equal(status_of(r, entry(0, 1)), KVQ_E_SHAPE);
    r.layer = UINT32_MAX;
    assert_int_equal(status_of(r, entry(0, 1)), KVQ_E_SHAPE);
    r = attend();
    r.step = 9;
    assert_int_equal(status_of(r, entry(0, 1)), KVQ_E_NO_STEP);
}

TEST(test_steps)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 1);
    assert_int_equal(status_of(r, entry(1, 0)), KVQ_E_INVALID); // number 0
    r.step = 4;
    assert_int_equal(status_of(r, entry(KVQ_MAX_STEP_TOKENS + 1, 0)), KVQ_E_LIMIT);
    assert_int_equal(status_of(r, entry(UINT32_MAX, 0)), KVQ_E_LIMIT);
    assert_int_equal(status_of(r, entry(10, 0)), 0);
    assert_int_equal(status_of(r, entry(10, 0)), KVQ_E_BUSY); // that number is open
    r.step = 5;
    assert_int_equal(status_of(r, entry(10, 0)), KVQ_E_BUSY);           // the session is in a step
    assert_int_equal(status_of(append(4), entry(9, 0)), KVQ_E_INVALID); // not the step's tokens
    struct kvq_request a = append(4);
    a.layer = 2; // reads layer 1's cache
    assert_int_equal(status_of(a, entry(10, 0)), KVQ_E_INVALID);
    a.layer = 0;
    assert_int_equal(status_of(a, entry(10, 0)), 0);
    assert_int_equal(status_of(a, entry(10, 0)), KVQ_E_INVALID); // twice
    r = attend();
    r.step = 4;
    assert_int_equal(status_of(r, entry(10, 11)), KVQ_E_INVALID); // more queries than tokens
    assert_int_equal(status_of(r, entry(10, 10)), 0);
    r.layer = 1;
    assert_int_equal(status_of(r, entry(10, 1)), KVQ_E_INCOMPLETE); // not appended yet
    r.flags = KVQ_REQ_PAST_ONLY;
    assert_int_equal(status_of(r, entry(10, 1)), 0);
    assert_int_equal(status_of(kit_header(KVQ_OP_TRUNCATE, 1), entry(0, 0)), KVQ_E_BUSY);
    assert_int_equal(status_of(kit_header(KVQ_OP_FORK, 1), entry(0, 0)), KVQ_E_BUSY);
    r = kit_of_step(KVQ_OP_STEP_ABORT, 0, 4);
    assert_int_equal(status_of(r, entry(0, 0)), 0);
    assert_int_equal(kit.core->n_steps, 0);
}

// A step that was asked to append what it cannot does not commit; one whose append can be made good
// does.
// An event tells what was refused and why, once a second for each client, and counts the others.
TEST(test_refusals_told)
{
    struct kvq_entry_wire e = entry(0, 0);
    uint64_t before = kit.events[KVQ__EVENT_REQUEST_REFUSED];
    e.position = TOKENS + 10; // of more tokens than there are
    for (uint32_t i = 0; i < 4; i++)
        assert_true(status_of(kit_header(KVQ_OP_TRUNCATE, 1), e) < 0);
    assert_int_equal(kit.events[KVQ__EVENT_REQUEST_REFUSED], before + 1);
    assert_non_null(strstr(kit.refusal_text, "TRUNCATE of step 0, layer 0: "));
    assert_non_null(strstr(kit.refusal_text, "; 0 more since"));
    kit_tick(&kit, 1000000000);
    assert_true(status_of(kit_header(KVQ_OP_TRUNCATE, 1), e) < 0);
    assert_int_equal(kit.events[KVQ__EVENT_REQUEST_REFUSED], before + 2);
    assert_non_null(strstr(kit.refusal_text, "; 3 more since"));
}

TEST(test_refused_appends)
{
    for (uint32_t way = 0; way < 4; way++) {
        struct kvq_request begin = kit_header(KVQ_OP_STEP_BEGIN, 1), a = append(7);
        struct kvq_request end = kit_header(KVQ_OP_STEP_END, 1);
        begin.step = end.step = 7;
        assert_int_equal(status_of(begin, entry(10, 0)), 0);
        struct kvq_entry_wire far = entry(10, 0);
        far.row = UINT32_MAX;
        assert_int_equal(status_of(a, far), KVQ_E_BOUNDS); // made good below
        for (a.layer = 0; a.layer < 2; a.layer++)
            assert_int_equal(status_of(a, entry(10, 0)), 0);
        a.layer = 1;
        assert_true(status_of(a, entry(10, 0)) < 0); // twice: the first one stands
        a.layer = way == 0 ? 2 : 3;                  // reads layer 1's; no such layer
        if (way < 2)
            assert_true(status_of(a, entry(10, 0)) < 0);
        if (way == 2) { // with attention over rows that are not there
            struct kvq_request both = attend();
            both.op = KVQ_OP_APPEND_ATTEND;
            both.step = 7;
            both.layer = 2;
            both.k = a.k;
            both.v = a.v;
            far = entry(10, 1);
            far.q_row = UINT32_MAX;
            assert_int_equal(status_of(both, far), KVQ_E_BOUNDS);
        }
        assert_int_equal(status_of(end, entry(10, 0)), way < 3 ? KVQ_E_INCOMPLETE : 0);
        assert_int_equal(kit_of(&m, session)->tokens, way < 3 ? TOKENS : TOKENS + 10);
        assert_null(kit_of(&m, session)->step);
    }
    struct kvq_entry_wire e = entry(0, 0);
    e.position = TOKENS + 10;
    e.list_token = 10;
    assert_int_equal(status_of(kit_header(KVQ_OP_TRUNCATE, 1), e), 0);
}

TEST(test_too_many_steps)
{
    uint64_t handles[KVQ_MAX_STEPS + 1];
    const struct kvq__layer_row row = {1, 1, DIM, DIM, .format = "f16", .kv_from = -1};
    for (uint32_t i = 0; i <= KVQ_MAX_STEPS; i++) {
        handles[i] = kit_session(&m, &row, 1, 0);
        struct kvq_entry_wire e = {.handle = handles[i]};
        int expect = i < KVQ_MAX_STEPS ? 0 : KVQ_E_LIMIT;
        assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, i + 1, e, NULL), expect);
    }
    for (uint32_t i = 0; i < KVQ_MAX_STEPS; i++)
        assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, i + 1,
                                    (struct kvq_entry_wire){.handle = handles[i]}, NULL),
                         0);
}

static int32_t *page_list(void)
{
    return (int32_t *)(void *)(m.memory + LIST_AT);
}

static struct kvq_request paged(uint64_t step)
{
    struct kvq_request r = append(step);
    r.flags = KVQ_REQ_PAGED_KV;
    r.page_tokens = 16;
    r.k_page_stride = r.v_page_stride = 16 * ROW;
    r.list = (struct kvq_wire_view){.offset = LIST_AT, .buffer = m.buffer};
    return r;
}

static void begin(uint64_t step, uint32_t tokens)
{
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, step, entry(tokens, 0), NULL), 0);
}

// A buffer in which only two elements of the list lie.
static uint32_t short_list(void)
{
    uint32_t id;
    assert_int_equal(kit_buffer(&m, LIST_AT + 8, &id), 0);
    return id;
}

TEST(test_pages_refused)
{
    begin(1, 40);
    struct kvq_entry_wire e = entry(40, 0);
    struct kvq_request r = paged(1);
    for (uint32_t i = 0; i < 4; i++)
        page_list()[i] = (int32_t)i;
    page_list()[2] = -1;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    r.k_page_stride = r.v_page_stride = 0; // where -1 would be as good as any
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    r = paged(1);
    page_list()[2] = INT32_MAX;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    page_list()[2] = KV / (16 * ROW); // the first page whose V lies behind the buffer
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    page_list()[2] = 2;
    r.k_page_stride = UINT64_MAX - 15;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    r = paged(1);
    r.page_tokens = 0;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    r.page_tokens = UINT32_MAX; // all tokens in one page: only those are looked at
    assert_int_equal(status_of(r, e), 0);
    r = paged(1);
    r.layer = 1;
    e.list_token = 16;
    assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    e.list_token = 0;
    e.row = UINT32_MAX; // the list itself
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    e.row = 0;
    r.list.buffer = short_list(); // the list goes on behind it, but that is none of ours
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    r.list.buffer = 0;
    assert_int_equal(status_of(r, e), KVQ_E_BUFFER);
    assert_int_equal(kit_of(&m, session)->in_step.layers, 1); // nothing of layer 1 was appended
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 1, entry(0, 0), NULL), 0);
}

// Pages in any order, entered in the middle, give the bytes of a plain tensor.
TEST(test_pages)
{
    static const int32_t pages[] = {7, 2, 30, 5};
    struct kvq_entry_wire e = entry(50, 0);
    memcpy(page_list(), pages, sizeof pages);
    begin(1, 50);
    e.list_token = 9;
    assert_int_equal(status_of(paged(1), e), 0);
    const struct kvq__layer *l = &kit_of(&m, session)->layers[0];
    for (uint32_t t = 0; t < 50; t++) {
        uint32_t at = 9 + t, position = TOKENS + t;
        const float *from =
            (float *)(void *)m.memory + ((size_t)pages[at / 16] * 16 + at % 16) * HEADS * DIM + DIM;
        const uint8_t *raw = kvq__page(l, position / 128)->raw.data;
        raw += kvq_raw_at(&l->raw_layout, 1, position % 128, false);
        uint16_t want[DIM];
        struct kvq_store_counts counts = {0};
        _Alignas(64) static uint8_t record[128 * DIM * 4];
        struct kvq_view one = {from, 0, 0, KVQ_F32};
        kvq_store(kit.core->config.kernels, &l->shape, &one, &one, 0, 0, 1, record, &counts);
        memcpy(want, record, sizeof want);
        assert_memory_equal(raw, want, sizeof want); // K of head 1
    }
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 1, entry(0, 0), NULL), 0);
}

TEST(test_accept_refused)
{
    struct kvq_request r = kit_header(KVQ_OP_ACCEPT, 1);
    r.list = (struct kvq_wire_view){.offset = LIST_AT, .buffer = m.buffer};
    static const int32_t lists[][3] = {{0, 1, 8}, {0, 0, 1}, {2, 1, 3}, {-1, 0, 1}};
    struct kvq_entry_wire e = entry(8, 0);
    e.list_token = 3;
    for (uint32_t i = 0; i < 4; i++) {
        memcpy(page_list(), lists[i], sizeof lists[i]);
        assert_int_equal(status_of(r, e), KVQ_E_INVALID);
    }
    e.append = 17; // max_rollback is 16
    assert_int_equal(status_of(r, e), KVQ_E_ROLLBACK);
    assert_int_equal(kvq__queue_results(m.queue)[0].value, TOKENS - 16);
    e = entry(8, 0);
    e.list_token = 3;
    e.row = UINT32_MAX;
    assert_int_equal(status_of(r, e), KVQ_E_BOUNDS);
    struct kvq_entry_wire twice[2] = {entry(1, 0), entry(1, 0)};
    twice[0].list_token = twice[1].list_token = 1;
    page_list()[0] = 0;
    r.count = 2;
    assert_int_equal(kit_ask(&m, &r, twice), 0);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, KVQ_E_BUSY);
}

// A buffer that is removed while a job uses it stays until the request has ended.
TEST(test_buffer_in_use)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq_request r = attend();
    struct kvq_entry_wire e = entry(0, 1);
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    assert_int_equal(kvq__buffer_remove(m.client, m.buffer, text), 0);
    assert_int_equal(kvq__buffer_remove(m.client, m.buffer, text), KVQ_E_BUFFER);
    enum kvq__progress p = KVQ__RUN;
    while (p == KVQ__RUN) {
        assert_int_equal(kit.buffers_gone, 0);
        kit_run_job(&kit, kvq__queue_job(m.queue));
        p = kvq__request_continue(m.queue);
    }
    assert_int_equal(p, KVQ__DONE);
    assert_int_equal(kit.buffers_gone, 1);
    assert_int_equal(status_of(r, e), KVQ_E_BUFFER);
    uint32_t id;
    assert_int_equal(kit_buffer(&m, BUFFER, &id), 0);
    assert_int_not_equal(id, m.buffer); // the old id stays dead
}

// Who would change what a request reads waits for it, and readers wait for who changes.
TEST(test_waiting)
{
    struct kvq__queue *second;
    struct member late = m;
    char text[KVQ_TEXT_BYTES];
    assert_int_equal(kvq__queue_open(m.client, &second, text), 0);
    late.queue = second;
    struct kvq_request read = attend(), cut = kit_header(KVQ_OP_TRUNCATE, 1);
    struct kvq_entry_wire e = entry(0, 1);
    read.lse.buffer = 0;
    kit_load(&m, &read, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    e.list_token = 0;
    kit_load(&late, &cut, &e);
    assert_int_equal(kvq__request_start(second), KVQ__WAIT);
    assert_int_equal(kvq__request_continue(second), KVQ__WAIT);
    assert_int_equal(kit_go_on(&m, KVQ__RUN), 0);
    assert_int_equal(kit_request(&m, &read, &e), 1); // no new reader gets in between
    assert_int_equal(kvq__request_continue(second), KVQ__DONE);
    assert_int_equal(kvq__queue_results(second)[0].status, 0);
    assert_int_equal(kit_again(&m), 0);
    kvq__queue_close(&second);
}

int main(void)
{
    return run_all(NULL, NULL);
}
