// SPDX-License-Identifier: Apache-2.0
//
// Storing, learning, packing, reading back and merging on the GPU, or in the emulator: what is
// written, blocks and extras, must be the CPU's to the byte, for every format; what is read must
// be the C reference's to the bit.
//
// KVQ_FULL=1 takes more shapes; KVQ_SEED other numbers, and another order of the emulator's.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "kernels/cuda/cache.h"
#include "kernels/emu/driver.h"
#include "tests/gpu/gpu_device.h"

extern "C" {
#include <cmocka.h>

#include "tests/kernels/kvtest.h"
}

using std::vector;

typedef struct kvt_cache host_cache;

static const kvq_kernels *cpu; // fills caches
static const kvq_gpu_driver *drv;
static kvq_gpu dev;
static char text[KVQ_GPU_TEXT];

static bool full()
{
    const char *wanted = getenv("KVQ_FULL");
    return wanted && wanted[0] == '1';
}

// ---- Device memory ----

static vector<kvq_gpu_ptr> pieces;

enum { UNWRITTEN = 0xa7 }; // what kvt_guarded fills memory with

static kvq_gpu_ptr device_bytes(size_t n)
{
    kvq_gpu_ptr at = 0;
    assert_int_equal(drv->memory_alloc(&at, n ? n : 1), 0);
    assert_int_equal(drv->fill8(at, UNWRITTEN, n ? n : 1, NULL), 0);
    pieces.push_back(at);
    return at;
}

static kvq_gpu_ptr upload(const void *from, size_t n)
{
    const kvq_gpu_ptr at = device_bytes(n);
    assert_int_equal(drv->copy_in(at, from, n, NULL), 0);
    return at;
}

template <typename T> static T *upload_all(const vector<T> &x)
{
    return (T *)upload(x.data(), x.size() * sizeof(T));
}

static vector<uint8_t> download(const void *from, size_t n)
{
    vector<uint8_t> to(n);
    assert_int_equal(drv->copy_out(to.data(), (kvq_gpu_ptr)from, n, NULL), 0);
    assert_int_equal(drv->stream_sync(NULL), 0);
    return to;
}

static void free_device()
{
    for (const kvq_gpu_ptr at : pieces)
        assert_int_equal(drv->memory_free(at), 0);
    pieces.clear();
}

static void done(int rc, const char *what)
{
    if (rc != 0)
        fail_msg("%s: %s", what, text);
}

// ---- A cache on the device ----

struct on_device {
    kvq_recipe recipe; // the host's
    const kvq_recipe *its;
    const kvq_book *book;
    uint8_t *raw, *blocks, *extras;
    const kvq_page *pages;
    size_t raw_block, block;
    uint32_t learn;
};

static const float *upload_tables(const float *tables, const kvq_side &side, size_t sub,
                                  size_t head, const kvq_shape &s)
{
    if (!tables)
        return NULL;
    const size_t n =
        sub * (s.k_dim / side.vector) + head * s.kv_heads + ((size_t)side.vector << side.bits);
    return (const float *)upload(tables, n * sizeof(float));
}

static const kvq_book *upload_book(const host_cache &c)
{
    if (!c.book)
        return NULL;
    kvq_book b = *c.book;
    b.k = upload_tables(b.k, c.format->k, b.k_sub, b.k_head, c.shape);
    b.v = upload_tables(b.v, c.format->v, b.v_sub, b.v_head, c.shape);
    if (b.smooth)
        b.smooth =
            (const float *)upload(b.smooth, sizeof(float) * c.shape.k_dim * c.shape.kv_heads);
    return (const kvq_book *)upload(&b, sizeof(b));
}

// Learns from `learn` tokens instead of all, and packs anew, at positions `shift` further on.
static void repack(host_cache &c, uint32_t learn, uint64_t shift)
{
    const kvq_raw_layout raw = kvq_raw_layout_of(&c.shape);
    const size_t raw_block = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
    const kvq_layout packed = kvq_layout_of(c.format, &c.shape);
    const size_t block = kvq_block_bytes(&packed, &c.shape);
    const uint32_t unit_tokens = c.format->unit_tokens, heads = c.shape.kv_heads;
    void *workspace = kvt_workspace();
    memset(c.blocks, UNWRITTEN, c.n_pages * block);
    kvq_extras_init(c.format, &c.shape, c.extras);
    for (uint32_t h = 0; h < heads; h++)
        kvq_learn(cpu, c.format, &c.shape, c.pages, learn, h, c.extras, workspace);
    c.packed = c.tokens / unit_tokens * unit_tokens;
    for (uint32_t i = 0; i < c.packed / unit_tokens * heads; i++) {
        const uint32_t t = i / heads * unit_tokens;
        kvq_unit unit = {};
        unit.raw_block = c.raw + t / 128 * raw_block;
        unit.packed_block = c.blocks + t / 128 * block;
        unit.head = i % heads;
        unit.first = t % 128;
        unit.block_start = t / 128 * 128 + shift;
        unit.extras = c.extras;
        unit.learned = learn;
        unit.book = c.book;
        kvq_pack(cpu, c.format, &c.shape, &unit, workspace);
    }
    kvt_guarded_free(workspace);
}

