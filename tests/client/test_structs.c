// SPDX-License-Identifier: Apache-2.0
//
// Structures of libkvq's callers: zeroed ones say what most engines want, and those of earlier and
// later versions are understood.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client/kvq.h"
#include "tests/kits/daemon_kit.h"

enum { LAYERS = 3, HEADS = 2, DIM = 128, TOKENS = 4 };

static const char *const fast_flags[] = {"--pool-bytes", "256mb", NULL};
static const char *const exact_flags[] = {"--pool-bytes", "256mb", "--attention", "exact", NULL};
static struct daemon kvqd = {.flags = fast_flags};
static kvq_client *client;

static void begin(const char *const *flags)
{
    kvqd.flags = flags;
    daemon_start(&kvqd);
    struct kvq_connect_options o = {.size = sizeof o};
    o.runtime_dir = kvqd.directory;
    fine(kvq_connect(&o, &client));
}

static void end(void)
{
    kvq_disconnect(&client);
    daemon_end(&kvqd, SIGTERM);
}

// Zeroed but for what nobody can guess.
static struct kvq_session_options session_options(struct kvq_layer *rows)
{
    struct kvq_session_options o;
    memset(rows, 0, LAYERS * sizeof *rows);
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    for (uint32_t i = 0; i < LAYERS; i++) {
        rows[i].q_heads = rows[i].kv_heads = HEADS;
        rows[i].k_dim = rows[i].v_dim = DIM;
    }
    o.layers = rows;
    o.n_layers = LAYERS;
    o.format = "oscar2";
    return o;
}

// A step of a session whose layers all have K and V, and attend.
static void step(kvq_session session)
{
    kvq_queue *queue;
    kvq_buffer *buffer;
    const size_t bytes = (size_t)TOKENS * HEADS * DIM * 2;
    fine(kvq_queue_open(client, &queue));
    fine(kvq_buffer_create(client, 2 * bytes, &buffer));
    struct kvq_entry e = {.session = session, .append = TOKENS, .queries = TOKENS};
    struct kvq_work work = {0};
    work.k = work.v = work.q = kvq_tensor_make(buffer, 0, HEADS, DIM, KVQ_DTYPE_F16);
    work.out = kvq_tensor_make(buffer, bytes, HEADS, DIM, KVQ_DTYPE_F16);
    fine(kvq_step_begin(queue, &e, 1, &work.step));
    fine(e.status);
    for (work.layer = 0; work.layer < LAYERS; work.layer++) {
        fine(kvq_append_attend(queue, &work, &e, 1));
        fine(e.status);
    }
    fine(kvq_step_end(queue, work.step, &e, 1));
    fine(e.status);
    assert_int_equal(e.value, TOKENS);
    kvq_buffer_close(&buffer);
    kvq_queue_close(&queue);
}

static void test_zeroed_session(void **unused)
{
    (void)unused;
    struct kvq_layer rows[LAYERS], told[LAYERS + 1];
    struct kvq_session_info info = {.size = sizeof info};
    kvq_session session;
    uint32_t n;
    begin(fast_flags);
    const struct kvq_session_options o = session_options(rows);
    fine(kvq_session_open(client, &o, &session, &info));
    assert_int_equal(info.layers, LAYERS);
    assert_int_equal(info.shards, 1);
    assert_int_equal(info.created, 1);
    assert_string_equal(info.place, "host");
    assert_string_equal(info.attention, "fast");
    assert_string_equal(info.v_rotation, "daemon"); // as the format's paper does
    fine(kvq_session_layers(client, session, told, LAYERS + 1, &n));
    assert_int_equal(n, LAYERS);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(told[i].kv_from, 0); // a cache of its own
    step(session);
    fine(kvq_session_close(client, session));
    end();
}

// 0 leaves attention to the daemon, and asking for one path gets it.
static void test_attention(void **unused)
{
    (void)unused;
    static const char *const expected[2][3] = {{"fast", "exact", "fast"},
                                               {"exact", "exact", "fast"}};
    for (int i = 0; i < 2; i++) {
        begin(i ? exact_flags : fast_flags);
        for (uint8_t attention = 0; attention < 3; attention++) {
            struct kvq_layer rows[LAYERS];
            struct kvq_session_info info = {.size = sizeof info};
            kvq_session session;
            struct kvq_session_options o = session_options(rows);
            o.attention = attention;
            fine(kvq_session_open(client, &o, &session, &info));
            assert_string_equal(info.attention, expected[i][attention]);
            fine(kvq_session_close(client, session));
        }
        end();
    }
}

static void test_nonsense(void **unused)
{
    (void)unused;
    struct kvq_layer rows[LAYERS];
    kvq_session session;
    begin(fast_flags);
    struct kvq_session_options o = session_options(rows);
    o.attention = 3;
    refused(KVQ_E_INVALID, kvq_session_open(client, &o, &session, NULL), "attention is 3");
    o = session_options(rows);
    rows[1].kv_from = LAYERS + 1; // layer LAYERS: there is none
    refused(KVQ_E_SHAPE, kvq_session_open(client, &o, &session, NULL), "kv_from");
    rows[1].kv_from = 0;
    rows[2].q_heads = 0;
    refused(KVQ_E_SHAPE, kvq_session_open(client, &o, &session, NULL), "heads");
    assert_int_equal(session, 0);
    end();
}

