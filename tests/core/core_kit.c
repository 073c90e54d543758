// SPDX-License-Identifier: Apache-2.0
//
// See core_kit.h.
#include "tests/core/core_kit.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/core/check.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"

char kit_context[256];

void kit_die(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: does not hold: %s %s\n", file, line, what, kit_context);
    abort();
}

// ---- Random numbers ----

uint64_t kit_random(struct kit *kit) // splitmix64
{
    uint64_t z = kit->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint32_t kit_below(struct kit *kit, uint32_t n)
{
    return (uint32_t)(kit_random(kit) % n);
}

bool kit_chance(struct kit *kit, uint32_t percent)
{
    return kit_below(kit, 100) < percent;
}

float kit_float(struct kit *kit)
{
    return (float)(int32_t)kit_random(kit) * 0x1p-30f;
}

// ---- Memory that can fail ----

static bool fails(struct kit *kit)
{
    return kit->fail_one_in && kit_below(kit, kit->fail_one_in) == 0;
}

static int acquire(void *context, size_t bytes, struct kvq__memory *memory)
{
    struct kit *kit = context;
    if (fails(kit))
        return KVQ_E_NO_MEMORY;
    // calloc leaves pages that nobody touches alone; what it gave stands before the aligned start.
    uint8_t *given = calloc(1, bytes + 64);
    MUST(given);
    *memory = (struct kvq__memory){given + 64 - (uintptr_t)given % 64, bytes, -1,
                                   kit->extents_out % 3 == 1, 0};
    memcpy(memory->base - sizeof given, &given, sizeof given);
    kit->extents_out++;
    return 0;
}

enum { PAGE = 4096 };

// A bare extent: nobody can touch a page that was not taken.
static int reserve(void *context, size_t bytes, struct kvq__memory *memory)
{
    struct kit *kit = context;
    if (fails(kit))
        return KVQ_E_NO_MEMORY;
    void *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(map != MAP_FAILED);
    *memory = (struct kvq__memory){map, bytes, -1, kit->extents_out % 3 == 1, (uintptr_t)kit};
    kit->extents_out++;
    return 0;
}

static int back(const struct kvq__memory *memory, uint64_t at, uint64_t bytes)
{
    struct kit *kit = (struct kit *)(uintptr_t)memory->handle;
    uint64_t first = at / PAGE * PAGE, end = (at + bytes + PAGE - 1) / PAGE * PAGE;
    MUST(kit && at + bytes <= memory->bytes);
    if (kit->no_pages || (bytes == memory->bytes && fails(kit)))
        return KVQ_E_NO_MEMORY;
    kit->backed += bytes;
    MUST(mprotect(memory->base + first, end - first, PROT_READ | PROT_WRITE) == 0);
    return 0;
}

static void zero(void *context, struct kvq__memory *memory)
{
    (void)context;
    memset(memory->base, 0, memory->bytes);
}

static void release(void *context, struct kvq__memory *memory)
{
    struct kit *kit = context;
    uint8_t *given;
    kit->extents_out--;
    kit->no_pages &= !kit->frees_pages;
    if (memory->handle) {
        MUST(munmap(memory->base, memory->bytes) == 0);
        return;
    }
    memcpy(&given, memory->base - sizeof given, sizeof given);
    free(given);
}

static void *allocate(void *context, size_t bytes)
{
    struct kit *kit = context;
    if (fails(kit))
        return NULL;
    void *memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    MUST(memory);
    kit->allocated_out += bytes;
    // Only a queue's scratch is that large, and it need not be zero.
    return bytes >= 1 << 20 ? memory : memset(memory, 0, bytes);
}

static void deallocate(void *context, void *memory, size_t bytes)
{
    struct kit *kit = context;
    MUST(kit->allocated_out >= bytes);
    kit->allocated_out -= bytes;
    free(memory);
}

// ---- The core ----

static void on_event(void *context, const struct kvq__event *event)
{
    struct kit *kit = context;
    MUST(event->ns && event->session && event->text);
    kit->events[event->kind]++;
    if (event->kind == KVQ__EVENT_REQUEST_REFUSED) { // beside what the request itself has caused
        snprintf(kit->refusal_session, sizeof kit->refusal_session, "%s", event->session);
        snprintf(kit->refusal_text, sizeof kit->refusal_text, "%s", event->text);
        return;
    }
    snprintf(kit->event_session, sizeof kit->event_session, "%s", event->session);
    snprintf(kit->event_text, sizeof kit->event_text, "%s", event->text);
}

static void on_buffer_gone(void *context, void *owner, uint32_t buffer)
{
    struct kit *kit = context;
    (void)owner;
    MUST(buffer);
    kit->buffers_gone++;
}

static void on_table_gone(void *context, uint64_t client, const struct kvq__table_memory *memory)
{
    struct kit *kit = context;
    MUST(client && (memory->host || memory->gpu));
    kit->tables_gone++;
    if (kit->table_gone)
        kit->table_gone(kit, memory);
}

static const struct kvq__own_format *own_formats;
static uint32_t n_own_formats;

void kit_formats(const struct kvq__own_format *formats, uint32_t n)
{
    own_formats = formats;
    n_own_formats = n;
}

static const struct kit_gpus no_gpus, *own_gpus = &no_gpus;

void kit_gpus(const struct kit_gpus *gpus)
{
    own_gpus = gpus ? gpus : &no_gpus;
}

static void *memory_new(size_t bytes)
{
    return own_gpus->n ? own_gpus->memory_new(bytes) : aligned_alloc(64, bytes);
}

static void memory_free(void *memory)
{
    if (own_gpus->n && memory)
        own_gpus->memory_free(memory);
    else
        free(memory);
}

static struct kvq__check *check; // of the program's core, made with its first check
static bool own_saves;
static int own_isa = KVQ_ISA_BEST;

void kit_isa(int isa)
{
    own_isa = isa;
}

void kit_saves(bool saves)
{
    own_saves = saves;
}

static uint64_t own_extents = 2 << 20;

void kit_extents(uint64_t bytes)
{
    own_extents = bytes;
}

static struct kit *opened; // last

void kit_open(struct kit *kit, uint64_t seed, uint64_t pool_bytes, uint64_t limit_bytes)
{
    opened = kit;
    char text[KVQ_TEXT_BYTES] = "";
    if (check)
        kvq__check_forget(check);
    *kit = (struct kit){.random = seed, .now = 1};
    kit->workspace = aligned_alloc(64, (kvq_workspace_bytes() + 63) & ~(size_t)63);
    struct kvq__core_config config = {
        .pool_bytes = pool_bytes,
        .extent_bytes = own_extents,
        .keep_ns = 5000000000u,
        .workers = 2,
        .quota = {.limit = {[KVQ__HOST_BYTES] = limit_bytes, [KVQ__DEVICE_BYTES] = limit_bytes}},
        .partial_bytes = 1 << 20,
        .saves = own_saves,
        .run = 1000000,
        .kernels = kvq_kernels_get(own_isa),
        .gpus = own_gpus->gpus,
        .n_gpus = own_gpus->n,
        .work_stream_bytes = 512 << 10,
        .work_stream_workspace = 1 << 20,
        .formats = own_formats,
        .n_formats = n_own_formats,
        .prefix_key = {1, 2, 3},
        .prefix_keep_ns = 20000000000u,
        .evict_idle_ns = 1000000000u,
        .pack_error_ns = 1, // as often as can be
        .memory = {.context = kit,
                   .acquire = acquire,
                   .reserve = reserve,
                   .back = back,
                   .zero = zero,
                   .release = release,
                   .allocate = allocate,
                   .deallocate = deallocate},
        .context = kit,
        .event = on_event,
        .buffer_gone = on_buffer_gone,
        .table_gone = on_table_gone,
    };
    int rc = kvq__core_open(&config, &kit->core, text);
    MUST(rc == 0);
    kvq__core_clock(kit->core, kit->now);
}

// A copy: what a test has of it may be gone with the test.
struct kit_member {
    struct kit_member *next;
    struct member m;
};

void kit_close(struct kit *kit)
{
    if (!kit->unchecked)
        core_check(kit->core);
    while (kit->members) {
        struct member m = kit->members->m;
        member_close(&m);
    }
    if (!kit->unchecked)
        core_check(kit->core);
    kvq__core_close(&kit->core);
    MUST(kit->extents_out == 0);
    MUST(kit->allocated_out == 0);
    free(kit->workspace);
}

int kit_teardown(void **state)
{
    (void)state;
    kit_close(opened);
    return 0;
}

void kit_pass(struct kit *kit, uint64_t ns)
{
    kvq__core_clock(kit->core, kit->now += ns);
}

void kit_tick(struct kit *kit, uint64_t ns)
{
    kit_pass(kit, ns);
    kvq__core_tick(kit->core);
}

// ---- Members ----

int member_open(struct kit *kit, struct member *m, uint32_t uid, uint64_t bytes)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__peer peer = {.uid = uid, .pid = 100, .gids = {uid}, .n_gids = 1};
    bytes = (bytes + 63) & ~(uint64_t)63;
    *m = (struct member){.kit = kit, .bytes = bytes};
    int rc = kvq__client_attach(kit->core, &peer, "test", &m->client, &m->id, text);
    if (rc < 0)
        return rc;
    rc = kvq__queue_open(m->client, &m->queue, text);
    if (rc < 0) {
        kvq__client_detach(m->client);
        return rc;
    }
    m->memory = memory_new(bytes);
    memset(m->memory, 0, bytes);
    rc = kit_buffer(m, bytes, &m->buffer);
    MUST(rc == 0);
    struct kit_member *there = malloc(sizeof *there);
    MUST(there);
    *there = (struct kit_member){kit->members, *m};
    kit->members = there;
    return 0;
}