// What the host has before anything is learned or packed.
static on_device put_on_device(const host_cache &c)
{
    on_device d = {};
    const kvq_layout packed = kvq_layout_of(c.format, &c.shape);
    const size_t extras = kvq_extras_bytes(c.format, &c.shape);
    d.recipe = kvq_recipe_of(c.format, &c.shape);
    d.its = (const kvq_recipe *)upload(&d.recipe, sizeof(d.recipe));
    d.book = upload_book(c);
    d.raw_block = kvq_raw_bytes(&d.recipe.raw, KVQ_BLOCK_TOKENS);
    d.block = kvq_block_bytes(&packed, &c.shape);
    d.raw = (uint8_t *)upload(c.raw, c.n_pages * d.raw_block);
    d.blocks = (uint8_t *)device_bytes(c.n_pages * d.block);
    d.learn = kvq_learn_tokens(c.format, c.tokens);
    if (extras) {
        vector<uint8_t> fresh(extras);
        kvq_extras_init(c.format, &c.shape, fresh.data());
        d.extras = upload_all(fresh);
    }
    vector<kvq_page> pages(c.pages, c.pages + c.n_pages);
    for (uint32_t i = 0; i < c.n_pages; i++) {
        pages[i].packed = d.blocks + i * d.block;
        pages[i].raw = d.raw + i * d.raw_block;
    }
    d.pages = upload_all(pages);
    return d;
}

// The work of some caches in one launch each.
struct workload {
    vector<const kvq_recipe *> recipes;
    vector<kvq_gpu_lesson> lessons;
    vector<kvq_gpu_unit> units;
    vector<uint32_t> runs = {0};
};

static kvq_gpu_work work_of(const workload &w, size_t n)
{
    const kvq_gpu_work work = {w.recipes.data(), (uint32_t)w.recipes.size(), (uint32_t)n, NULL};
    return work;
}

static void add_work(workload &w, const host_cache &c, const on_device &d, uint64_t shift = 0,
                     const uint32_t *guard = NULL)
{
    w.recipes.push_back(&d.recipe);
    if (d.learn && d.learn <= c.tokens) {
        const kvq_gpu_lesson lesson = {d.its, d.pages, d.extras, guard, d.learn};
        w.lessons.push_back(lesson);
    }
    for (uint32_t t = 0; t + c.format->unit_tokens <= c.packed; t += c.format->unit_tokens) {
        const uint32_t page = t / 128;
        const kvq_gpu_unit unit = {
            d.its,    d.book, d.raw + page * d.raw_block,   d.blocks + page * d.block,
            d.extras, guard,  (uint64_t)page * 128 + shift, t % 128,
            d.learn};
        w.units.push_back(unit);
    }
    w.runs.push_back((uint32_t)w.units.size());
}

static void learn_and_pack(const workload &w)
{
    kvq_gpu_work work = work_of(w, w.lessons.size());
    done(kvq_gpu_learn(&dev, &work, (kvq_gpu_ptr)upload_all(w.lessons), text, sizeof(text)),
         "learn");
    work.n = (uint32_t)w.units.size();
    done(kvq_gpu_pack(&dev, &work, (kvq_gpu_ptr)upload_all(w.units),
                      (kvq_gpu_ptr)upload_all(w.runs), (uint32_t)w.runs.size() - 1, text,
                      sizeof(text)),
         "pack");
}

// ---- Packed bytes ----

static std::string name_of(const host_cache &c)
{
    return std::string(c.format->name) + ", head_dim " + std::to_string(c.shape.k_dim) + ", " +
           (c.shape.dtype == KVQ_F16 ? "fp16" : "bf16") + ", " + std::to_string(c.shape.kv_heads) +
           " heads";
}

static void same_bytes(const host_cache &c, const char *what, const uint8_t *want, const void *at,
                       size_t n)
{
    const vector<uint8_t> got = download(at, n);
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s: byte %zu of %zu of the %s is %u, the CPU's is %u", name_of(c).c_str(), i,
                     n, what, got[i], want[i]);
}

static void same_cache(const host_cache &c, const on_device &d)
{
    same_bytes(c, "blocks", c.blocks, d.blocks, c.n_pages * d.block);
    if (c.extras)
        same_bytes(c, "extras", c.extras, d.extras, kvq_extras_bytes(c.format, &c.shape));
}

