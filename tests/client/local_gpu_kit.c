// SPDX-License-Identifier: Apache-2.0
//
// See local_gpu_kit.h.
#include "tests/client/local_gpu_kit.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct lg_rig rig;

void lg_open_local(uint32_t flags)
{
    const struct kvq_local_options o = {
        .size = sizeof o, .place = rig.gpu, .max_tokens = MAX, .flags = flags};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
}

void lg_connect(void)
{
    struct kvq_gpu_info gpu;
    uint32_t n;
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .timeout_ms = 20000};
    fine(kvq_connect(&options, &rig.client));
    fine(kvq_queue_open(rig.client, &rig.queue));
    fine(kvq_daemon_gpus(rig.client, &gpu, 1, &n));
    assert_int_equal(n, 1);
    memcpy(rig.gpu, gpu.place, sizeof rig.gpu);
    OK(drv.stream_create(&rig.stream, KVQ_GPU_STREAM_OWN));
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &rig.buffer));
    rig.at = (uintptr_t)kvq_buffer_device(rig.buffer);
    rig.layers = LAYERS;
    rig.prompt = 40;
    rig.queries = 64;
    rig.q_heads = Q_HEADS;
    rig.kv_heads[0] = rig.kv_heads[1] = KV_HEADS;
    rig.window = 70;
}

void lg_disconnect(void)
{
    OK(drv.stream_sync(rig.stream));
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
    kvq_buffer_close(&rig.buffer);
    kvq_buffer_close(&rig.host);
    rig.on_host = 0;
    kvq_disconnect(&rig.client);
    rig.queue = NULL;
    OK(drv.stream_destroy(rig.stream));
}

int lg_setup(void **state)
{
    (void)state;
    unsetenv("KVQ_LOCAL");
    rig.before = soft_counts();
    rig.files = soft_open_files();
    daemon_start(&rig.daemon);
    lg_connect();
    return 0;
}

// Nothing is left here, and the daemon leaves in good order.
int lg_teardown(void **state)
{
    (void)state;
    lg_disconnect();
    if (rig.daemon.pid)
        daemon_end(&rig.daemon, SIGTERM);
    const struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &rig.before, sizeof now);
    assert_int_equal(soft_open_files(), rig.files);
    return 0;
}

// ---- Two sessions with the same steps ----

// Shard 0 or 1 of a session of two, or a session of its own (-1).
void lg_open_shard(const char *format, int shard, struct lg_pair *p)
{
    struct kvq_layer rows[LAYERS] = {
        {.q_heads = rig.q_heads, .kv_heads = rig.kv_heads[0], .k_dim = DIM, .v_dim = DIM},
        {.q_heads = rig.q_heads,
         .kv_heads = rig.kv_heads[1],
         .k_dim = DIM,
         .v_dim = DIM,
         .window = rig.window}};
    struct kvq_session_options o = {.size = sizeof o,
                                    .layers = rows,
                                    .n_layers = rig.layers,
                                    .format = format,
                                    .prompt_tokens = rig.prompt,
                                    .max_rollback = 2,
                                    .place = rig.gpu};
    *p = (struct lg_pair){0};
    if (shard >= 0) {
        o.name = "here";
        o.shard = (uint16_t)shard;
        o.shards = 2;
    }
    fine(kvq_session_open(rig.client, &o, &p->here, NULL));
    o.name = shard >= 0 ? "there" : NULL;
    fine(kvq_session_open(rig.client, &o, &p->there, NULL));
    fine(kvq_local_add(rig.local, p->here));
}

void lg_open_pair(const char *format, struct lg_pair *p)
{
    lg_open_shard(format, -1, p);
}

void lg_fork_pair(const struct lg_pair *of, uint64_t tokens, struct lg_pair *p)
{
    struct kvq_entry both[] = {{.session = of->here, .position = tokens},
                               {.session = of->there, .position = tokens}};
    fine(kvq_fork(rig.queue, both, 2));
    fine(both[0].status);
    fine(both[1].status);
    *p = (struct lg_pair){both[0].value, both[1].value, tokens};
    fine(kvq_local_add(rig.local, p->here));
}

