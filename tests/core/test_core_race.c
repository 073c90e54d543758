// SPDX-License-Identifier: Apache-2.0
//
// Two queues at once, step by step: what a request under way reads is neither changed, freed nor
// given to somebody else, whatever the other does meanwhile.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum {
    MIB = 1 << 20,
    BUFFER = 2 * MIB,
    HEADS = 2,
    DIM = 64,
    OUT_BYTES = 4 * DIM * 4,
    Q_AT = BUFFER / 2 - 16384,
    OUT_AT = Q_AT + 4096,
    LIST_AT = Q_AT + 8192,
};

static struct kit kit;
static struct member m, other; // of one user
static char text[KVQ_TEXT_BYTES];

static const struct kvq__layer_row row = {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = -1};

static int setup(void **state)
{
    kit_open(&kit, 5, 64 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    assert_int_equal(member_open(&kit, &other, 1000, BUFFER), 0);
    member_fill(&m);
    member_fill(&other);
    return 0;
}

static uint64_t open_named(struct member *who, uint32_t flags, uint32_t max_rollback)
{
    struct kvq__session_spec spec = {.name = "shared",
                                     .layers = &row,
                                     .n_layers = 1,
                                     .max_rollback = max_rollback,
                                     .flags = flags};
    return kit_opened(who, &spec);
}

static struct kvq_request attend(const struct member *who)
{
    struct kvq_request r = kit_attend(who, 0, Q_AT, OUT_AT, 4, DIM);
    return r;
}

static enum kvq__progress begin_attend(struct member *who, uint64_t handle, uint64_t position)
{
    struct kvq_request r = attend(who);
    struct kvq_entry_wire e = {.handle = handle, .position = position, .queries = 1};
    kit_load(who, &r, &e);
    return kvq__request_start(who->queue);
}

// From KVQ__RUN or KVQ__WAIT to the end; returns the first entry's status.
static int finish(struct member *who, enum kvq__progress p)
{
    while (p != KVQ__DONE) {
        if (p == KVQ__RUN)
            kit_run_job(&kit, kvq__queue_job(who->queue));
        p = kvq__request_continue(who->queue);
    }
    assert_int_equal(kvq__queue_completion(who->queue)->status, 0);
    return kvq__queue_results(who->queue)[0].status;
}

static void attend_now(struct member *who, uint64_t handle, uint64_t position, uint8_t *out)
{
    assert_int_equal(finish(who, begin_attend(who, handle, position)), 0);
    memcpy(out, who->memory + OUT_AT, OUT_BYTES);
}

// While a reader packs, the writer goes on so far that its floor passes what the reader needs.
KIT_TEST(test_commit_while_reading)
{
    uint8_t want[OUT_BYTES];
    uint64_t same = kit_session(&m, &row, 1, 0), writer = open_named(&m, 0, 0);
    uint64_t reader = open_named(&other, KVQ__OPEN_READ_ONLY, 0);
    assert_int_equal(kit_step(&m, same, 300, HEADS, DIM), 0);
    memcpy(other.memory + Q_AT, m.memory + Q_AT, OUT_BYTES);
    attend_now(&m, same, 300, want);
    assert_int_equal(kit_step(&m, writer, 300, HEADS, DIM), 0);
    assert_int_equal(begin_attend(&other, reader, 300), KVQ__RUN); // packs two units
    assert_int_equal(kit_step(&m, writer, 600, HEADS, DIM), 0);
    kit_run_job(&kit, kvq__queue_job(other.queue));
    enum kvq__progress p = kvq__request_continue(other.queue); // attends
    assert_int_equal(p, KVQ__RUN);
    kit_pack(&kit);
    assert_int_equal(kit_of(&m, writer)->layers[0].raw_page, 2); // the rest is still needed
    assert_int_equal(finish(&other, p), 0);
    assert_memory_equal(other.memory + OUT_AT, want, OUT_BYTES);
    assert_int_equal(kit_of(&m, writer)->layers[0].raw_page, 7); // and now no longer
}

// A session dropped under a reader: its blocks go to nobody else until the reader is done.
KIT_TEST(test_drop_while_reading)
{
    uint8_t want[OUT_BYTES];
    uint64_t writer = open_named(&m, 0, 0);
    assert_int_equal(kit_step(&m, writer, 100, HEADS, DIM), 0);
    attend_now(&m, writer, 100, want);
    uint64_t reader = open_named(&other, KVQ__OPEN_READ_ONLY, 0);
    memcpy(other.memory + Q_AT, m.memory + Q_AT, OUT_BYTES);
    assert_int_equal(begin_attend(&other, reader, 100), KVQ__RUN);
    uint64_t used = kit.core->pools[0].used_bytes;
    kit_drop(&m, writer);
    assert_int_equal(kit.core->pools[0].used_bytes, used); // deferred
    core_check(kit.core);
    memset(m.memory, 0, BUFFER / 4);
    for (uint32_t i = 0; i < 2; i++) { // requests that began later end before
        uint64_t next = kit_session(&m, &row, 1, 0);
        assert_int_equal(kit_step(&m, next, 100, HEADS, DIM), 0);
    }
    assert_int_equal(finish(&other, KVQ__RUN), 0);
    assert_memory_equal(other.memory + OUT_AT, want, OUT_BYTES);
    assert_int_equal(kit.core->pools[0].used_bytes, 2 * used); // of the next two alone
}

// The same between two passes: nothing to attend over any more.
KIT_TEST(test_drop_between_passes)
{
    uint64_t writer = open_named(&m, 0, 0), reader = open_named(&other, KVQ__OPEN_READ_ONLY, 0);
    assert_int_equal(kit_step(&m, writer, 300, HEADS, DIM), 0);
    assert_int_equal(begin_attend(&other, reader, 300), KVQ__RUN); // packs
    kit_drop(&m, writer);
    assert_int_equal(finish(&other, KVQ__RUN), KVQ_E_CANCELLED);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
}

// A step may not begin while something still uses the tail of the last one, nor while the session
// is being changed.
KIT_TEST(test_begin_waits)
{
    struct member second = m;
    uint64_t handle = kit_session(&m, &row, 1, 8);
    assert_int_equal(kit_step(&m, handle, 50, HEADS, DIM), 0);
    assert_int_equal(kvq__queue_open(m.client, &second.queue, text), 0);
    struct kvq_entry_wire e = {.handle = handle, .position = 50, .append = 20, .row = 50};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    struct kvq_request r = kit_append(&m, 1, 0, HEADS, DIM);
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    assert_int_equal(kit_simple(&second, KVQ_OP_STEP_ABORT, 1, e, NULL), 0);
    assert_int_equal(kit_simple(&second, KVQ_OP_STEP_BEGIN, 2, e, NULL), 1); // waits
    assert_int_equal(finish(&m, KVQ__RUN), KVQ_E_CANCELLED);
    assert_int_equal(finish(&second, KVQ__WAIT), 0);
    assert_int_equal(kit_simple(&second, KVQ_OP_STEP_ABORT, 2, e, NULL), 0);
    r = kit_header(KVQ_OP_ACCEPT, 1);
    r.list = (struct kvq_wire_view){.offset = LIST_AT, .buffer = m.buffer};
    e.append = 8;
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    e.append = 20;
    assert_int_equal(kit_simple(&second, KVQ_OP_STEP_BEGIN, 3, e, NULL), 1);
    assert_int_equal(finish(&m, KVQ__RUN), 0);
    assert_int_equal(finish(&second, KVQ__WAIT), KVQ_E_POSITION); // for it is shorter now
    kvq__queue_close(&second.queue);
}

// A step ends with the queue that it was begun through, also while another queue of the client
// appends to it; the session stands as before it. Steps of other queues go on.
KIT_TEST(test_queue_closes)
{
    struct member second = m;
    uint64_t handle = kit_session(&m, &row, 1, 8);
    assert_int_equal(kit_step(&m, handle, 50, HEADS, DIM), 0);
    struct kvq_entry_wire e = {.handle = handle, .position = 50, .append = 300};
    struct kvq_entry_wire own = {.handle = kit_session(&m, &row, 1, 0), .append = 1};
    assert_int_equal(kvq__queue_open(m.client, &second.queue, text), 0);
    assert_int_equal(kit_simple(&second, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 2, own, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 3, e, NULL), KVQ_E_BUSY);
    struct kvq_request r = kit_append(&m, 1, 0, HEADS, DIM);
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    kvq__queue_ending(second.queue);
    assert_int_equal(kit.core->n_steps, 2);
    kvq__queue_close(&second.queue);
    assert_int_equal(kit.core->n_steps, 1); // the other queue's
    core_check(kit.core);
    assert_int_equal(finish(&m, KVQ__RUN), KVQ_E_CANCELLED);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 1, e, NULL), KVQ_E_NO_STEP);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 2, own, NULL), 0);
    assert_int_equal(kit_of(&m, handle)->tokens, 50);
    assert_int_equal(kit_step(&m, handle, 300, HEADS, DIM), 0);
    assert_int_equal(kit_of(&m, handle)->tokens, 350);
}