static void check_pack(const char *format, kvq_shape s, uint32_t tokens, kvt_kind kind,
                       uint64_t seed)
{
    if (kvt_format(format)->raw_dtype)
        s.dtype = kvt_format(format)->raw_dtype;
    host_cache c = kvt_cache(cpu, format, s, tokens, -1, kind, seed);
    const on_device d = put_on_device(c);
    workload w;
    assert_true(c.packed > 0);
    add_work(w, c, d);
    learn_and_pack(w);
    same_cache(c, d);
    free_device();
    kvt_cache_free(&c);
}

static const char *const composed[] = {
    "oscar2-g64",        "oscar3-g128-fm",     "kivi2-g64-fit",     "innerq-hybrid-full",
    "ott2-o0",           "quarot4-g128",       "innerq-small-full", "vecinfer-k8x10v2x8",
    "kivi1-g64",         "kivi4+innerq-small", "oscar2-noscale-fm", "turboquant2.5+oscar3",
    "oscar4-max",        "oscar2-xh-g128-s32", "int8-g64",          "innerq-base:scale=xh",
    "ott2-s32:scale=xh", "oscar3-mean-norot",  "kvq2-fit:v_bits=3", "oscar2:v_axis=channel",
    "innerq-hybrid-g128"};

// Every row of the table and what suffixes make of some, at one head_dim.
static void pack_all_formats(uint32_t dim, uint32_t heads, uint32_t tokens)
{
    uint64_t seed = kvt_seed() + dim;
    for (const kvq_format *f = kvq_formats; f->name[0]; f++, seed++) {
        kvq_shape s = kvt_shape(1, heads, dim, seed % 2 ? KVQ_F16 : KVQ_BF16);
        s.v_rotation = seed % 3;
        if (!kvt_has_huge_book(f) || dim == 64)
            check_pack(f->name, s, kvt_has_huge_book(f) ? 128 : tokens,
                       (kvt_kind)(seed % KVT_KINDS), seed);
    }
    for (const char *name : composed) {
        const kvq_shape s = kvt_shape(1, heads, dim, ++seed % 2 ? KVQ_F16 : KVQ_BF16);
        check_pack(name, s, tokens, (kvt_kind)(seed % KVT_KINDS), seed);
    }
}

static void test_pack_64(void **)
{
    pack_all_formats(64, 1, 192);
}

static void test_pack_128(void **)
{
    pack_all_formats(128, 2, 128);
}

static void test_pack_256(void **)
{
    pack_all_formats(256, 1, 128);
}

// The daemon's everyday formats with numbers of every kind, 16-bit type and rotation of V.
static void test_pack_kinds(void **)
{
    static const char *const names[] = {"oscar2",        "oscar3",     "oscar4",       "oscar2-xh",
                                        "innerq-hybrid", "vecinfer-2", "turboquant2.5"};
    uint64_t seed = kvt_seed() + 1;
    for (const char *name : names)
        for (int kind = 0; kind < KVT_KINDS; kind++)
            for (uint8_t dtype = KVQ_F16; dtype <= KVQ_BF16; dtype++, seed++) {
                kvq_shape s = kvt_shape(1, full() ? 3 : 1, full() ? 128 : 64, dtype);
                s.v_rotation = KVQ_V_ROT_DAEMON;
                check_pack(name, s, 128, (kvt_kind)kind, seed);
            }
}

// Units behind a lesson of `learn` tokens, and when their outliers froze.
static uint64_t check_learned(const char *format, uint32_t learn, uint64_t shift,
                              enum kvt_kind kind, uint64_t seed)
{
    const kvq_shape s = kvt_shape(1, 2, 64, kind == KVT_RISING ? KVQ_BF16 : KVQ_F16);
    host_cache c = kvt_cache(cpu, format, s, 1024, -1, kind, seed);
    on_device d = put_on_device(c);
    workload w;
    repack(c, learn, shift);
    d.learn = learn;
    add_work(w, c, d, shift);
    learn_and_pack(w);
    same_cache(c, d);
    kvq_outliers pool;
    memcpy(&pool, c.extras + d.recipe.extras.pool, sizeof(pool));
    if (kind == KVT_NORMAL) // other kinds have ties that the lesson's tokens win
        assert_true(pool.count > d.recipe.outliers || pool.frozen_at != UINT64_MAX);
    free_device();
    kvt_cache_free(&c);
    return pool.frozen_at;
}

