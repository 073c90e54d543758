// SPDX-License-Identifier: Apache-2.0
//
// See gpu_kit.h.
#include "tests/gpu/gpu_kit.h"

#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_device.h"

namespace kit
{
const kvq_gpu_driver *drv;
kvq_gpu dev;
char text[KVQ_GPU_TEXT];

int open_device(void **)
{
    drv = gpu_device();
    if (kvq_gpu_open(&dev, drv, text, sizeof(text)) != 0)
        fail_msg("%s", text);
    return 0;
}

int close_device(void **)
{
    kvq_gpu_close(&dev);
    if (gpu_device_is_emulated())
        assert_int_equal(kvq_emu_allocations(), 0);
    return 0;
}

static void check(int result, const char *what)
{
    if (result != KVQ_GPU_OK) {
        kvq_gpu_fault(drv, result, what, text, sizeof(text));
        fail_msg("%s", text);
    }
}

// ---- Memory ----

memory::memory(const void *from, size_t bytes) : size(bytes)
{
    if (bytes == 0)
        return;
    check(drv->memory_alloc(&at, bytes), "device memory");
    check(drv->copy_in(at, from, bytes, NULL), "a copy to the device");
}

memory::memory(memory &&other) noexcept : at(other.at), size(other.size)
{
    other.at = 0;
}

memory &memory::operator=(memory &&other) noexcept
{
    std::swap(at, other.at);
    std::swap(size, other.size);
    return *this;
}

memory::~memory()
{
    if (at)
        drv->memory_free(at);
}

void memory::read(void *to) const
{
    check(drv->copy_out(to, at, size, NULL), "a copy from the device");
    check(drv->stream_sync(NULL), "the stream");
}

template <typename T> static memory copy_of(const vector<T> &v)
{
    return memory(v.data(), v.size() * sizeof(T));
}

// ---- Numbers ----

static const kvq_kernels *cpu()
{
    return kvq_kernels_get(KVQ_ISA_BEST);
}

static size_t width(uint8_t dtype)
{
    return dtype == KVQ_F32 ? 4 : 2;
}

static float bf16_to_float(uint16_t x)
{
    return gpu::as_float((uint32_t)x << 16);
}

// A number in some dtype; returns what it became.
static float put(uint8_t *at, uint8_t dtype, float x)
{
    if (dtype == KVQ_F32) {
        memcpy(at, &x, 4);
        return x;
    }
    const uint16_t half =
        dtype == KVQ_F16 ? gpu::float_to_half(x) : (uint16_t)gpu::pack2_bf16(x, 0);
    memcpy(at, &half, 2);
    return dtype == KVQ_F16 ? gpu::half_to_float(half) : bf16_to_float(half);
}

static float get(const uint8_t *at, uint8_t dtype)
{
    float x;
    uint16_t half;
    if (dtype == KVQ_F32) {
        memcpy(&x, at, 4);
        return x;
    }
    memcpy(&half, at, 2);
    return dtype == KVQ_F16 ? gpu::half_to_float(half) : bf16_to_float(half);
}

static uint8_t *align(vector<uint8_t> &bytes)
{
    return (uint8_t *)(((uintptr_t)bytes.data() + 63) / 64 * 64);
}

// ---- Layers ----

bool layer::has_book() const
{
    return kvq_has_centroids(&format);
}

const kvq_book *layer::cpu_book() const
{
    return has_book() ? &book : NULL;
}

kvq_gpu_layer layer::gpu() const
{
    const kvq_gpu_layer l = {&format, &shape, has_book() ? &device_book : NULL,
                             kvq_gpu_attend_wide_rows(&dev, shape.k_dim), 0};
    return l;
}

// Tables of each sub-vector, if that is not too much; or one for all, and if `heads` is not 0 one
// for all of a head.
static vector<float> random_table(const kvq_side &side, int dim, bool one, int heads, size_t *head,
                                  size_t *sub, std::mt19937 &random)
{
    std::normal_distribution<float> normal;
    const size_t size = ((size_t)1 << side.bits) * side.vector;
    *sub = side.bits == 8 && !one ? size : 0;
    *head = one && heads ? size : 0;
    vector<float> table(*sub ? size * (size_t)(dim / side.vector) : *head ? size * heads : size);
    for (float &x : table)
        x = normal(random);
    return table;
}

static void make_book(layer &l, bool one, std::mt19937 &random)
{
    const bool smooth = l.format.k_channel == KVQ_CHANNEL_BOOK;
    const int dim = l.shape.k_dim, heads = smooth ? l.shape.kv_heads : 0;
    std::uniform_real_distribution<float> factor(0.5f, 2.0f);
    l.smooth.resize((size_t)l.shape.kv_heads * dim);
    for (float &x : l.smooth)
        x = factor(random);
    l.book.smooth = smooth ? l.smooth.data() : NULL;
    if (l.format.k.codec == KVQ_CODEC_BOOK)
        l.k_table =
            random_table(l.format.k, dim, one, heads, &l.book.k_head, &l.book.k_sub, random);
    if (l.format.v.codec == KVQ_CODEC_BOOK)
        l.v_table =
            random_table(l.format.v, dim, one, heads, &l.book.v_head, &l.book.v_sub, random);
    l.book.k = l.k_table.data();
    l.book.v = l.v_table.data();
    l.device_smooth = copy_of(l.smooth);
    l.device_k = copy_of(l.k_table);
    l.device_v = copy_of(l.v_table);
    l.device_book = l.book;
    l.device_book.smooth = l.book.smooth ? l.device_smooth.as<float>() : NULL;
    l.device_book.k = l.device_k.as<float>();
    l.device_book.v = l.device_v.as<float>();
}

layer make_layer(const char *format, int dim, int gqa, int kv_heads, uint8_t dtype,
                 uint8_t v_rotation, bool one_table)
{
    layer l;
    std::mt19937 random(7);
    if (kvq_format_parse(format, &l.format, text, sizeof(text)))
        fail_msg("%s", text);
    l.shape = {};
    l.shape.q_heads = (uint16_t)(gqa * kv_heads);
    l.shape.kv_heads = (uint16_t)kv_heads;
    l.shape.k_dim = l.shape.v_dim = (uint16_t)dim;
    l.shape.dtype = l.format.raw_dtype ? l.format.raw_dtype : dtype;
    l.shape.v_rotation = v_rotation;
    l.shape.scale = 1 / sqrtf((float)dim);
    if (kvq_shape_check(&l.shape, &l.format, text, sizeof(text)))
        fail_msg("%s", text);
    if (l.has_book())
        make_book(l, one_table, random);
    return l;
}

// ---- Caches ----

static void fill_raw(const layer &l, session &s, std::mt19937 &random)
{
    std::normal_distribution<float> normal;
    const int dim = l.shape.k_dim;
    kvq_store_counts counts = {};
    vector<float> k(dim), v(dim);
    const kvq_view view_k = {k.data(), 0, 0, KVQ_F32}, view_v = {v.data(), 0, 0, KVQ_F32};
    for (uint64_t t = 0; t < (s.w.tokens + 127) / 128 * 128; t++)
        for (uint32_t head = 0; head < l.shape.kv_heads; head++) {
            const float token = t % 29 == 0 ? 0.05f : 1;
            for (int c = 0; c < dim; c++) {
                k[c] = normal(random) * token * (c % 37 == 0 ? 8 : 1);
                v[c] = normal(random) * (1 + 0.5f * (t % 7));
            }
            kvq_store(cpu(), &l.shape, &view_k, &view_v, head, t % 128, 1, align(s.raw[t / 128]),
                      &counts);
        }
}

// How many tokens can be packed: units from the first on, once what is learned is known.
static uint64_t packable(const wish &w, uint32_t learned)
{
    if (w.tokens < learned || w.packed < learned)
        return 0;
    return w.packed < w.tokens ? w.packed : w.tokens;
}

// Nobody reads the raw rows of packed tokens: they become NaN.
static void spoil_packed(const layer &l, session &s)
{
    const kvq_raw_layout raw = kvq_raw_layout_of(&l.shape);
    for (uint64_t t = 0; t < s.w.packed; t++)
        for (uint32_t head = 0; head < 2 * l.shape.kv_heads; head++)
            memset(align(s.raw[t / 128]) + kvq_raw_at(&raw, head / 2, t % 128, head % 2), 0xff,
                   raw.row_bytes);
}

static void pack(const layer &l, session &s)
{
    const uint32_t learned = kvq_learn_tokens(&l.format, 0);
    vector<uint8_t> space(kvq_workspace_bytes() + 64);
    s.w.packed = packable(s.w, learned);
    const uint64_t unit = l.format.unit_tokens, units = (s.w.packed + unit - 1) / unit;
    s.extras.assign(kvq_extras_bytes(&l.format, &l.shape) + 64, 0);
    uint8_t *extras = kvq_extras_bytes(&l.format, &l.shape) ? align(s.extras) : NULL;
    if (extras)
        kvq_extras_init(&l.format, &l.shape, extras);
    vector<kvq_page> pages(s.raw.size());
    for (size_t i = 0; i < pages.size(); i++)
        pages[i] = {NULL, align(s.raw[i]), KVQ_BLOCK_TOKENS, 0};
    for (uint32_t head = 0; head < l.shape.kv_heads; head++) {
        if (s.w.packed && learned)
            kvq_learn(cpu(), &l.format, &l.shape, pages.data(), learned, head, extras,
                      align(space));
        for (uint64_t first = 0; first < units * unit; first += unit) {
            kvq_unit u = {};
            u.raw_block = align(s.raw[first / 128]);
            u.packed_block = align(s.packed[first / 128]);
            u.head = head;
            u.first = first % 128;
            u.block_start = first / 128 * 128;
            u.extras = extras;
            u.learned = learned;
            u.book = l.cpu_book();
            kvq_pack(cpu(), &l.format, &l.shape, &u, align(space));
        }
    }
    if (extras)
        kvq_outliers_publish(&l.format, &l.shape, extras);
    if (!s.w.grows)
        spoil_packed(l, s);
}

static uint64_t at_most(uint64_t x, uint64_t most)
{
    return x < most ? x : most;
}

static memory block_of(vector<uint8_t> &bytes)
{
    return memory(align(bytes), bytes.size() - 64);
}

// Pages of both sides; blocks that pages do not name are not copied.
static void make_pages(session &s)
{
    for (size_t i = 0; i < s.raw.size(); i++) {
        kvq_page p = {};
        p.tokens = (uint16_t)at_most(s.w.tokens - 128 * i, 128);
        if ((int)i == s.w.short_page)
            p.tokens = (uint16_t)at_most(p.tokens, 57);
        const uint64_t packed = s.w.packed > 128 * i ? s.w.packed - 128 * i : 0;
        p.packed_tokens = (uint16_t)at_most(packed, p.tokens);
        kvq_page d = p;
        if (p.packed_tokens) {
            p.packed = align(s.packed[i]);
            s.device_blocks.push_back(block_of(s.packed[i]));
            d.packed = s.device_blocks.back().as<uint8_t>();
        }
        if (p.packed_tokens < p.tokens || s.w.keep_raw) {
            p.raw = align(s.raw[i]);
            s.device_blocks.push_back(block_of(s.raw[i]));
            d.raw = s.device_blocks.back().as<uint8_t>();
        }
        s.pages.push_back(p);
        s.device_pages.push_back(d);
    }
}

void share_sinks(session &s, const session &from)
{
    if (s.extras_at.size)
        memcpy(align(s.extras), align(const_cast<session &>(from).extras), s.extras_at.size);
    s.call.extras = from.call.extras;
}

// ---- Calls ----

// Random numbers of a tensor [tokens][heads][dim] with odd gaps between rows, as they count.
static kvq_view random_view(vector<float> &values, memory &at, uint32_t tokens, uint32_t heads,
                            int dim, uint8_t dtype, float size, std::mt19937 &random)
{
    std::normal_distribution<float> normal;
    const size_t row = (dim + 3) * width(dtype);
    vector<uint8_t> bytes(row * heads * tokens);
    values.clear();
    for (uint32_t i = 0; i < tokens * heads; i++) {
        const float scale = size * (i % 3 == 0 ? 0.02f : i % 3 == 1 ? 1.0f : 3.0f);
        for (int c = 0; c < dim; c++)
            values.push_back(put(&bytes[i * row + c * width(dtype)], dtype,
                                 normal(random) * (size ? scale : 1)));
    }
    at = copy_of(bytes);
    const kvq_view v = {at.as<void>(), (int64_t)(row * heads), (int64_t)row, dtype};
    return v;
}

// Fresh values count as kvq_store rounds them.
static void round_all(vector<float> &values, uint8_t dtype)
{
    uint8_t half[4];
    for (float &x : values)
        x = put(half, dtype, x);
}

static void make_call(const layer &l, session &s, std::mt19937 &random)
{
    const int dim = l.shape.k_dim;
    kvq_attend &c = s.call;
    c = {};
    c.pages = s.pages_at.as<kvq_page>();
    c.n_pages = (uint32_t)s.pages.size();
    c.flags = s.w.flags;
    c.extras = s.extras_at.as<uint8_t>();
    c.pool = s.pool_at.as<uint8_t>();
    c.past_tokens = s.w.tokens - s.w.step;
    c.step_tokens = s.w.step + s.w.fresh;
    if (s.w.fresh) {
        c.fresh_start = s.w.tokens;
        c.fresh_tokens = s.w.fresh;
        c.fresh_k = random_view(s.fresh_k, s.fresh_k_at, s.w.fresh, l.shape.kv_heads, dim,
                                s.w.fresh_dtype, 0, random);
        c.fresh_v = random_view(s.fresh_v, s.fresh_v_at, s.w.fresh, l.shape.kv_heads, dim,
                                s.w.fresh_dtype, 0, random);
        round_all(s.fresh_k, l.shape.dtype);
        round_all(s.fresh_v, l.shape.dtype);
    }
    c.q_tokens = s.w.q_tokens;
    c.q_start = s.total() > s.w.q_tokens ? s.total() - s.w.q_tokens : 0;
    c.q = random_view(s.q, s.q_at, c.q_tokens, l.shape.q_heads, dim, s.w.q_dtype, 1, random);
    s.out_row = (dim + 5) * width(s.w.out_dtype);
    const vector<uint8_t> out(s.out_row * l.shape.q_heads * c.q_tokens, 0xff);
    const vector<float> lse((size_t)l.shape.q_heads * c.q_tokens, NAN);
    s.out_at = copy_of(out);
    s.lse_at = copy_of(lse);
    c.out = s.out_at.as<void>();
    c.out_dtype = s.w.out_dtype;
    c.out_head_stride = (int64_t)s.out_row;
    c.out_token_stride = (int64_t)(s.out_row * l.shape.q_heads);
    c.lse = s.lse_at.as<float>();
    c.lse_token_stride = (int64_t)(l.shape.q_heads * sizeof(float));
}

session make_session(const layer &l, const wish &w, std::mt19937 &random)
{
    session s;
    s.w = w;
    const kvq_raw_layout raw = kvq_raw_layout_of(&l.shape);
    const kvq_layout packed = kvq_layout_of(&l.format, &l.shape);
    const size_t blocks = (w.tokens + 127) / 128;
    s.raw.assign(blocks, vector<uint8_t>(kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS) + 64, 0));
    s.packed.assign(blocks, vector<uint8_t>(kvq_block_bytes(&packed, &l.shape) + 64, 0xff));
    fill_raw(l, s, random);
    pack(l, s);
    make_pages(s);
    s.pages_at = copy_of(s.device_pages);
    const size_t extras = kvq_extras_bytes(&l.format, &l.shape);
    if (extras) {
        s.extras_at = memory(align(s.extras), extras);
        for (uint32_t head = 0; l.format.outliers && head < l.shape.kv_heads; head++)
            s.pool.push_back(
                (uint8_t)kvq_outliers_published(&l.format, &l.shape, align(s.extras), head));
        s.pool_at = copy_of(s.pool);
    }
    make_call(l, s, random);
    return s;
}