// Whoever guesses a fork's handle before its copies are done, waits.
KIT_TEST(test_fork_waits)
{
    struct member second = m;
    uint8_t want[OUT_BYTES];
    uint64_t handle = kit_session(&m, &row, 1, 0);
    assert_int_equal(kit_step(&m, handle, 50, HEADS, DIM), 0);
    attend_now(&m, handle, 50, want);
    assert_int_equal(kvq__queue_open(m.client, &second.queue, text), 0);
    struct kvq_request r = kit_header(KVQ_OP_FORK, 1);
    struct kvq_entry_wire e = {.handle = handle, .position = 50};
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    assert_int_equal(begin_attend(&second, handle + 1, 50), KVQ__WAIT);
    assert_int_equal(finish(&m, KVQ__RUN), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].value, handle + 1);
    assert_int_equal(finish(&second, KVQ__WAIT), 0);
    assert_memory_equal(m.memory + OUT_AT, want, OUT_BYTES);
    kvq__queue_close(&second.queue);
}

// What a fork shares is what neither can change: the source goes back and appends other tokens.
KIT_TEST(test_fork_shares_nothing_that_changes)
{
    uint8_t want[OUT_BYTES], got[OUT_BYTES];
    uint64_t fork;
    uint64_t source = kit_session(&m, &row, 1, 40);
    assert_int_equal(kit_step(&m, source, 130, HEADS, DIM), 0);
    attend_now(&m, source, 130, want);
    struct kvq_entry_wire e = {.handle = source, .position = 130};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
    e.list_token = 40;
    assert_int_equal(kit_simple(&m, KVQ_OP_TRUNCATE, 0, e, NULL), 0);
    memset(m.memory, 0, BUFFER / 4);
    assert_int_equal(kit_step(&m, source, 30, HEADS, DIM), 0);
    attend_now(&m, fork, 130, got);
    assert_memory_equal(want, got, OUT_BYTES);
}