// The pool freezes early, late, just in time, and not at all; positions have more than 32 bits.
static void test_outliers(void **)
{
    bool frozen = false, open = false;
    for (const char *name : {"ott2-oscar", "ott2", "ott2-s32"})
        for (uint64_t seed = 0; seed < 2; seed++)
            check_learned(name, 128 + 128 * seed, seed << 33, seed ? KVT_EXTREME : KVT_NORMAL,
                          kvt_seed() + seed);
    for (uint32_t room = 0; room < 20; room++) {
        const std::string name = "ott2-oscar:outliers=4:displaced=" + std::to_string(room);
        const uint64_t at = check_learned(name.c_str(), 128, 0, KVT_NORMAL, kvt_seed());
        frozen |= at != UINT64_MAX;
        open |= at == UINT64_MAX;
    }
    assert_true(frozen && open);
}

// A lesson of many pages, the last of them not whole; and one with factors far below 1.
static void test_lesson(void **)
{
    const kvq_shape s = kvt_shape(1, 1, 64, KVQ_BF16);
    for (const char *name : {"ott2-oscar", "innerq-small", "innerq-small:rot=signed"})
        check_pack(name, s, full() ? 4096 + 192 : 864, KVT_NORMAL, kvt_seed());
    for (const char *name : {"innerq-base", "innerq-hybrid", "innerq-small:rot=signed"})
        check_learned(name, 128, 0, KVT_RISING, kvt_seed());
}

// Layers of different formats, shapes and sessions in one launch; some entries are empty.
static void test_batch(void **)
{
    static const char *const names[] = {"ott2-oscar", "oscar2",     "innerq-base",
                                        "ott2-oscar", "vecinfer-4", "bf16"};
    vector<host_cache> caches;
    vector<on_device> devices;
    workload w;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        caches.push_back(kvt_cache(cpu, names[i],
                                   kvt_shape(1, 1 + (uint32_t)i % 3, i % 2 ? 128 : 64, KVQ_BF16),
                                   128 + 64 * (uint32_t)i, -1, KVT_OUTLIERS, kvt_seed() + i));
    for (const host_cache &c : caches)
        devices.push_back(put_on_device(c));
    for (size_t i = 0; i < caches.size(); i++) {
        add_work(w, caches[i], devices[i]);
        w.units.push_back(kvq_gpu_unit());
        w.runs.push_back((uint32_t)w.units.size());
    }
    w.lessons.push_back(kvq_gpu_lesson());
    learn_and_pack(w);
    for (size_t i = 0; i < caches.size(); i++) {
        same_cache(caches[i], devices[i]);
        kvt_cache_free(&caches[i]);
    }
    free_device();
}

// What is packed every day meets no bank conflict. At head_dim 64 a warp gathers the words of two
// sets of V, whose tokens overlap in banks; that is left so.
static void test_conflicts(void **)
{
    if (!gpu_device_is_emulated())
        skip();
    for (const char *name : {"oscar2", "oscar3", "oscar4"})
        for (uint32_t dim = 128; dim <= 256; dim *= 2) {
            check_pack(name, kvt_shape(1, 1, dim, KVQ_F16), 128, KVT_NORMAL, kvt_seed());
            const gpu::emu_report *r = gpu::emu_last_report();
            if (r->passes != r->least)
                fail_msg("%s, head_dim %u: %s", name, dim, r->conflict);
            assert_true(r->loads > 0);
            assert_int_equal(r->uneven, 0);
        }
}

// A captured launch does what the arrays hold when it runs again.
static void test_replay(void **)
{
    const kvq_shape s = kvt_shape(1, 2, 128, KVQ_F16);
    host_cache a = kvt_cache(cpu, "oscar2", s, 128, -1, KVT_NORMAL, kvt_seed());
    host_cache b = kvt_cache(cpu, "oscar2", s, 128, -1, KVT_NORMAL, kvt_seed() + 1);
    const on_device on_a = put_on_device(a), on_b = put_on_device(b);
    kvq_gpu_stream *stream;
    kvq_gpu_graph *graph;
    kvq_gpu_exec *exec;
    workload of_a, of_b;
    add_work(of_a, a, on_a);
    add_work(of_b, b, on_b);
    const kvq_gpu_ptr units = (kvq_gpu_ptr)upload_all(of_a.units);
    assert_int_equal(drv->stream_create(&stream, KVQ_GPU_STREAM_OWN), 0);
    assert_int_equal(drv->capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED), 0);
    kvq_gpu_work work = work_of(of_a, of_a.units.size());
    work.stream = stream;
    done(kvq_gpu_pack(&dev, &work, units, 0, 0, text, sizeof(text)), "pack");
    assert_int_equal(drv->capture_end(stream, &graph), 0);
    assert_int_equal(drv->graph_ready(&exec, graph, 0), 0);
    assert_int_equal(drv->copy_in(units, of_b.units.data(), sizeof(of_b.units[0]), NULL), 0);
    assert_int_equal(drv->stream_sync(NULL), 0);
    assert_int_equal(drv->graph_launch(exec, stream), 0);
    assert_int_equal(drv->stream_sync(stream), 0);
    same_cache(b, on_b);
    assert_int_equal(download(on_a.blocks, 1)[0], UNWRITTEN);
    drv->exec_destroy(exec);
    drv->graph_destroy(graph);
    drv->stream_destroy(stream);
    free_device();
    kvt_cache_free(&a);
    kvt_cache_free(&b);
}