void renew_call(const layer &l, session &s, const wish &w, std::mt19937 &random)
{
    s.w.q_tokens = w.q_tokens;
    s.w.flags = w.flags;
    s.w.fresh = w.fresh;
    s.w.step = w.step;
    s.w.q_dtype = w.q_dtype;
    s.w.out_dtype = w.out_dtype;
    make_call(l, s, random);
}

// ---- Running ----

bool result::operator==(const result &other) const
{
    return out.size() == other.out.size() && lse.size() == other.lse.size() &&
           memcmp(out.data(), other.out.data(), out.size() * sizeof(float)) == 0 &&
           memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
}

static result result_of(const layer &l, const session &s)
{
    result r;
    vector<uint8_t> out(s.out_at.size);
    s.out_at.read(out.data());
    r.lse.resize((size_t)l.shape.q_heads * s.call.q_tokens);
    s.lse_at.read(r.lse.data());
    for (uint32_t i = 0; i < l.shape.q_heads * s.call.q_tokens; i++)
        for (int c = 0; c < l.shape.v_dim; c++)
            r.out.push_back(get(&out[i * s.out_row + c * width(s.w.out_dtype)], s.w.out_dtype));
    return r;
}

vector<result> run(const layer &l, const vector<session *> &sessions, const run_options &options)
{
    if (gpu_device_is_emulated()) {
        kvq_emu_options emu = {};
        const char *seed = getenv("KVQ_SEED"); // another order, the same numbers
        emu.seed = options.seed + 1000 * (seed ? strtoul(seed, NULL, 10) : 0);
        emu.truncate = options.truncate;
        kvq_emu_set(&emu);
    }
    vector<kvq_attend> calls;
    for (const session *s : sessions) {
        calls.push_back(s->call);
        check(drv->fill8(s->out_at.at, 0xff, s->out_at.size, NULL), "poison");
        check(drv->fill8(s->lse_at.at, 0xff, s->lse_at.size, NULL), "poison");
    }
    kvq_gpu_attend_launch launch = {};
    launch.layer = l.gpu();
    launch.blocks = options.blocks;
    const uint32_t n = (uint32_t)calls.size();
    if (kvq_gpu_attend_needs(&launch.layer, calls.data(), options.shared, n, &launch.limits, text,
                             sizeof(text)))
        fail_msg("%s", text);
    launch.limits.sessions += options.room;
    launch.limits.tiles += options.room;
    launch.limits.narrow_items += options.room;
    launch.limits.wide_items += options.room;
    launch.limits.partial_rows += options.room;
    vector<uint8_t> batch(kvq_gpu_attend_batch_bytes(&launch.limits), 0xff);
    if (kvq_gpu_attend_fill(&launch.layer, calls.data(), options.shared, n, &launch.limits,
                            batch.data(), text, sizeof(text)))
        fail_msg("%s", text);
    const size_t used = kvq_gpu_attend_batch_used(&launch.limits, batch.data());
    memset(batch.data() + used, 0xff, batch.size() - used);
    const size_t bytes = kvq_gpu_attend_workspace_bytes(&launch.layer, &launch.limits);
    const memory batch_at = copy_of(batch),
                 workspace = memory(vector<uint8_t>(bytes).data(), bytes);
    launch.batch = batch_at.at;
    launch.workspace = workspace.at;
    if (kvq_gpu_attend(&dev, &launch, text, sizeof(text)))
        fail_msg("%s", text);
    vector<result> results;
    for (const session *s : sessions)
        results.push_back(result_of(l, *s));
    return results;
}