int kit_buffer(struct member *m, uint64_t bytes, uint32_t *buffer)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__buffer_memory memory = {
        .host = m->memory, .gpu = own_gpus->n ? (uintptr_t)m->memory : 0, .bytes = bytes};
    return kvq__buffer_add(m->client, &memory, buffer, text);
}

void member_fill(struct member *m)
{
    float *numbers = (float *)(void *)m->memory;
    for (uint64_t i = 0; i < m->bytes / sizeof *numbers; i++)
        numbers[i] = kit_float(m->kit);
}

void member_free(struct member *m)
{
    struct kit_member **at = &m->kit->members, *gone;
    while ((*at)->m.memory != m->memory)
        at = &(*at)->next;
    gone = *at;
    *at = gone->next;
    free(gone);
    memory_free(m->memory);
    *m = (struct member){0};
}

void member_close(struct member *m)
{
    kvq__client_detach(m->client);
    kit_settle(m);
    kvq__queue_close(&m->queue);
    member_free(m);
}

// ---- Requests ----

void kit_run_job(struct kit *kit, struct kvq__job *job)
{
    uint32_t n = job->n_items, *order = malloc(n * sizeof *order);
    MUST(n > 0 && order);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = kit_below(kit, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < n; i++)
        job->run(job, order[i], kit->workspace);
    free(order);
}