// Compositions, shapes and numbers by chance.
static void test_any(void **)
{
    for (uint64_t i = 0; i < (full() ? 200 : 10); i++) {
        kvt_rng rng = {kvt_seed() + 1000 * i};
        const char *name = kvt_any_format(&rng);
        kvq_shape s = kvt_shape(1, 1 + kvt_below(&rng, 3), 64u << kvt_below(&rng, 3),
                                (uint8_t)(KVQ_F16 + kvt_below(&rng, 2)));
        s.v_rotation = (uint8_t)kvt_below(&rng, 3);
        check_pack(name, s, 128 + kvt_below(&rng, 130), (kvt_kind)kvt_below(&rng, KVT_KINDS),
                   kvt_u64(&rng));
    }
}

// Guarded work is all done while its word is 0, and leaves no trace while it is not.
static void test_guard(void **)
{
    for (const uint32_t word : {1u, 0u}) {
        const kvq_shape s = kvt_shape(1, 2, 64, KVQ_F16);
        host_cache c = kvt_cache(cpu, "ott2-oscar", s, 256, -1, KVT_OUTLIERS, kvt_seed());
        const on_device d = put_on_device(c);
        const size_t extras = kvq_extras_bytes(c.format, &c.shape);
        const vector<uint8_t> blocks = download(d.blocks, c.n_pages * d.block),
                              fresh = download(d.extras, extras);
        const uint32_t *guard = (const uint32_t *)upload(&word, sizeof(word));
        const vector<uint8_t> source(256, 7), target(256, 9);
        const kvq_gpu_copy copy = {upload_all(target), upload_all(source), guard, 128, 128, 2};
        workload w;
        add_work(w, c, d, 0, guard);
        assert_true(w.units.size() > 0 && w.lessons.size() > 0);
        learn_and_pack(w);
        const kvq_gpu_work work = {NULL, 0, 1, NULL};
        done(kvq_gpu_copy_rows(&dev, &work, (kvq_gpu_ptr)upload(&copy, sizeof(copy)), text,
                               sizeof(text)),
             "copy");
        assert_true(download(copy.to, 256) == (word ? target : source));
        if (!word)
            same_cache(c, d);
        else
            assert_true(download(d.blocks, blocks.size()) == blocks &&
                        download(d.extras, extras) == fresh);
        free_device();
        kvt_cache_free(&c);
    }
}

static void test_no_runs(void **)
{
    host_cache c = kvt_cache(cpu, "ott2", kvt_shape(1, 1, 64, KVQ_F16), 128, -1, KVT_NORMAL, 1);
    const on_device d = put_on_device(c);
    workload w;
    add_work(w, c, d);
    const kvq_gpu_work work = work_of(w, w.units.size());
    assert_int_equal(
        kvq_gpu_pack(&dev, &work, (kvq_gpu_ptr)upload_all(w.units), 0, 0, text, sizeof(text)), -1);
    assert_non_null(strstr(text, "without runs"));
    free_device();
    kvt_cache_free(&c);
}

// ---- Storing ----

struct tensor {
    vector<uint8_t> bytes;
    kvq_view host, device;
};

// Any bits at all, in odd strides, aligned to the dtype only.
static tensor any_tensor(kvt_rng *rng, const kvq_shape &s, uint32_t tokens)
{
    tensor t;
    t.host.dtype = (uint8_t)(KVQ_F16 + kvt_below(rng, 3));
    const size_t size = t.host.dtype == KVQ_F32 ? 4 : 2, row = s.k_dim * size;
    t.host.head_stride = (int64_t)(row + size * kvt_below(rng, 3));
    t.host.token_stride = t.host.head_stride * s.kv_heads + (int64_t)(size * kvt_below(rng, 5));
    t.bytes.resize((size_t)t.host.token_stride * tokens + size);
    for (uint8_t &b : t.bytes)
        b = (uint8_t)kvt_u64(rng);
    t.host.data = t.bytes.data() + size;
    t.device = t.host;
    t.device.data = (const uint8_t *)upload_all(t.bytes) + size;
    return t;
}