void lg_close_pair(struct lg_pair *p)
{
    fine(kvq_session_close(rig.client, p->here));
    fine(kvq_session_close(rig.client, p->there));
}

// The buffer: K, V and Q of each layer, then both sides' outputs.
struct kvq_tensor lg_tensor(uint32_t part, uint32_t layer)
{
    uint32_t heads = part < 2 ? rig.kv_heads[layer] : rig.q_heads;
    return kvq_tensor_make(rig.buffer, (uint64_t)(part * LAYERS + layer) * PART, heads, DIM,
                           KVQ_DTYPE_F32);
}

static bool on_host(uint32_t part)
{
    return rig.on_host >> part & 1;
}

static struct kvq_tensor tensor_here(uint32_t part, uint32_t layer)
{
    struct kvq_tensor t = lg_tensor(part, layer);
    t.buffer = on_host(part) ? rig.host : rig.buffer;
    return t;
}

struct kvq_work lg_work_of(uint32_t layer, bool here)
{
    struct kvq_tensor (*of)(uint32_t, uint32_t) = here ? tensor_here : lg_tensor;
    return (struct kvq_work){.layer = layer,
                             .k = of(0, layer),
                             .v = of(1, layer),
                             .q = of(2, layer),
                             .out = of(here ? 3 : 4, layer)};
}

uint8_t *lg_host_memory(void)
{
    return rig.mapping ? rig.mapping : kvq_buffer_data(rig.host);
}

void lg_fill(void)
{
    static float values[3 * LAYERS * PART / sizeof(float)];
    rig.salt = rig.salt * 1664525 + 1013904223;
    for (uint32_t i = 0; i < sizeof values / sizeof *values; i++)
        values[i] = (float)((i * 7919 + rig.salt % 1009 * 31) % 2003) / 1000 - 1;
    OK(drv.copy_in(rig.at, values, sizeof values, rig.stream));
    OK(drv.stream_sync(rig.stream));
    if (rig.host)
        memcpy(lg_host_memory(), values, sizeof values);
}

void lg_compare(uint32_t rows, uint64_t tokens)
{
    static float here[PART / sizeof(float)], there[PART / sizeof(float)];
    size_t bytes = (size_t)rows * rig.q_heads * DIM * sizeof(float);
    assert_true(bytes <= PART);
    for (uint32_t i = 0; i < rig.layers; i++) {
        OK(drv.copy_out(here, rig.at + lg_tensor(3, i).offset, bytes, rig.stream));
        OK(drv.copy_out(there, rig.at + lg_tensor(4, i).offset, bytes, rig.stream));
        OK(drv.stream_sync(rig.stream));
        if (on_host(3))
            memcpy(here, lg_host_memory() + lg_tensor(3, i).offset, bytes);
        if (memcmp(here, there, bytes) != 0)
            fail_msg("outputs of layer %u differ at %llu tokens", i, (unsigned long long)tokens);
    }
}

struct lg_batch lg_batch_of(const struct lg_pair *p, uint32_t n, uint32_t append, bool here)
{
    struct lg_batch b = {.n = n};
    uint32_t queries = append < rig.queries ? append : rig.queries;
    for (uint32_t i = 0; i < n; i++, b.rows += append, b.q_rows += queries)
        b.entries[i] = (struct kvq_entry){.session = here ? p[i].here : p[i].there,
                                          .position = p[i].tokens,
                                          .row = b.rows,
                                          .q_row = b.q_rows,
                                          .append = append,
                                          .queries = (uint16_t)queries};
    return b;
}

void lg_all_fine(int rc, const struct lg_batch *b)
{
    fine(rc);
    for (uint32_t i = 0; i < b->n; i++)
        fine(b->entries[i].status);
}

void lg_step_there(struct lg_batch *b)
{
    uint64_t step;
    lg_all_fine(kvq_step_begin(rig.queue, b->entries, b->n, &step), b);
    for (uint32_t i = 0; i < rig.layers; i++) {
        struct kvq_work w = lg_work_of(i, false);
        w.step = step;
        lg_all_fine(kvq_append_attend_on_stream(rig.queue, &w, b->entries, b->n, rig.stream), b);
    }
    lg_all_fine(kvq_step_end(rig.queue, step, b->entries, b->n), b);
}