void kit_pack(struct kit *kit)
{
    struct kvq__job *job;
    while ((job = kvq__background_start(kit->core))) {
        kit_run_job(kit, job);
        kvq__background_done(kit->core);
    }
}

struct kvq_request kit_header(uint8_t op, uint16_t count)
{
    return (struct kvq_request){
        .op = op, .count = count, .slots = (uint16_t)kvq_request_slots(count, 0), .seq = 7};
}

struct kvq_request kit_of_step(uint8_t op, uint16_t count, uint64_t step)
{
    struct kvq_request r = kit_header(op, count);
    r.step = step;
    return r;
}

struct kvq_wire_view kit_view(const struct member *m, uint64_t offset, uint32_t heads, uint32_t dim,
                              uint8_t dtype)
{
    uint64_t width = dtype == KVQ_F32 ? 4 : 2;
    return (struct kvq_wire_view){.offset = offset,
                                  .token_stride = heads * dim * width,
                                  .head_stride = dim * width,
                                  .buffer = m->buffer,
                                  .dtype = dtype};
}

void kit_poll(struct kvq__core *core)
{
    if (own_gpus->step)
        own_gpus->step();
    if (!kvq__core_poll(core))
        sched_yield(); // to the driver's threads
}

void kit_settle(struct member *m)
{
    while (!kvq__queue_gpu_idle(m->queue))
        kit_poll(m->kit->core);
}

void kit_load(struct member *m, const struct kvq_request *header,
              const struct kvq_entry_wire *entries)
{
    *kvq__queue_header(m->queue) = *header;
    if (header->count && header->count <= KVQ_MAX_BATCH)
        memcpy(kvq__queue_entries(m->queue), entries, header->count * sizeof *entries);
    if (header->op == KVQ_OP_STEP && header->layer <= KVQ_MAX_LAYERS)
        memcpy(kvq__queue_layers(m->queue), m->layers, header->layer * sizeof *m->layers);
}

int kit_go_on(struct member *m, enum kvq__progress p)
{
    while (p == KVQ__RUN || p == KVQ__GPU || p == KVQ__AGAIN ||
           (p == KVQ__WAIT && !TAILQ_EMPTY(&m->kit->core->freeing.ended))) {
        m->kit->again += p == KVQ__AGAIN;
        if (p == KVQ__WAIT) // it may be for the memory of what has ended
            kit_poll(m->kit->core);
        else if (p == KVQ__RUN)
            kit_run_job(m->kit, kvq__queue_job(m->queue));
        else if (p == KVQ__GPU)
            kit_settle(m);
        p = kvq__request_continue(m->queue);
    }
    return p == KVQ__WAIT ? 1 : kvq__queue_completion(m->queue)->status;
}