static void compare_raw(const kvq_shape &s, const vector<uint8_t> &got, const uint8_t *want)
{
    for (size_t i = 0; i < got.size(); i += 2) { // NaN may differ in its payload
        uint16_t x, y;
        memcpy(&x, &got[i], 2);
        memcpy(&y, want + i, 2);
        const bool nan = s.dtype == KVQ_F16 ? isnan(kvt_f16(x)) && isnan(kvt_f16(y))
                                            : isnan(kvt_bf16(x)) && isnan(kvt_bf16(y));
        if (x != y && !nan)
            fail_msg("raw number %zu is 0x%04x, the CPU's is 0x%04x", i / 2, x, y);
    }
}

// Tokens of two sessions that begin and end anywhere, over pages in any order.
static void check_store(uint64_t seed)
{
    kvt_rng rng = {seed};
    kvq_shape s = kvt_shape(1, 1 + kvt_below(&rng, 3), 64u << kvt_below(&rng, 3),
                            (uint8_t)(KVQ_F16 + kvt_below(&rng, 2)));
    const kvq_recipe recipe = kvq_recipe_of(kvt_format("oscar2"), &s);
    const size_t block = kvq_raw_bytes(&recipe.raw, KVQ_BLOCK_TOKENS);
    const uint32_t start = kvt_below(&rng, 200), tokens = 1 + kvt_below(&rng, full() ? 150 : 60);
    uint8_t *want = (uint8_t *)kvt_guarded(3 * block, 0);
    uint8_t *blocks = (uint8_t *)device_bytes(3 * block);
    const tensor k = any_tensor(&rng, s, tokens), v = any_tensor(&rng, s, tokens);
    kvq_store_counts counts = {0, 0};
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t h = 0; h < s.kv_heads; h++) {
            kvq_view one_k = k.host, one_v = v.host;
            one_k.data = (const uint8_t *)one_k.data + t * one_k.token_stride;
            one_v.data = (const uint8_t *)one_v.data + t * one_v.token_stride;
            kvq_store(cpu, &s, &one_k, &one_v, h, (start + t) % 128, 1,
                      want + (start + t) / 128 * block, &counts);
        }
    vector<kvq_page> pages(3);
    for (size_t i = 0; i < 3; i++)
        pages[i].raw = blocks + i * block;
    kvq_gpu_store_counts none = {}, *its = (kvq_gpu_store_counts *)upload(&none, sizeof(none));
    const kvq_recipe *on_it = (const kvq_recipe *)upload(&recipe, sizeof(recipe));
    const kvq_gpu_store_job job = {on_it, k.device, v.device, upload_all(pages),
                                   start, its,      tokens};
    const vector<kvq_gpu_store_job> jobs = {kvq_gpu_store_job(), job};
    const kvq_recipe *recipes[] = {&recipe};
    const kvq_gpu_work work = {recipes, 1, 2, NULL};
    done(kvq_gpu_store(&dev, &work, (kvq_gpu_ptr)upload_all(jobs), tokens, text, sizeof(text)),
         "store");
    compare_raw(s, download(blocks, 3 * block), want);
    const vector<uint8_t> counted = download(its, sizeof(none));
    memcpy(&none, counted.data(), sizeof(none));
    assert_int_equal(none.nonfinite, counts.nonfinite);
    assert_int_equal(none.saturated, counts.saturated);
    kvt_guarded_free(want);
    free_device();
}

static void test_store(void **)
{
    for (uint64_t i = 0; i < (full() ? 60 : 12); i++)
        check_store(kvt_seed() + 100 * i);
}

// Stores that the host has cancelled count one more value as not finite, each launch at least once.
static void test_cancelled(void **)
{
    const kvq_shape s = kvt_shape(1, 2, 64, KVQ_F16);
    const kvq_recipe recipe = kvq_recipe_of(kvt_format("oscar2"), &s), *recipes[] = {&recipe};
    const vector<float> zeros(2 * 64 * 8);
    const kvq_view view = {upload_all(zeros), 2 * 64 * 4, 64 * 4, KVQ_F32};
    const uint8_t *strip = (const uint8_t *)device_bytes(recipe.raw.strip_bytes);
    const kvq_page page = {NULL, strip, 0, 0};
    const kvq_recipe *on_it = (const kvq_recipe *)upload(&recipe, sizeof(recipe));
    const kvq_page *on_page = (const kvq_page *)upload(&page, sizeof(page));
    for (const uint32_t word : {0u, 1u}) {
        kvq_gpu_store_counts counts = {0, 0, {}, word, {}}, *its;
        its = (kvq_gpu_store_counts *)upload(&counts, sizeof(counts));
        const kvq_gpu_store_job job = {on_it, view, view, on_page, 0, its, 8};
        const kvq_gpu_work work = {recipes, 1, 1, NULL};
        done(kvq_gpu_store(&dev, &work, (kvq_gpu_ptr)upload(&job, sizeof(job)), 8, text,
                           sizeof(text)),
             "store");
        memcpy(&counts, download(its, sizeof(counts)).data(), sizeof(counts));
        assert_int_equal(counts.nonfinite, word);
        assert_int_equal(counts.saturated, 0);
    }
    free_device();
}