int lg_begin(struct lg_batch *b)
{
    return kvq_local_begin_on_stream(rig.local, rig.bucket, b->entries, b->n, rig.stream);
}

int lg_attend(const struct kvq_work *w, struct lg_batch *b)
{
    return kvq_local_attend_on_stream(rig.local, rig.bucket, w, b->entries, b->n, rig.stream);
}

int lg_step_here(const struct lg_pair *p, uint64_t position, uint32_t append)
{
    struct lg_pair at = *p;
    at.tokens = position;
    struct lg_batch b = lg_batch_of(&at, 1, append, true);
    fine(lg_begin(&b));
    for (uint32_t i = 0; i < rig.layers && !b.entries[0].status; i++) {
        const struct kvq_work w = lg_work_of(i, true);
        lg_all_fine(lg_attend(&w, &b), &b);
    }
    if (!b.entries[0].status)
        fine(kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, rig.stream));
    return b.entries[0].status;
}

uint64_t lg_waits(void)
{
    return soft_calls("stream_sync") + soft_calls("event_sync") + soft_calls("context_sync");
}

void lg_step_from(struct lg_pair *p, uint32_t n, uint32_t append, uint32_t row,
                  struct kvq_gpu_exec *exec)
{
    struct lg_batch here = lg_batch_of(p, n, append, true),
                    there = lg_batch_of(p, n, append, false);
    for (uint32_t i = 0; i < n; i++) {
        here.entries[i].row = there.entries[i].row += row;
        here.entries[i].q_row = there.entries[i].q_row += row;
    }
    lg_step_there(&there);
    uint64_t before = lg_waits(), brought = soft_brought();
    lg_all_fine(lg_begin(&here), &here);
    for (uint32_t i = 0; i < rig.layers && !exec; i++) {
        const struct kvq_work w = lg_work_of(i, true);
        lg_all_fine(lg_attend(&w, &here), &here);
    }
    if (exec)
        OK(drv.graph_launch(exec, rig.stream));
    lg_all_fine(kvq_local_end_on_stream(rig.local, NULL, here.entries, n, rig.stream), &here);
    rig.waits = lg_waits() - before;
    OK(drv.stream_sync(rig.stream));
    rig.brought = soft_brought() - brought;
    lg_compare(row + here.q_rows, p->tokens);
    for (uint32_t i = 0; i < n; i++) {
        p[i].tokens += append;
        assert_int_equal(here.entries[i].value, p[i].tokens);
    }
}

void lg_step(struct lg_pair *p, uint32_t n, uint32_t append, struct kvq_gpu_exec *exec)
{
    lg_fill();
    lg_step_from(p, n, append, 0, exec);
}

void lg_open_bucket(kvq_session session, uint32_t queries)
{
    const struct kvq_bucket_options o = {
        .size = sizeof o, .session = session, .max_sessions = SESSIONS, .max_queries = queries};
    fine(kvq_bucket_open(rig.local, &o, &rig.bucket));
}

struct kvq_gpu_exec *lg_capture(struct lg_pair *p, uint32_t n)
{
    struct kvq_gpu_graph *graph;
    struct kvq_gpu_exec *exec;
    struct lg_batch b = lg_batch_of(p, n, 1, true);
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    for (uint32_t i = 0; i < rig.layers; i++) {
        const struct kvq_work w = lg_work_of(i, true);
        fine(lg_attend(&w, &b));
    }
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_ready(&exec, graph, 0));
    OK(drv.graph_destroy(graph));
    return exec;
}

void lg_end_capture(struct kvq_gpu_exec *exec)
{
    OK(drv.stream_sync(rig.stream));
    OK(drv.exec_destroy(exec));
}

void lg_prepare(void)
{
    soft_open();
    daemon_prepare(&rig.daemon);
    rig.daemon.flags = soft_daemon_flags;
    setenv("KVQ_GPU_DRIVER", KVQ_EMU_LIBRARY, 1);
}

int lg_cleanup(void)
{
    return daemon_cleanup(&rig.daemon);
}