int kit_request(struct member *m, const struct kvq_request *header,
                const struct kvq_entry_wire *entries)
{
    kit_load(m, header, entries);
    return kit_go_on(m, kvq__request_start(m->queue));
}

int kit_again(struct member *m)
{
    return kit_go_on(m, kvq__request_continue(m->queue));
}

int kit_ask(struct member *m, const struct kvq_request *header, const struct kvq_entry_wire *entry)
{
    int rc = kit_request(m, header, entry);
    return rc ? rc : kvq__queue_results(m->queue)[0].status;
}

struct kvq_request kit_append(const struct member *m, uint64_t step, uint32_t layer, uint32_t heads,
                              uint32_t dim)
{
    struct kvq_request r = kit_header(KVQ_OP_APPEND, 1);
    r.step = step;
    r.layer = layer;
    r.k = kit_view(m, 0, heads, dim, KVQ_F32);
    r.v = kit_view(m, m->bytes / 2, heads, dim, KVQ_F32);
    return r;
}

struct kvq_request kit_attend(const struct member *m, uint32_t layer, uint64_t q_at,
                              uint64_t out_at, uint32_t q_heads, uint32_t dim)
{
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 1);
    r.layer = layer;
    r.q = kit_view(m, q_at, q_heads, dim, KVQ_F32);
    r.out = kit_view(m, out_at, q_heads, dim, KVQ_F32);
    return r;
}

// ---- One session, fed from one tensor ----

uint64_t kit_session(struct member *m, const struct kvq__layer_row *rows, uint32_t n_rows,
                     uint32_t max_rollback)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .layers = rows, .n_layers = n_rows, .max_rollback = max_rollback};
    int rc = kvq__session_open(m->client, &spec, &info, text);
    return rc == 0 ? info.handle : 0;
}

uint64_t kit_opened(struct member *m, const struct kvq__session_spec *spec)
{
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq__session_info info;
    if (kvq__session_open(m->client, spec, &info, text) != 0)
        kit_die(__FILE__, __LINE__, text);
    return info.handle;
}

void kit_drop(struct member *m, uint64_t handle)
{
    char text[KVQ_TEXT_BYTES] = "";
    if (kvq__session_drop(m->client, handle, text) != 0)
        kit_die(__FILE__, __LINE__, text);
}

static int give_book(void *context, const char *name, uint32_t layer,
                     const struct kvq_format *format, const struct kvq_shape *shape,
                     struct kvq_book *book, void **hold, char *why)
{
    static float numbers[1 << 15], smooth[1024]; // 12 bits for 8 channels at most
    struct kit *kit = context;
    MUST(format->k.vector << format->k.bits <= 1 << 15 && shape->kv_heads * shape->k_dim <= 1024);
    if (kit->bookless && layer == kit->bookless) {
        snprintf(why, KVQ_TEXT_BYTES / 2, "layer %u is not in %s", layer, name);
        return KVQ_E_FORMAT;
    }
    for (uint32_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        numbers[i] = (float)(i * 2654435761u >> 16) / 32768 - 1;
    for (uint32_t i = 0; i < sizeof smooth / sizeof *smooth; i++)
        smooth[i] = 0.5f + (float)(i % 7);
    *book = (struct kvq_book){.smooth = smooth, .k = numbers, .v = numbers};
    *hold = kit;
    kit->holds++;
    return 0;
}

static void share_book(void *context, void *hold)
{
    struct kit *kit = context;
    MUST(hold == kit && kit->holds++ > 0);
}

static void release_book(void *context, void *hold)
{
    struct kit *kit = context;
    MUST(hold == kit && kit->holds-- > 0);
}

static uint64_t id_of_book(void *context, void *hold)
{
    const struct kit *kit = context;
    MUST(hold == kit);
    return kit->book_id;
}

void kit_codebooks(struct kit *kit)
{
    kit->core->config.codebook = give_book;
    kit->core->config.codebook_share = share_book;
    kit->core->config.codebook_release = release_book;
    kit->core->config.codebook_id = id_of_book;
    kit->book_id = 7; // 0 would be no id
}

struct kvq__namespace *kit_namespace(struct kit *kit, uint32_t uid)
{
    const struct kvq__peer peer = {.uid = uid};
    struct kvq__namespace *ns;
    char text[KVQ_TEXT_BYTES];
    MUST(kvq__namespace_get(kit->core, &peer, NULL, &ns, text) == 0);
    return ns;
}

struct kvq__session *kit_of(struct member *m, uint64_t handle)
{
    struct kvq__handle *h;
    return kvq__handle_get(m->client, handle, &h) == 0 ? h->session : NULL;
}

int kit_simple(struct member *m, uint8_t op, uint64_t step, struct kvq_entry_wire entry,
               uint64_t *value)
{
    struct kvq_request r = kit_header(op, 1);
    r.step = step;
    int rc = kit_request(m, &r, &entry);
    if (rc)
        return rc;
    if (value)
        *value = kvq__queue_results(m->queue)[0].value;
    return kvq__queue_results(m->queue)[0].status;
}

// Ids of a step's tokens, if the member tells any: that of token t is element t.
static void put_ids(const struct member *m, struct kvq_request *r, struct kvq_entry_wire *e)
{
    if (!m->ids_at)
        return;
    r->flags |= KVQ_REQ_TOKEN_IDS;
    r->list = (struct kvq_wire_view){.offset = m->ids_at, .buffer = m->buffer};
    e->q_row = (uint32_t)e->position;
}

static int begin_step(struct member *m, struct kvq_entry_wire e)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 1);
    r.step = KIT_STEP;
    put_ids(m, &r, &e);
    return kit_ask(m, &r, &e);
}