// More jobs than the second dimension of a grid can have.
static void test_many_jobs(void **)
{
    const kvq_shape s = kvt_shape(1, 1, 64, KVQ_F16);
    const kvq_recipe recipe = kvq_recipe_of(kvt_format("oscar2"), &s), *recipes[] = {&recipe};
    const vector<kvq_gpu_store_job> jobs(70000);
    const kvq_gpu_work work = {recipes, 1, (uint32_t)jobs.size(), NULL};
    done(kvq_gpu_store(&dev, &work, (kvq_gpu_ptr)upload_all(jobs), 1, text, sizeof(text)), "store");
    free_device();
}

// ---- Reading ----

// The device's blocks and extras become the host's: reading is tested apart from packing.
static on_device copy_to_device(const host_cache &c, bool keep_raw)
{
    const on_device d = put_on_device(c);
    assert_int_equal(drv->copy_in((kvq_gpu_ptr)d.blocks, c.blocks, c.n_pages * d.block, NULL), 0);
    if (c.extras)
        assert_int_equal(drv->copy_in((kvq_gpu_ptr)d.extras, c.extras,
                                      kvq_extras_bytes(c.format, &c.shape), NULL),
                         0);
    vector<kvq_page> pages(c.pages, c.pages + c.n_pages);
    for (uint32_t i = 0; i < c.n_pages; i++) {
        pages[i].packed = d.blocks + i * d.block;
        pages[i].raw = c.pages[i].raw && keep_raw ? d.raw + i * d.raw_block : NULL;
        if (!keep_raw && c.pages[i].raw && c.pages[i].packed_tokens < c.pages[i].tokens)
            pages[i].raw = d.raw + i * d.raw_block;
    }
    assert_int_equal(
        drv->copy_in((kvq_gpu_ptr)d.pages, pages.data(), pages.size() * sizeof(pages[0]), NULL), 0);
    return d;
}

static void check_rows(const host_cache &c, const on_device &d, uint64_t from, uint32_t n,
                       const uint8_t *pool)
{
    const uint32_t heads = c.shape.kv_heads, dim = c.shape.k_dim;
    const size_t floats = (size_t)heads * n * dim;
    vector<float> k(floats, -77.0f), v(floats, -77.0f);
    kvq_gpu_read_job job = {d.its,         d.book,        d.pages, d.extras, NULL,
                            upload_all(k), upload_all(v), from,    n,        c.n_pages};
    if (pool)
        job.pool = (const uint8_t *)upload(pool, heads);
    const vector<kvq_gpu_read_job> jobs = {kvq_gpu_read_job(), job};
    const kvq_recipe *recipes[] = {&d.recipe};
    const kvq_gpu_work work = {recipes, 1, 2, NULL};
    done(kvq_gpu_read(&dev, &work, (kvq_gpu_ptr)upload_all(jobs), n / 2, text, sizeof(text)),
         "read");
    kvq_reading reading = kvt_reading(&c);
    reading.pool = pool;
    void *workspace = kvt_workspace();
    for (uint32_t h = 0; h < heads; h++)
        kvq_read_rows(kvq_kernels_get(KVQ_ISA_C), &reading, from, n, h, &k[(size_t)h * n * dim],
                      &v[(size_t)h * n * dim], workspace);
    kvt_guarded_free(workspace);
    same_bytes(c, "keys read", (const uint8_t *)k.data(), job.k_out, floats * sizeof(float));
    same_bytes(c, "values read", (const uint8_t *)v.data(), job.v_out, floats * sizeof(float));
}

static void check_read(const char *format, kvq_shape s, uint64_t seed)
{
    kvt_rng rng = {seed};
    if (kvt_format(format)->raw_dtype)
        s.dtype = kvt_format(format)->raw_dtype;
    const uint32_t tokens = 129 + kvt_below(&rng, 120);
    const kvt_kind kind = (kvt_kind)kvt_below(&rng, KVT_KINDS);
    host_cache c = kvt_cache(cpu, format, s, tokens, -1, kind, seed);
    // The packed part may end within a unit.
    const uint32_t less = c.packed > 140 ? kvt_below(&rng, c.packed - 128) : 0;
    if (less)
        c.pages[1].packed_tokens = (uint16_t)(c.packed - less - 128);
    if (kvt_below(&rng, 3) == 0) // a page in the middle may hold fewer
        c.pages[0].tokens = (uint16_t)(100 + kvt_below(&rng, 20));
    kvt_spoil(&c.shape, c.pages[0].raw, 0, c.pages[0].packed_tokens);
    if (c.pages[0].packed_tokens > c.pages[0].tokens)
        c.pages[0].packed_tokens = c.pages[0].tokens;
    const on_device d = copy_to_device(c, seed % 2);
    const uint32_t from = kvt_below(&rng, tokens);
    check_rows(c, d, 0, tokens + 5, NULL);
    check_rows(c, d, from, 1 + kvt_below(&rng, 300), NULL);
    if (c.format->outliers) {
        const uint8_t pool[] = {2, 0, 1};
        check_rows(c, d, 0, tokens, pool);
    }
    free_device();
    kvt_cache_free(&c);
}

