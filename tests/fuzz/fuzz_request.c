// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes ring requests: the input is a program that sends requests to a core with live sessions of
// two clients. Each request starts out sensible, is then patched with any bytes at any offset, and
// must neither harm memory nor the core's books, which are counted anew after each.
//
// A program is a list of commands, one byte each with what follows:
//   0-5  request   op, count, step, layer, flags; for each entry handle, position (offset to the
//                  right one), append (2), queries, list_token, row; number of patches, and for
//                  each offset (2), width 1 to 8, value (8)
//   6    poke      offset (3), value (4): into the buffer, as a scribbling client would
//   7    pack      what waits in the background
// The command's upper bits choose the client.
#include <stdlib.h>
#include <string.h>

#include "tests/core/core_kit.h"

enum { MIB = 1 << 20, DIM = 64, BUFFER = 192 << 10, COMMANDS = 48, ENTRIES = 6, HANDLES = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct program {
    const uint8_t *at, *end;
};

static uint64_t take(struct program *p, uint32_t bytes)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < bytes && p->at < p->end; i++)
        value |= (uint64_t)*p->at++ << 8 * i;
    return value;
}

struct fuzz {
    struct kit kit;
    struct member members[2];
    uint64_t handles[2][HANDLES];
    uint32_t n_handles[2];
};

static const struct kvq__layer_row layers[] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = DIM, .v_dim = DIM, .format = "oscar2", .kv_from = -1},
    {.q_heads = 2,
     .kv_heads = 1,
     .k_dim = DIM,
     .v_dim = DIM,
     .window = 140,
     .format = "oscar3",
     .kv_from = -1},
    {.q_heads = 2, .kv_heads = 2, .k_dim = DIM, .v_dim = DIM, .format = "oscar2", .kv_from = 0},
    {.q_heads = 1, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .format = "f16", .kv_from = -1},
};

static void open_one(struct fuzz *f, uint32_t who, const char *name, uint32_t flags)
{
    struct kvq__session_info info;
    char text[KVQ_TEXT_BYTES];
    struct kvq__session_spec spec = {.name = name,
                                     .layers = layers,
                                     .n_layers = flags ? 0 : 4,
                                     .max_rollback = 20,
                                     .flags = flags};
    if (kvq__session_open(f->members[who].client, &spec, &info, text) == 0)
        f->handles[who][f->n_handles[who]++] = info.handle;
}

// Numbers for the tensors; made once, for speed.
static const void *numbers(struct kit *kit)
{
    static float all[BUFFER / sizeof(float)];
    for (uint32_t i = 0; all[0] == 0.0f && i < BUFFER / sizeof(float); i++)
        all[BUFFER / sizeof(float) - 1 - i] = kit_float(kit);
    return all;
}

static void start(struct fuzz *f)
{
    kit_open(&f->kit, 1, 24 * MIB, 12 * MIB);
    for (uint32_t who = 0; who < 2; who++) {
        MUST(member_open(&f->kit, &f->members[who], 1000, BUFFER) == 0);
        memcpy(f->members[who].memory, numbers(&f->kit), BUFFER);
    }
    open_one(f, 0, "shared", 0);
    open_one(f, 0, NULL, 0);
    open_one(f, 1, "shared", KVQ__OPEN_READ_ONLY);
    open_one(f, 1, NULL, 0);
    for (uint32_t who = 0; who < 2; who++)
        MUST(kit_step(&f->members[who], f->handles[who][who], 150, 2, DIM) == 0);
}

static void add_views(const struct member *m, struct kvq_request *r)
{
    r->k = kit_view(m, 0, 2, DIM, KVQ_F32);
    r->v = kit_view(m, BUFFER / 2, 2, DIM, KVQ_F16);
    r->q = kit_view(m, BUFFER / 4, 4, DIM, KVQ_F32);
    r->out = kit_view(m, BUFFER / 2, 4, DIM, KVQ_BF16);
    r->lse = kit_view(m, BUFFER / 8, 4, 1, KVQ_F32);
    r->list = (struct kvq_wire_view){.offset = BUFFER - 4096, .buffer = m->buffer};
    r->page_tokens = 8;
    r->k_page_stride = r->v_page_stride = 1024;
}

