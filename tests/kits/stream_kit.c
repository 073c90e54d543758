// SPDX-License-Identifier: Apache-2.0
//
// See stream_kit.h.
#include "tests/kits/stream_kit.h"

#include <dlfcn.h>

#include "proto/ring.h"
#include "tests/kits/unit.h"

struct kit kit;
struct streamer one, two;

const struct kvq__layer_row stream_row = {2 * HEADS, HEADS, DIM, DIM, .kv_from = -1};

void stream_session(struct streamer *s, const char *name, const char *format)
{
    struct kvq__layer_row row = stream_row;
    struct kvq__session_spec spec = {.name = name, .layers = &row, .n_layers = format != NULL};
    row.format = format;
    if (format)
        spec.place = kvq__pool_name(&kit.core->pools[1]);
    s->session = kit_opened(&s->m, &spec);
}

void stream_open(struct streamer *s, const char *name)
{
    char text[KVQ_TEXT_BYTES];
    *s = (struct streamer){0};
    assert_int_equal(member_open(&kit, &s->m, 1000, BUFFER), 0);
    s->words = sim_gpus()->memory_new(4096);
    memset(s->words, 0, 4096);
    struct kvq__gpu *gpu = kit.core->pools[1].gpu;
    int rc = kvq__queue_timeline(s->m.queue, gpu, (uintptr_t)s->words, (uintptr_t)(s->words + 1),
                                 s->words, text);
    s->alone = kvq__gpu_clients_alone(gpu) > 0;
    assert_int_equal(rc, s->alone ? 0 : KVQ_E_UNSUPPORTED);
    member_fill(&s->m);
    stream_session(s, name, "f16");
}

void stream_close(struct streamer *s)
{
    kvq__client_detach(s->m.client);
    kvq__queue_ending(s->m.queue);
    kit_settle(&s->m);
    kvq__queue_close(&s->m.queue);
    member_free(&s->m);
    sim_gpus()->memory_free(s->words);
}

void stream_reopen(struct streamer *s, const char *name)
{
    kvq__queue_close(&s->m.queue);
    member_free(&s->m);
    sim_gpus()->memory_free(s->words);
    stream_open(s, name);
}

void stream_order(struct streamer *s, struct kvq_request *r)
{
    if (s->alone) {
        r->flags |= KVQ_REQ_ON_STREAM;
        r->signal = ++s->signal;
    }
}

void stream_needed(void)
{
    if (!one.alone)
        skip();
}

void stream_stall(struct kvq_gpu_stream *stream, bool held)
{
    void (*call)(struct kvq_gpu_stream *, bool);
    void *symbol = dlsym(kvq__gpu_driver(kit.core->pools[1].gpu)->library, "kvq_soft_stall");
    assert_non_null(symbol);
    memcpy(&call, &symbol, sizeof call);
    call(stream, held);
}

static void refuse(const char *name, uint64_t n, bool every_later, int result)
{
    int (*call)(const char *, uint64_t, bool, int);
    void *symbol = dlsym(kvq__gpu_driver(kit.core->pools[1].gpu)->library, "kvq_soft_fail");
    assert_non_null(symbol);
    memcpy(&call, &symbol, sizeof call);
    assert_int_equal(call(name, n, every_later, result), 0);
}

void stream_refuse(const char *name, uint64_t n, int result)
{
    refuse(name, n, false, result);
}

void stream_refuse_from(const char *name, uint64_t n, int result)
{
    refuse(name, n, true, result);
}

void stream_settle(struct streamer *s)
{
    while (kvq__work_stream_busy(s->m.client->streams[0]))
        kvq__core_poll(kit.core);
}

void stream_ready(struct streamer *s)
{
    kvq_word64_store_release(&s->words[0], s->signal);
}

static int setup_with(uint64_t work_stream_bytes)
{
    sim_begin(0);
    kit_open(&kit, 7, 32 * MIB, 0);
    if (work_stream_bytes)
        kit.core->config.work_stream_bytes = work_stream_bytes;
    stream_open(&one, "one");
    stream_open(&two, "two");
    return 0;
}

void stream_ends(struct streamer *s)
{
    stream_ready(s);
    kit_settle(&s->m);
}

int stream_setup(void **state)
{
    return setup_with(0);
}

int stream_setup_small(void **state)
{
    return setup_with(32 << 10);
}

int stream_teardown(void **state)
{
    stream_close(&one);
    stream_close(&two);
    core_check(kit.core);
    assert_true(kvq__core_idle(kit.core));
    kit_close(&kit);
    return 0;
}

uint64_t stream_done(const struct streamer *s)
{
    return kvq_word64_load_acquire(&s->words[1]);
}
