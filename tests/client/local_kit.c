// SPDX-License-Identifier: Apache-2.0
//
// See local_kit.h.
#include "tests/client/local_kit.h"

#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "storage/codebook.h"

struct local_rig rig;

uint32_t local_random(uint32_t n)
{
    rig.seed = rig.seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rig.seed >> 33) % n;
}

// ---- Codebooks ----

static void make_book(const char *name, const char *format, const struct kvq_codebook_row *rows,
                      uint32_t layers)
{
    char path[128], text[512];
    struct kvq_format f;
    struct kvq_codebook *book;
    if (kvq_format_parse(format, &f, text, sizeof text))
        fail_msg("%s", text);
    struct kvq_codebook_plan plan = {.format = &f, .rows = rows, .layers = layers, .model = "test"};
    if (kvq_codebook_new(&plan, &book, text, sizeof text))
        fail_msg("%s", text);
    for (uint32_t i = 0; i < layers; i++) {
        struct kvq_codebook_tables t;
        kvq_codebook_tables(book, i, &t);
        for (size_t j = 0; j < t.k_n; j++)
            t.k[j] = (float)local_random(2000) / 1000 - 1;
        for (size_t j = 0; j < t.v_n; j++)
            t.v[j] = (float)local_random(2000) / 1000 - 1;
        for (size_t j = 0; j < t.smooth_n; j++)
            t.smooth[j] = 0.5f + (float)local_random(1000) / 1000;
    }
    snprintf(path, sizeof path, "%s/%s.kvqbook", rig.codebooks, name);
    if (kvq_codebook_save(book, path, "by=test", text, sizeof text))
        fail_msg("%s", text);
    kvq_codebook_close(&book);
}

void local_prepare(uint32_t layers, uint32_t kv_heads, uint32_t dim)
{
    struct kvq_codebook_row rows[LOCAL_LAYERS];
    rig.seed = 1;
    static const char *const flags[] = {
        "--pool-bytes",   "256mb", "--extent-bytes", "8mb",         "--workers", "1",
        "--client-bytes", "256mb", "--codebook-dir", rig.codebooks, NULL};
    daemon_prepare(&rig.daemon);
    rig.daemon.flags = flags;
    // The daemon's own directory is to have nothing else in it.
    snprintf(rig.codebooks, sizeof rig.codebooks, "/tmp/kvq-books-XXXXXX");
    assert_non_null(mkdtemp(rig.codebooks));
    for (uint32_t i = 0; i < layers; i++)
        rows[i] = (struct kvq_codebook_row){(uint16_t)kv_heads, (uint16_t)dim};
    make_book("v", "vecinfer-2", rows, layers);
    make_book("m", "million-4", rows, layers);
}

int local_cleanup(void)
{
    static const char *const names[] = {"v.kvqbook", "m.kvqbook"};
    char path[128];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", rig.codebooks, names[i]);
        unlink(path);
    }
    rmdir(rig.codebooks);
    return daemon_cleanup(&rig.daemon);
}

// ---- The daemon and its client ----

static int open_files(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

int local_setup(void **state)
{
    (void)state;
    unsetenv("KVQ_LOCAL");
    rig.files = open_files();
    rig.seed = 4711;
    daemon_start(&rig.daemon);
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .timeout_ms = 20000};
    fine(kvq_connect(&options, &rig.client));
    fine(kvq_queue_open(rig.client, &rig.queue));
    fine(kvq_buffer_create(rig.client, LOCAL_BUFFER, &rig.buffer));
    return 0;
}

int local_teardown(void **state)
{
    (void)state;
    kvq_local_close(&rig.local);
    kvq_disconnect(&rig.client);
    rig.queue = NULL;
    rig.buffer = NULL;
    if (rig.daemon.pid)
        daemon_end(&rig.daemon, SIGTERM);
    assert_int_equal(open_files(), rig.files);
    return 0;
}

// ---- Threads ----

enum { THREADS = 4 };

struct share {
    void (*item)(void *arg, uint32_t i);
    void *arg;
    uint32_t first, n;
};

static void *run_share(void *context)
{
    const struct share *s = context;
    for (uint32_t i = s->first; i < s->n; i += THREADS)
        s->item(s->arg, i);
    return NULL;
}