// ---- Double precision ----

// K and V of every position as the cache holds them; held: whether it does.
struct plain {
    vector<float> k, v;
    vector<bool> held;
};

static plain read_cache(const layer &l, const session &s, uint32_t head)
{
    const size_t dim = l.shape.k_dim, total = s.total();
    vector<uint8_t> space(kvq_workspace_bytes() + 64), extras = s.extras;
    plain p = {vector<float>(total * dim), vector<float>(total * dim), vector<bool>(total)};
    kvq_reading r = {};
    r.format = &l.format;
    r.shape = &l.shape;
    r.pages = s.pages.data();
    r.n_pages = (uint32_t)s.pages.size();
    r.book = l.cpu_book();
    if (s.extras_at.size) {
        memcpy(align(extras), align(const_cast<session &>(s).extras), s.extras_at.size);
        r.extras = align(extras);
    }
    kvq_read_rows(kvq_kernels_get(KVQ_ISA_C), &r, 0, (uint32_t)s.w.tokens, head, p.k.data(),
                  p.v.data(), align(space));
    for (size_t t = 0; t < s.w.tokens; t++)
        p.held[t] = t % 128 < s.pages[t / 128].tokens;
    for (size_t t = s.w.tokens; t < total; t++) {
        const size_t from = ((t - s.w.tokens) * l.shape.kv_heads + head) * dim;
        memcpy(&p.k[t * dim], &s.fresh_k[from], dim * sizeof(float));
        memcpy(&p.v[t * dim], &s.fresh_v[from], dim * sizeof(float));
        p.held[t] = true;
    }
    return p;
}