// A client that dies while its accept moves tokens: the session ends up as accepted.
KIT_TEST(test_death_in_accept)
{
    static const int32_t kept[] = {1, 3};
    uint64_t handle = open_named(&m, 0, 8);
    assert_int_equal(kit_step(&m, handle, 60, HEADS, DIM), 0);
    memcpy(m.memory + LIST_AT, kept, sizeof kept);
    struct kvq_request r = kit_header(KVQ_OP_ACCEPT, 1);
    r.list = (struct kvq_wire_view){.offset = LIST_AT, .buffer = m.buffer};
    struct kvq_entry_wire e = {.handle = handle, .position = 60, .append = 6, .list_token = 2};
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN);
    kvq__client_detach(m.client);
    assert_int_equal(kit.buffers_gone, 0);
    kit_run_job(&kit, kvq__queue_job(m.queue));
    assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE);
    assert_int_equal(kit.buffers_gone, 1);
    kvq__queue_close(&m.queue);
    member_free(&m);
    assert_int_equal(kit_of(&other, open_named(&other, 0, 8))->tokens, 56);
}

// Memory of one namespace is zeroed before another gets it, and not before.
KIT_TEST(test_zeroed)
{
    struct member stranger;
    kit.core->pools[0].budget = 2 * MIB; // an extent, which either has in its turn
    uint64_t handle = kit_session(&m, &row, 1, 0);
    assert_int_equal(kit_step(&m, handle, 128, HEADS, DIM), 0);
    kit_pack(&kit); // so that raw and packed blocks have been written to
    kit_drop(&m, handle);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    assert_int_equal(kit.extents_out, 1);
    assert_int_equal(member_open(&kit, &stranger, 1001, BUFFER), 0);
    handle = kit_session(&stranger, &row, 1, 0);
    struct kvq_entry_wire e = {.handle = handle, .append = 128};
    assert_int_equal(kit_simple(&stranger, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    const struct kvq__extent *raw =
        kvq__page(&kit_of(&stranger, handle)->layers[0], 0)->raw.block->extent;
    for (size_t i = 0; i < raw->memory.bytes; i++)
        assert_int_equal(raw->memory.base[i], 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
