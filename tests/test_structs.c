// SPDX-License-Identifier: Apache-2.0
//
// Structures of libkvq's callers: zeroed ones say what most engines want.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client/kvq.h"
#include "tests/daemon_kit.h"

enum { LAYERS = 3, HEADS = 2, DIM = 128, TOKENS = 4 };

static const char *const fast_flags[] = {"--pool-bytes", "256mb", NULL};
static const char *const exact_flags[] = {"--pool-bytes", "256mb", "--attention", "exact", NULL};
static struct daemon kvqd = {.flags = fast_flags};
static kvq_client *client;

static void begin(const char *const *flags)
{
    kvqd.flags = flags;
    daemon_start(&kvqd);
    struct kvq_connect_options o = {0};
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
    struct kvq_session_info info;
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
            struct kvq_session_info info;
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
    refused(KVQ_E_INVALID, kvq_session_open(client, &o, &session, NULL), "path 3");
    o = session_options(rows);
    rows[1].kv_from = LAYERS + 1; // layer LAYERS: there is none
    refused(KVQ_E_SHAPE, kvq_session_open(client, &o, &session, NULL), "kv_from");
    rows[1].kv_from = 0;
    rows[2].q_heads = 0;
    refused(KVQ_E_SHAPE, kvq_session_open(client, &o, &session, NULL), "heads");
    assert_int_equal(session, 0);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zeroed_session),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_nonsense),
    };
    daemon_prepare(&kvqd);
    int failed = cmocka_run_group_tests_name("structs", tests, NULL, NULL);
    return daemon_cleanup(&kvqd) || failed;
}