struct exact {
    vector<double> out;
    double lse;
    double size; // root of the mean over tokens of the sum of (q k)^2, the logit's shares
};

// The logits of a query that sees something, and their positions.
static vector<double> logits_of(const layer &l, const session &s, const plain &p, const float *q,
                                uint32_t token, vector<uint64_t> &seen, double *squares)
{
    const kvq_attend &c = s.call;
    const size_t dim = l.shape.k_dim;
    const uint64_t position = c.q_start + token, window = l.shape.window;
    vector<double> logits;
    for (uint64_t t = 0; t < s.total(); t++) {
        const bool past = c.flags & KVQ_ATTEND_PAST_ONLY ? t < c.past_tokens : t <= position;
        if (!past || !p.held[t] || (window && t + window <= position))
            continue;
        double dot = 0;
        for (size_t i = 0; i < dim; i++) {
            const double share = (double)q[i] * p.k[t * dim + i] * l.shape.scale;
            dot += share;
            *squares += share * share;
        }
        if (l.shape.softcap != 0)
            dot = l.shape.softcap * tanh(dot / l.shape.softcap);
        logits.push_back(dot);
        seen.push_back(t);
    }
    return logits;
}

static exact attend(const layer &l, const session &s, const plain &p, const float *q,
                    uint32_t token)
{
    const size_t dim = l.shape.k_dim;
    exact e = {vector<double>(dim, 0), -INFINITY, 0};
    vector<uint64_t> seen;
    double squares = 0;
    const vector<double> logits = logits_of(l, s, p, q, token, seen, &squares);
    double most = -INFINITY, sum = 0;
    for (const double x : logits)
        most = fmax(most, x);
    if (logits.empty())
        return e;
    for (size_t i = 0; i < logits.size(); i++) {
        const double weight = exp(logits[i] - most);
        sum += weight;
        for (size_t c = 0; c < dim; c++)
            e.out[c] += weight * p.v[seen[i] * dim + c];
    }
    for (double &x : e.out)
        x /= sum;
    e.lse = most + log(sum);
    e.size = sqrt(squares / logits.size());
    return e;
}