// ---- Sizes ----

// What can be the size of no version is refused, and the text says what to do.
static void test_no_size(void **unused)
{
    (void)unused;
    static const uint32_t wrong[] = {0, 4, 13, 5000, UINT32_MAX};
    struct kvq_layer rows[LAYERS];
    kvq_session session;
    kvq_queue *queue;
    kvq_client *other;
    kvq_local *local, *made;
    kvq_bucket *bucket;
    kvq_capture *capture;
    uint64_t tokens;
    begin(fast_flags);
    fine(kvq_queue_open(client, &queue));
    fine(kvq_local_open(queue, NULL, &local));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvq_session_options o = session_options(rows);
        struct kvq_connect_options co = {.size = wrong[i]};
        struct kvq_local_options lo = {.size = wrong[i]};
        struct kvq_bucket_options bo = {.size = wrong[i]};
        struct kvq_capture_options po = {.size = wrong[i]};
        struct kvq_daemon_info daemon_info = {.size = wrong[i]};
        struct kvq_session_info info = {.size = wrong[i]};
        o.name = "sized";
        o.flags = KVQ_OPEN_MUST_CREATE; // whatever is refused here made none
        refused(KVQ_E_INVALID, kvq_session_open(client, &o, &session, &info), "kvq_session_info");
        assert_int_equal(session, 0);
        o.size = wrong[i];
        refused(KVQ_E_INVALID, kvq_session_open(client, &o, &session, NULL),
                "set it to sizeof(struct kvq_session_options)");
        refused(KVQ_E_INVALID, kvq_lookup(client, &o, &tokens), "kvq_session_options");
        refused(KVQ_E_INVALID, kvq_connect(&co, &other), "kvq_connect_options");
        refused(KVQ_E_INVALID, kvq_local_open(queue, &lo, &made), "kvq_local_options");
        refused(KVQ_E_INVALID, kvq_bucket_open(local, &bo, &bucket), "kvq_bucket_options");
        refused(KVQ_E_INVALID, kvq_capture_open("/nowhere", &po, &capture), "kvq_capture_options");
        refused(KVQ_E_INVALID, kvq_daemon_info(client, &daemon_info), "kvq_daemon_info");
        refused(KVQ_E_INVALID, kvq_session_info(client, 1, &info), "kvq_session_info");
    }
    kvq_local_close(&local);
    kvq_queue_close(&queue);
    end();
}

// Of an earlier version, which had fewer fields: what stands behind them is not looked at.
static void test_earlier_caller(void **unused)
{
    (void)unused;
    struct kvq_layer rows[LAYERS];
    struct kvq_session_info info;
    kvq_session session;
    begin(fast_flags);
    struct kvq_session_options o = session_options(rows);
    o.size = offsetof(struct kvq_session_options, place);
    memset((uint8_t *)&o + o.size, 0xaa, sizeof o - o.size);
    memset(&info, 0xaa, sizeof info);
    info.size = offsetof(struct kvq_session_info, group_tokens);
    fine(kvq_session_open(client, &o, &session, &info));
    assert_string_equal(info.place, "host");
    assert_int_equal(info.layers, LAYERS);
    assert_int_equal(info.size, offsetof(struct kvq_session_info, group_tokens));
    for (size_t i = info.size; i < sizeof info; i++)
        assert_int_equal(((uint8_t *)&info)[i], 0xaa);
    step(session);
    fine(kvq_session_close(client, session));
    end();
}

// Of a later version: its fields may be there, but not be set.
static void test_later_caller(void **unused)
{
    (void)unused;
    struct kvq_layer rows[LAYERS];
    struct {
        struct kvq_session_options known;
        uint64_t more[2];
    } o = {.known = session_options(rows)};
    struct {
        struct kvq_session_info known;
        uint64_t more[2];
    } info;
    kvq_session session;
    begin(fast_flags);
    memset(&info, 0xaa, sizeof info);
    o.known.size = sizeof o;
    info.known.size = sizeof info;
    fine(kvq_session_open(client, &o.known, &session, &info.known));
    assert_string_equal(info.known.v_rotation, "daemon");
    assert_int_equal(info.known.size, sizeof info);
    assert_int_equal(info.more[0] | info.more[1], 0);
    fine(kvq_session_close(client, session));
    o.more[1] = 1;
    refused(KVQ_E_UNSUPPORTED, kvq_session_open(client, &o.known, &session, NULL), "knows");
    assert_int_equal(session, 0);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zeroed_session), cmocka_unit_test(test_attention),
        cmocka_unit_test(test_nonsense),       cmocka_unit_test(test_no_size),
        cmocka_unit_test(test_earlier_caller), cmocka_unit_test(test_later_caller),
    };
    daemon_prepare(&kvqd);
    int failed = cmocka_run_group_tests_name("structs", tests, NULL, NULL);
    return daemon_cleanup(&kvqd) || failed;
}