static void add_entry(struct fuzz *f, uint32_t who, struct program *p, struct kvq_entry_wire *e)
{
    uint8_t choice = (uint8_t)take(p, 1);
    int8_t off = (int8_t)take(p, 1);
    e->handle = choice < 16 ? f->handles[who][choice % HANDLES] : choice;
    const struct kvq__session *s = kit_of(&f->members[who], e->handle);
    e->position = (s ? s->tokens : 0) + (uint64_t)(int64_t)off;
    e->append = (uint32_t)take(p, 2);
    e->queries = (uint16_t)take(p, 1);
    e->list_token = (uint16_t)take(p, 1);
    e->row = e->q_row = (uint32_t)take(p, 1);
}

static void patch(struct program *p, struct kvq_request *r, struct kvq_entry_wire *entries,
                  uint32_t count)
{
    uint32_t at = (uint32_t)take(p, 2) % (sizeof *r + count * sizeof *entries);
    uint32_t width = 1 + (uint32_t)take(p, 1) % 8;
    uint64_t value = take(p, 8);
    for (uint32_t i = 0; i < width; i++, at++) {
        uint8_t byte = (uint8_t)(value >> 8 * i);
        if (at < sizeof *r)
            ((uint8_t *)r)[at] = byte;
        else if (at < sizeof *r + count * sizeof *entries)
            ((uint8_t *)entries)[at - sizeof *r] = byte;
    }
}

static void remember_fork(struct fuzz *f, uint32_t who)
{
    const struct kvq_completion *c = kvq__queue_completion(f->members[who].queue);
    const struct kvq_result *results = kvq__queue_results(f->members[who].queue);
    for (uint32_t i = 0; i < c->count && f->n_handles[who] < HANDLES; i++)
        if (results[i].status == 0)
            f->handles[who][f->n_handles[who]++] = results[i].value;
}

static void request(struct fuzz *f, uint32_t who, struct program *p)
{
    // As the poller has it: room for the largest batch, of which `count` entries are new.
    static struct kvq_entry_wire entries[KVQ_MAX_BATCH];
    struct kvq_request r = kit_header((uint8_t)(take(p, 1) % (KVQ_OP_COUNT + 1)), 0);
    uint32_t count = (uint32_t)take(p, 1) % (ENTRIES + 1);
    r.count = (uint16_t)count;
    r.slots = (uint16_t)kvq_request_slots(count, 0);
    r.step = take(p, 1);
    r.layer = (uint32_t)take(p, 1);
    r.flags = (uint16_t)take(p, 1);
    add_views(&f->members[who], &r);
    memset(entries, 0, sizeof entries);
    for (uint32_t i = 0; i < count; i++)
        add_entry(f, who, p, &entries[i]);
    for (uint32_t n = (uint32_t)take(p, 1) % 8; n; n--)
        patch(p, &r, entries, count);
    if (r.count > KVQ_MAX_BATCH) // the poller's to refuse
        r.count = KVQ_MAX_BATCH;
    int rc = kit_request(&f->members[who], &r, entries);
    MUST(rc <= 0); // alone, nobody has to wait
    if (r.op == KVQ_OP_FORK && rc == 0)
        remember_fork(f, who);
}

static void command(struct fuzz *f, struct program *p)
{
    uint8_t what = (uint8_t)take(p, 1);
    uint32_t who = what >> 7;
    if ((what & 7) == 7) {
        kit_pack(&f->kit);
    } else if ((what & 7) == 6) {
        uint32_t at = (uint32_t)take(p, 3) % (BUFFER - 4), value = (uint32_t)take(p, 4);
        memcpy(f->members[who].memory + at, &value, sizeof value);
    } else {
        request(f, who, p);
    }
    core_check(f->kit.core);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fuzz f;
    struct program p = {data, data + size};
    f = (struct fuzz){0};
    start(&f);
    for (uint32_t i = 0; i < COMMANDS && p.at < p.end; i++)
        command(&f, &p);
    member_close(&f.members[0]);
    member_close(&f.members[1]);
    core_check(f.kit.core);
    kit_close(&f.kit);
    return 0;
}