// Error of a row over what it may be: 2e-3 relative. Q and its products with K's scales are rounded
// to fp16, each by up to 2^-11, so a logit moves by chance, by some 3e-4 of what its channels'
// shares come to (`size`); the weight of a token moves by as much, relative, and so does the row
// where few tokens make it up. Of ten thousand rows some are five times as far off. Rows of large
// logits are therefore granted 3e-3 of their size, which is more than 2e-3 from a size of 2/3 on;
// how all rows do without that, a tally tells. Output of 16 bits is granted its own rounding. Many
// rows together may have half of all that.
static double compare(const float *got, float lse, const exact &want, double rounding,
                      tally *strict)
{
    double error = 0, all = 0;
    for (size_t i = 0; i < want.out.size(); i++) {
        error += (got[i] - want.out[i]) * (got[i] - want.out[i]);
        all += want.out[i] * want.out[i];
    }
    if (want.lse == -INFINITY)
        return lse == -INFINITY && error == 0 ? 0 : INFINITY;
    if (!(fabs(lse - want.lse) <= 2e-3 * fmax(1, fmax(want.size, fabs(want.lse)))))
        return INFINITY;
    const double relative = sqrt(error / all);
    if (strict && rounding == 0) {
        strict->rows++;
        strict->above += relative > 2e-3;
        strict->squares += relative * relative;
    }
    return relative >= 0 ? relative / (fmax(2e-3, 3e-3 * want.size) + rounding) : INFINITY;
}

double worst_error(const layer &l, const session &s, const result &got, tally *strict)
{
    const uint32_t gqa = l.shape.q_heads / l.shape.kv_heads;
    const size_t dim = l.shape.k_dim;
    const double rounding = s.w.out_dtype == KVQ_F32 ? 0 : s.w.out_dtype == KVQ_F16 ? 5e-4 : 4e-3;
    double worst = 0, squares = 0;
    for (uint32_t head = 0; head < l.shape.kv_heads; head++) {
        const plain p = read_cache(l, s, head);
        for (uint32_t r = 0; r < s.call.q_tokens * gqa; r++) {
            const size_t row = r / gqa * l.shape.q_heads + head * gqa + r % gqa;
            const exact want = attend(l, s, p, &s.q[row * dim], r / gqa);
            const double error = compare(&got.out[row * dim], got.lse[row], want, rounding, strict);
            worst = fmax(worst, error);
            squares += error * error;
        }
    }
    const double rows = (double)got.lse.size();
    return rows < 8 ? worst : fmax(worst, 2 * sqrt(squares / rows));
}
} // namespace kit