int kit_begin(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim)
{
    const struct kvq__session *s = kit_of(m, handle);
    struct kvq_entry_wire e = {
        .handle = handle, .position = s->tokens, .row = (uint32_t)s->tokens, .append = n};
    int rc = begin_step(m, e);
    for (uint32_t layer = 0; rc == 0 && layer < s->n_layers; layer++) {
        struct kvq_request r = kit_append(m, KIT_STEP, layer, heads, dim);
        if (kvq__layer_owns(s, layer))
            rc = kit_ask(m, &r, &e);
    }
    return rc;
}

int kit_step(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim)
{
    struct kvq_entry_wire e = {.handle = handle, .position = kit_of(m, handle)->tokens};
    int rc = kit_begin(m, handle, n, heads, dim);
    return rc == 0 ? kit_simple(m, KVQ_OP_STEP_END, KIT_STEP, e, NULL) : rc;
}

int kit_whole(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim)
{
    const struct kvq__session *s = kit_of(m, handle);
    struct kvq_entry_wire e = {
        .handle = handle, .position = s->tokens, .row = (uint32_t)s->tokens, .append = n};
    struct kvq_request r = kit_header(KVQ_OP_STEP, 1);
    r.layer = s->n_layers;
    r.slots = (uint16_t)kvq_request_slots(r.count, s->n_layers);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        m->layers[i] = (struct kvq_step_layer){kit_view(m, 0, heads, dim, KVQ_F32),
                                               kit_view(m, m->bytes / 2, heads, dim, KVQ_F32)};
        if (!kvq__layer_owns(s, i))
            m->layers[i] = (struct kvq_step_layer){0};
    }
    put_ids(m, &r, &e);
    return kit_ask(m, &r, &e);
}

// ---- Changes ----

uint64_t kit_fork(struct member *m, uint64_t handle, uint64_t tokens)
{
    uint64_t fork = 0;
    const struct kvq_entry_wire e = {.handle = handle, .position = tokens};
    MUST(kit_simple(m, KVQ_OP_FORK, 0, e, &fork) == 0);
    return fork;
}

int kit_truncate(struct member *m, uint64_t handle, uint32_t n)
{
    const struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(m, handle)->tokens, .list_token = n};
    return kit_simple(m, KVQ_OP_TRUNCATE, 0, e, NULL);
}

void kit_limit(struct kit *kit, const char *ns, uint32_t resource, uint64_t most)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__override o = {.set = 1u << resource};
    snprintf(o.ns, sizeof o.ns, "%s", ns);
    o.quota.limit[resource] = most;
    MUST(kvq__quota_apply(kit->core, &o, text) == 0);
}

// ---- Counting everything anew ----

static void free_check(void)
{
    kvq__check_free(&check);
}

void core_check(const struct kvq__core *core)
{
    if (!check) {
        check = kvq__check_new(kit_die);
        MUST(check && atexit(free_check) == 0);
    }
    kvq__check_core(check, core);
}