static void test_read(void **)
{
    uint64_t seed = kvt_seed();
    for (const kvq_format *f = kvq_formats; f->name[0]; f++, seed++) {
        kvq_shape s = kvt_shape(1, 1 + seed % 2, 64u << seed % 3, seed % 2 ? KVQ_F16 : KVQ_BF16);
        s.v_rotation = seed % 3;
        check_read(f->name, s, seed);
    }
    for (const char *name : composed) {
        const kvq_shape s = kvt_shape(1, 1, 64u << ++seed % 3, KVQ_F16);
        check_read(name, s, seed);
    }
}

// ---- Merging ----

static void test_merge(void **)
{
    enum { ROWS = 333, DIM = 128 };
    kvt_rng rng = {kvt_seed()};
    vector<float> out[2], lse[2], want(ROWS * DIM), want_lse(ROWS);
    for (int i = 0; i < 2; i++) {
        out[i].resize(ROWS * DIM);
        lse[i].resize(ROWS);
        kvt_fill(&rng, KVT_NORMAL, out[i].data(), ROWS, DIM);
        for (int r = 0; r < ROWS; r++)
            lse[i][r] = kvt_below(&rng, 5) ? 10 * kvt_normal(&rng) : -INFINITY;
    }
    for (int r = 0; r < ROWS; r++)
        if (lse[0][r] == -INFINITY)
            out[0][r * DIM + r % DIM] = NAN;
    kvq_merge_rows(out[0].data(), lse[0].data(), out[1].data(), lse[1].data(), want.data(),
                   want_lse.data(), ROWS, DIM);
    float *its[2] = {upload_all(out[0]), upload_all(out[1])};
    float *its_lse[2] = {upload_all(lse[0]), upload_all(lse[1])};
    const kvq_gpu_merge_args args = {its[0], its_lse[0], its[1], its_lse[1],
                                     its[1], its_lse[0], ROWS,   DIM};
    done(kvq_gpu_merge(&dev, &args, NULL, text, sizeof(text)), "merge");
    const vector<uint8_t> o = download(its[1], sizeof(float) * ROWS * DIM);
    const vector<uint8_t> l = download(its_lse[0], sizeof(float) * ROWS);
    const float *got = (const float *)o.data(), *got_lse = (const float *)l.data();
    for (int i = 0; i < ROWS * DIM; i++)
        assert_true(fabsf(got[i] - want[i]) <= 1e-6f * fmaxf(1, fabsf(want[i])));
    for (int r = 0; r < ROWS; r++)
        assert_true(got_lse[r] == want_lse[r] || fabsf(got_lse[r] - want_lse[r]) <= 1e-5f);
    free_device();
}

// ---- Running ----

static int open_gpu(void **)
{
    cpu = kvq_kernels_get(KVQ_ISA_BEST);
    kvq_emu_options options = {};
    options.seed = kvt_seed();
    kvq_emu_set(&options);
    drv = gpu_device();
    if (kvq_gpu_open(&dev, drv, text, sizeof(text)) != 0)
        fail_msg("%s", text);
    return 0;
}

static int close_gpu(void **)
{
    kvq_gpu_close(&dev);
    return 0;
}

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(test_pack_64),  cmocka_unit_test(test_pack_128),
        cmocka_unit_test(test_pack_256), cmocka_unit_test(test_pack_kinds),
        cmocka_unit_test(test_outliers), cmocka_unit_test(test_conflicts),
        cmocka_unit_test(test_lesson),   cmocka_unit_test(test_replay),
        cmocka_unit_test(test_any),      cmocka_unit_test(test_many_jobs),
        cmocka_unit_test(test_batch),    cmocka_unit_test(test_no_runs),
        cmocka_unit_test(test_guard),    cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_store),    cmocka_unit_test(test_read),
        cmocka_unit_test(test_merge),
    };
    cmocka_set_test_filter(getenv("KVQ_TEST_CASES")); // some cases alone, or with NULL all
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