void local_parallel(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg)
{
    pthread_t threads[THREADS];
    struct share shares[THREADS];
    (void)context;
    for (uint32_t i = 0; i < THREADS; i++) {
        shares[i] = (struct share){item, arg, THREADS - 1 - i, n};
        assert_int_equal(pthread_create(&threads[i], NULL, run_share, &shares[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

// ---- Models ----

void local_model(struct local_model *m, uint32_t layers, uint16_t q_heads, uint16_t kv_heads,
                 uint16_t dim)
{
    *m = (struct local_model){.layers = layers, .dtype = KVQ_DTYPE_F32, .out_dtype = KVQ_DTYPE_F32};
    for (uint32_t i = 0; i < layers; i++)
        m->rows[i] = (struct kvq_layer){
            .q_heads = q_heads, .kv_heads = kv_heads, .k_dim = dim, .v_dim = dim};
    if (layers > 1) {
        m->rows[1].window = 100;
        m->rows[1].softcap = 20;
    }
    if (layers > 2)
        m->rows[layers - 1].kv_from = 1; // layer 0's
    m->stride = (uint64_t)q_heads * dim * 4;
}

void local_open_pair(const struct local_model *m, const struct kvq_session_options *options,
                     struct local_pair *pair)
{
    struct kvq_session_options o = *options;
    o.layers = m->rows;
    o.n_layers = m->layers;
    pair->tokens = 0;
    fine(kvq_session_open(rig.client, &o, &pair->here, NULL));
    fine(kvq_session_open(rig.client, &o, &pair->there, NULL));
    fine(kvq_local_add(rig.local, pair->here));
}

void local_close_pair(struct local_pair *pair)
{
    fine(kvq_session_close(rig.client, pair->here));
    fine(kvq_session_close(rig.client, pair->there));
}

// ---- Steps ----

// The buffer: K, V, Q of all layers, then both sides' outputs and LSE, of so many rows each.
enum part { PART_K, PART_V, PART_Q, PART_HERE, PART_THERE, PART_LSE_HERE, PART_LSE_THERE };

static struct kvq_tensor tensor(const struct local_model *m, enum part part, uint32_t layer,
                                uint32_t rows)
{
    const struct kvq_layer *l = &m->rows[layer];
    bool lse = part >= PART_LSE_HERE, kv = part == PART_K || part == PART_V;
    uint8_t dtype = lse ? KVQ_DTYPE_F32 : part >= PART_HERE ? m->out_dtype : m->dtype;
    uint64_t at = ((uint64_t)part * m->layers + layer) * rows * m->stride;
    assert_true(at + rows * m->stride <= LOCAL_BUFFER);
    return kvq_tensor_make(rig.buffer, at, kv ? l->kv_heads : l->q_heads, lse ? 1 : l->k_dim,
                           dtype);
}

static void fill(const struct kvq_tensor *t, uint32_t rows)
{
    uint8_t *at = (uint8_t *)kvq_buffer_data(rig.buffer) + t->offset;
    uint64_t n = rows * t->token_stride / 4;
    for (uint64_t i = 0; i < n; i++) {
        float x = ((float)local_random(2048) - 1024) / 512;
        memcpy(at + 4 * i, &x, 4); // as fp16 these bytes are two finite numbers, too
        if (t->dtype != KVQ_DTYPE_F32) {
            uint16_t h[2] = {(uint16_t)(0x3000 + local_random(0x1000)),
                             (uint16_t)(0xb000 + local_random(0x1000))};
            memcpy(at + 4 * i, h, 4);
        }
    }
}

static void same_rows(const struct kvq_tensor *a, const struct kvq_tensor *b, uint32_t rows,
                      const char *what, uint32_t layer, const struct local_pair *pair)
{
    const uint8_t *base = kvq_buffer_data(rig.buffer);
    uint64_t bytes = rows * a->token_stride;
    if (memcmp(base + a->offset, base + b->offset, bytes) != 0)
        fail_msg("%s of layer %u differ, first session at %llu tokens", what, layer,
                 (unsigned long long)pair->tokens);
}

struct batch {
    struct kvq_entry entries[LOCAL_BATCH];
    uint32_t n, kv_rows, q_rows;
};

static struct batch batch_of(const struct local_pair *pairs, uint32_t n, const uint32_t *append,
                             bool here)
{
    struct batch b = {.n = n};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t queries = append[i] == 0 ? 1 : append[i] < 64 ? append[i] : 64;
        b.entries[i] = (struct kvq_entry){.session = here ? pairs[i].here : pairs[i].there,
                                          .position = pairs[i].tokens,
                                          .row = b.kv_rows,
                                          .q_row = b.q_rows,
                                          .append = append[i],
                                          .queries = (uint16_t)queries};
        b.kv_rows += append[i];
        b.q_rows += queries;
    }
    return b;
}

static void all_fine(int rc, const struct batch *b)
{
    fine(rc);
    for (uint32_t i = 0; i < b->n; i++)
        fine(b->entries[i].status);
}

static void attend_here(struct batch *b, struct kvq_work *w, bool own)
{
    if (!own)
        w->k = w->v = (struct kvq_tensor){0};
    all_fine(kvq_local_attend(rig.local, w, b->entries, b->n), b);
}

// Entries that append and entries that do not need requests of their own there.
static void attend_there(struct batch *b, const struct kvq_work *w, bool own, uint64_t step)
{
    for (uint32_t i = 0; i < b->n; i++) {
        struct kvq_entry *e = &b->entries[i];
        struct kvq_work one = *w;
        one.step = e->append ? step : 0;
        fine(own && e->append ? kvq_append_attend(rig.queue, &one, e, 1)
                              : kvq_attend(rig.queue, &one, e, 1));
        fine(e->status);
    }
}

static uint32_t appending(const struct batch *b, struct batch *out)
{
    *out = (struct batch){0};
    for (uint32_t i = 0; i < b->n; i++)
        if (b->entries[i].append)
            out->entries[out->n++] = b->entries[i];
    return out->n;
}

static void attend_layer(const struct local_model *m, struct batch *here, struct batch *there,
                         uint32_t layer, uint32_t rows, uint64_t step, uint32_t flags)
{
    bool own = m->rows[layer].kv_from == 0;
    struct kvq_work w = {.layer = layer,
                         .flags = flags,
                         .k = tensor(m, PART_K, layer, rows),
                         .v = tensor(m, PART_V, layer, rows),
                         .q = tensor(m, PART_Q, layer, rows),
                         .out = tensor(m, PART_THERE, layer, rows),
                         .lse = tensor(m, PART_LSE_THERE, layer, rows)};
    attend_there(there, &w, own, step);
    w.out = tensor(m, PART_HERE, layer, rows);
    w.lse = tensor(m, PART_LSE_HERE, layer, rows);
    attend_here(here, &w, own);
}

static void fill_all(const struct local_model *m, uint32_t rows)
{
    for (uint32_t i = 0; i < m->layers; i++)
        for (enum part p = PART_K; p <= PART_Q; p++) {
            struct kvq_tensor t = tensor(m, p, i, rows);
            fill(&t, rows);
        }
}

static void compare(const struct local_model *m, const struct batch *b, uint32_t rows,
                    const struct local_pair *pairs)
{
    for (uint32_t i = 0; i < m->layers; i++) {
        struct kvq_tensor a = tensor(m, PART_HERE, i, rows), c = tensor(m, PART_THERE, i, rows);
        same_rows(&a, &c, b->q_rows, "outputs", i, pairs);
        a = tensor(m, PART_LSE_HERE, i, rows);
        c = tensor(m, PART_LSE_THERE, i, rows);
        same_rows(&a, &c, b->q_rows, "sums", i, pairs);
    }
}

void local_step(const struct local_model *m, struct local_pair *pairs, uint32_t n,
                const uint32_t *append, uint32_t flags, bool commit)
{
    struct batch here = batch_of(pairs, n, append, true), there = batch_of(pairs, n, append, false);
    struct batch some;
    uint32_t rows = here.kv_rows > here.q_rows ? here.kv_rows : here.q_rows;
    uint64_t step = 0;
    fill_all(m, rows);
    if (appending(&there, &some))
        all_fine(kvq_step_begin(rig.queue, some.entries, some.n, &step), &some);
    all_fine(kvq_local_begin(rig.local, here.entries, n), &here);
    for (uint32_t i = 0; i < m->layers; i++)
        attend_layer(m, &here, &there, i, rows, step, flags);
    compare(m, &here, rows, pairs);
    if (!commit) {
        kvq_local_abort(rig.local);
        if (some.n)
            fine(kvq_step_abort(rig.queue, step, NULL, 0));
        return;
    }
    all_fine(kvq_local_end(rig.local, NULL, here.entries, n), &here);
    if (some.n)
        all_fine(kvq_step_end(rig.queue, step, some.entries, some.n), &some);
    for (uint32_t i = 0; i < n; i++) {
        pairs[i].tokens += append[i];
        assert_int_equal(here.entries[i].value, pairs[i].tokens);
    }
}

void local_plain_step(const struct local_model *m, struct local_pair *pair, uint32_t append,
                      bool whole_here)
{
    struct kvq_tensor k[LOCAL_LAYERS] = {0}, v[LOCAL_LAYERS] = {0};
    struct kvq_entry whole = {.position = pair->tokens, .append = append}, parts = whole;
    whole.session = whole_here ? pair->here : pair->there;
    parts.session = whole_here ? pair->there : pair->here;
    uint64_t step;
    fill_all(m, append);
    fine(kvq_step_begin(rig.queue, &parts, 1, &step));
    for (uint32_t i = 0; i < m->layers; i++) {
        if (m->rows[i].kv_from)
            continue;
        k[i] = tensor(m, PART_K, i, append);
        v[i] = tensor(m, PART_V, i, append);
        const struct kvq_work w = {.step = step, .layer = i, .k = k[i], .v = v[i]};
        fine(kvq_append(rig.queue, &w, &parts, 1));
        fine(parts.status);
    }
    fine(kvq_step_end(rig.queue, step, &parts, 1));
    const struct kvq_step_work work = {.k = k, .v = v, .n_layers = m->layers};
    fine(kvq_step(rig.queue, &work, &whole, 1));
    fine(whole.status);
    fine(parts.status);
    pair->tokens += append;
    assert_int_equal(whole.value, pair->tokens);
}

void local_same_cache(const struct local_model *m, const struct local_pair *pair)
{
    uint32_t rows = (uint32_t)pair->tokens;
    for (uint32_t i = 0; i < m->layers; i++) {
        uint64_t written[2];
        for (int side = 0; side < 2; side++) {
            struct kvq_entry e = {.session = side ? pair->there : pair->here, .append = rows};
            struct kvq_work w = {.layer = i,
                                 .k = tensor(m, side ? PART_K : PART_HERE, i, rows),
                                 .v = tensor(m, side ? PART_V : PART_THERE, i, rows)};
            w.k.dtype = w.v.dtype = KVQ_DTYPE_F32;
            w.k.token_stride = w.v.token_stride = m->stride;
            w.k.head_stride = w.v.head_stride = m->rows[i].k_dim * 4u;
            memset((char *)kvq_buffer_data(rig.buffer) + w.k.offset, 0, rows * m->stride);
            memset((char *)kvq_buffer_data(rig.buffer) + w.v.offset, 0, rows * m->stride);
            e.position = 0;
            fine(kvq_read(rig.queue, &w, &e, 1));
            fine(e.status);
            written[side] = e.value;
        }
        assert_int_equal(written[0], written[1]);
        const char *base = kvq_buffer_data(rig.buffer);
        assert_memory_equal(base + tensor(m, PART_K, i, rows).offset,
                            base + tensor(m, PART_HERE, i, rows).offset, rows * m->stride);
        assert_memory_equal(base + tensor(m, PART_V, i, rows).offset,
                            base + tensor(m, PART_THERE, i, rows).offset, rows * m->stride);
    }
}

// ---- Small sessions ----

enum { SMALL_KV_HEADS = 2, SMALL_DIM = 64 };

struct kvq_work local_small_work(const struct local_model *m, uint32_t layer)
{
    const struct kvq_layer *l = &m->rows[layer];
    const uint64_t part = 1 << 18;
    struct kvq_work w = {.layer = layer};
    w.k = kvq_tensor_make(rig.buffer, 0, l->kv_heads, l->k_dim, KVQ_DTYPE_F32);
    w.v = kvq_tensor_make(rig.buffer, part, l->kv_heads, l->k_dim, KVQ_DTYPE_F32);
    w.q = kvq_tensor_make(rig.buffer, 2 * part, l->q_heads, l->k_dim, KVQ_DTYPE_F32);
    w.out = kvq_tensor_make(rig.buffer, 3 * part, l->q_heads, l->k_dim, KVQ_DTYPE_F32);
    return w;
}

kvq_session local_open_small(const char *name, uint32_t flags, uint32_t layers)
{
    struct local_model m;
    kvq_session s;
    local_model(&m, layers, 4, SMALL_KV_HEADS, SMALL_DIM);
    m.rows[layers - 1].kv_from = 0;
    struct kvq_session_options o = {.size = sizeof o,
                                    .name = name,
                                    .format = "oscar2",
                                    .layers = m.rows,
                                    .n_layers = layers,
                                    .on_detach = KVQ_ON_DETACH_KEEP,
                                    .max_rollback = 8,
                                    .flags = flags};
    fine(kvq_session_open(rig.client, &o, &s, NULL));
    return s;
}

int local_small_step(kvq_local *local, struct kvq_entry *e, uint32_t layers, uint32_t append)
{
    struct local_model m;
    local_model(&m, layers, 4, SMALL_KV_HEADS, SMALL_DIM);
    e->append = append;
    e->queries = 1;
    int rc = kvq_local_begin(local, e, 1);
    for (uint32_t i = 0; i < layers && rc == 0 && e->status == 0; i++) {
        struct kvq_work w = local_small_work(&m, i);
        rc = kvq_local_attend(local, &w, e, 1);
    }
    if (rc == 0 && e->status == 0)
        rc = kvq_local_end(local, NULL, e, 1);
    return rc ? rc : e->status;
}
