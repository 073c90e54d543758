// SPDX-License-Identifier: Apache-2.0
//
// The oracle of kvtest.h: dequantization and attention, written from prose, in double precision.
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/kvtest.h"

double kvt_f16(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31)
        x = fraction ? NAN : INFINITY;
    return h >> 15 ? -x : x;
}

double kvt_bf16(uint16_t h)
{
    int exponent = h >> 7 & 255, fraction = h & 127;
    double x = exponent ? ldexp(128 + fraction, exponent - 134) : ldexp(fraction, -133);
    if (exponent == 255)
        x = fraction ? NAN : INFINITY;
    return h >> 15 ? -x : x;
}

// To the nearest number with `bits` bits and exponents from `lowest` on, ties to even.
static double round_to(double x, int bits, int lowest, double largest)
{
    int exponent;
    frexp(x, &exponent);
    int unit = exponent - bits < lowest ? lowest : exponent - bits;
    double y = ldexp(nearbyint(ldexp(x, -unit)), unit);
    return fmin(fmax(y, -largest), largest);
}

static double as_dtype(double x, uint8_t dtype)
{
    if (dtype == KVQ_F16)
        return round_to(x, 11, -24, 65504.0);
    return dtype == KVQ_BF16 ? round_to(x, 8, -133, ldexp(255, 120)) : x;
}

static double element(const struct kvq_view *view, uint64_t token, uint32_t head, uint32_t c)
{
    const uint8_t *p = view->data;
    p += (int64_t)token * view->token_stride + (int64_t)head * view->head_stride;
    uint16_t half;
    float single;
    memcpy(&half, p + 2 * c, 2);
    if (view->dtype == KVQ_F16)
        return kvt_f16(half);
    if (view->dtype == KVQ_BF16)
        return kvt_bf16(half);
    memcpy(&single, p + 4 * c, 4);
    return single;
}

// ---- Groups ----

static uint32_t word_le(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static double f16_at(const uint8_t *p, uint32_t i)
{
    return kvt_f16((uint16_t)(p[2 * i] | p[2 * i + 1] << 8));
}

static uint32_t k_row_word(uint32_t row, uint32_t t)
{
    return ((t / 4) ^ (2 * (row % 4))) * 4 + t % 4;
}

// Where the low-plane bits of K's channel c of token t are: the word's byte within its plane, the
// bit within the word, and the same for the word that 1-bit planes share.
struct field {
    uint32_t low, bit;
    uint32_t half_byte, half_bit; // in a plane of one bit for each code
};

static struct field k_field(uint32_t dim, uint32_t t, uint32_t c)
{
    uint32_t slab_channels = dim == 256 ? 128 : dim, slab = c / slab_channels;
    uint32_t in_slab = c % slab_channels, row = in_slab / 16, rows = slab_channels / 16;
    uint32_t s = in_slab % 16 / 4, e = in_slab % 4 / 2, h = in_slab % 2;
    uint32_t upper = row >= rows / 2, shared = upper ? row - rows / 2 : row;
    struct field f = {.bit = 16 * h + 8 * e + 2 * s};
    f.low = (slab * rows + row) * 128 + 4 * k_row_word(row, t);
    f.half_byte = (slab * rows / 2 + shared) * 128 + 4 * k_row_word(shared, t);
    f.half_bit = f.bit + upper;
    return f;
}

// Where a value of V lies within a row, and at which position of each byte.
static void v_place(uint32_t dim, uint32_t j, uint32_t c, uint32_t *word, uint32_t *s)
{
    uint32_t g = c % 8, rh = c / 8 % 2;
    if (dim == 64) {
        *word = (2 * g + rh) ^ (8 * (j / 2));
        *s = 2 * (c / 32) + c / 16 % 2;
    } else {
        *word = 4 * (g ^ (2 * j)) + 2 * (c / 16 % 2) + rh;
        *s = c / 32;
    }
}

static struct field v_field(uint32_t dim, uint32_t t, uint32_t c)
{
    uint32_t j = t / 8, half = t % 2, k = t % 8 / 2;
    uint32_t slab = dim == 256 ? c / 128 : 0, word, s;
    uint32_t row_bytes = dim == 64 ? 64 : 128;
    uint32_t row = dim == 64 ? 2 * j + (half ^ (j & 1)) : 2 * j + half;
    v_place(dim, j, dim == 256 ? c % 128 : c, &word, &s);
    struct field f = {.bit = 8 * k + 2 * s, .half_bit = 8 * k + 2 * s + half};
    f.low = (slab * 8 + row) * row_bytes + 4 * word;
    f.half_byte = (slab * 4 + j) * row_bytes + 4 * word;
    return f;
}

// A code from its planes (section 3). A plane of 2-bit fields takes dim * 8 bytes.
static uint32_t plane_code(const uint8_t *codes, uint32_t dim, uint32_t bits, const struct field *f)
{
    const uint8_t *high = codes + 8 * dim;
    if (bits == 1)
        return word_le(codes + f->half_byte) >> f->half_bit & 1;
    if (bits == 8)
        return codes[f->bit % 8 / 2 * 8 * dim + f->low + f->bit / 8];
    uint32_t code = word_le(codes + f->low) >> f->bit & 3;
    if (bits == 3)
        return code + 4 * (word_le(high + f->half_byte) >> f->half_bit & 1);
    return bits == 4 ? code + 4 * (word_le(high + f->low) >> f->bit & 3) : code;
}

static uint32_t v_slot(uint32_t t)
{
    return 8 * (t / 8) + 2 * (t % 4) + t / 4 % 2;
}

double kvt_group_k(const uint8_t *group, uint32_t dim, uint32_t bits, bool norms, uint32_t t,
                   uint32_t c)
{
    const uint8_t *scales = group + 32 * dim * bits / 8;
    double norm = norms ? f16_at(scales + 4 * dim, t) : 1.0;
    struct field f = k_field(dim, t, c);
    return norm *
           (f16_at(scales, c) * plane_code(group, dim, bits, &f) + f16_at(scales + 2 * dim, c));
}

double kvt_group_v(const uint8_t *codes, uint32_t dim, uint32_t bits, uint32_t t, uint32_t c)
{
    const uint8_t *scales = codes + 32 * dim * bits / 8;
    uint32_t slot = c / 32 * 32 + v_slot(t);
    struct field f = v_field(dim, t, c);
    return f16_at(scales, slot) * plane_code(codes, dim, bits, &f) + f16_at(scales + 2 * dim, slot);
}

// ---- Any format ----

// One step of Lloyd's iteration: every level becomes the mean of the normal distribution between
// the borders to its neighbours.
static void lloyd_step(double *x, uint32_t n)
{
    double from = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        double to = i + 1 < n ? (x[i] + x[i + 1]) / 2 : INFINITY;
        double mass = 0.5 * (erf(to / sqrt(2)) - erf(from / sqrt(2)));
        x[i] = (exp(-from * from / 2) - exp(-to * to / 2)) / sqrt(2 * acos(-1)) / mass;
        from = to;
    }
}

double kvt_lloyd(uint32_t bits, uint32_t code)
{
    static double levels[5][16];
    double *x = levels[bits];
    uint32_t n = 1u << bits;
    if (x[n - 1] != 0)
        return x[code];
    for (uint32_t i = 0; i < n; i++)
        x[i] = 4.0 * (i + 0.5) / n - 2.0;
    for (int round = 0; round < 4000; round++)
        lloyd_step(x, n);
    if (bits == 2) { // docs/formats.md, 1: 3 and 10 of one unit
        x[1] = 0.3 * x[0];
        x[2] = 0.3 * x[3];
    }
    return x[code];
}

// One side of a record: where its parts are, as sections 2 and 7 have them.
struct part {
    struct kvq_side row;
    uint32_t dim, codes_bytes, params_bytes; // of a group; params: scales and zeros in the group
    uint32_t set_bytes, sets_bytes;          // scales and zeros before the groups
    uint32_t scales;                         // of one set
    const float *book;
    size_t book_sub;
    bool zeros, v;
};

static struct part part_of(const struct kvq_side *row, uint32_t dim, bool v)
{
    struct part p = {.row = *row, .dim = dim, .v = v};
    bool book = row->codec == KVQ_CODEC_BOOK, channel = row->axis == KVQ_PER_CHANNEL;
    p.codes_bytes = 32 * (book ? dim / row->vector : dim) * row->bits / 8;
    if (row->wide)
        p.codes_bytes += 32 * (dim / 4) / 8;
    if (book)
        return p;
    if (!channel && (row->group == 0 || row->group > dim))
        p.row.group = (uint16_t)dim;
    p.zeros = row->codec == KVQ_CODEC_AFFINE || row->codec == KVQ_CODEC_HYBRID;
    p.scales = channel ? dim : row->wide ? 2 * 32 : dim / p.row.group * 32;
    uint32_t bytes = 2 * p.scales * (p.zeros ? 2 : 1);
    if (channel && row->group > 32) {
        p.set_bytes = bytes;
        p.sets_bytes = 128 / row->group * bytes;
    } else {
        p.params_bytes = bytes;
    }
    return p;
}

static uint32_t book_code(const struct part *p, const uint8_t *codes, uint32_t t, uint32_t sub)
{
    // Bits of the low plane by bits of a code.
    static const uint32_t lows[17] = {
        [3] = 2, [4] = 4, [6] = 4, [8] = 8, [10] = 8, [12] = 8, [16] = 8};
    uint32_t subs = p->dim / p->row.vector, bits = p->row.bits, low = lows[bits], code = 0;
    for (uint32_t i = 0; i < bits; i++) { // bit by bit
        uint32_t width = i < low ? low : bits - low;
        const uint8_t *row = codes + (i < low ? 0 : 4 * low * subs) + 4 * width * sub;
        uint32_t at = width * t + (i < low ? i : i - low);
        code += (uint32_t)(row[at / 8] >> at % 8 & 1) << i;
    }
    return code;
}

static uint32_t scalar_code(const struct part *p, const uint8_t *codes, uint32_t t, uint32_t c)
{
    uint32_t dim = p->dim, bits = p->row.bits;
    struct field f = p->v ? v_field(dim, t, c) : k_field(dim, t, c);
    uint32_t code = plane_code(codes, dim, bits, &f);
    if (p->row.wide && c < dim / 4) {
        const uint8_t *third = codes + 32 * dim * bits / 8;
        code += 4u * (third[t * dim / 32 + c / 8] >> c % 8 & 1);
    }
    return code;
}

// Which of a set's scales serves channel c of token t.
static uint32_t scale_index(const struct part *p, uint32_t t, uint32_t c)
{
    if (p->row.axis == KVQ_PER_CHANNEL)
        return c;
    uint32_t which = p->row.wide ? c >= p->dim / 4 : c / p->row.group;
    return 32 * which + (p->v ? v_slot(t) : t);
}

// Token t (of the block) and channel c. `group` is where the side's codes start in its group,
// `sets` where its sets start in the record.
static struct kvt_stored stored_at(const struct part *p, const uint8_t *group, const uint8_t *sets,
                                   uint32_t t, uint32_t c)
{
    struct kvt_stored x = {0};
    if (p->row.codec == KVQ_CODEC_BOOK) {
        x.code = book_code(p, group, t % 32, c / p->row.vector);
        return x;
    }
    const uint8_t *scales = group + p->codes_bytes;
    if (p->set_bytes)
        scales = sets + t / p->row.group * p->set_bytes;
    uint32_t i = scale_index(p, t % 32, c);
    x.code = scalar_code(p, group, t % 32, c);
    x.scale = f16_at(scales, i);
    x.zero = p->zeros ? f16_at(scales + 2 * p->scales, i) : 0;
    return x;
}

static double value_at(const struct part *p, const uint8_t *group, const uint8_t *sets, uint32_t t,
                       uint32_t c)
{
    const struct kvq_side *row = &p->row;
    struct kvt_stored x = stored_at(p, group, sets, t, c);
    if (row->codec == KVQ_CODEC_BOOK)
        return p->book[c / row->vector * p->book_sub + x.code * row->vector + c % row->vector];
    if (row->codec == KVQ_CODEC_SYMMETRIC)
        return x.scale * ((double)x.code - (1 << (row->bits - 1)));
    if (row->codec == KVQ_CODEC_LLOYD)
        return x.scale * kvt_lloyd(row->bits + (row->wide && c < p->dim / 4), x.code);
    return fabs(x.scale) * x.code + x.zero;
}

// Both sides of a record and what lies between.
struct record {
    struct part k, v;
    uint32_t norms, k_bytes, group_bytes; // norms: bytes, 0 without
};

static struct record record_of(const struct kvq_format *f, uint32_t dim)
{
    struct record r = {.k = part_of(&f->k, dim, false), .v = part_of(&f->v, dim, true)};
    r.norms = f->k_token_scale != KVQ_SCALE_NONE ? 64 : 0;
    r.k_bytes = r.k.codes_bytes + r.k.params_bytes;
    r.group_bytes = r.k_bytes + r.norms + r.v.codes_bytes + r.v.params_bytes;
    return r;
}

static const uint8_t *group_at(const struct record *r, const uint8_t *record, uint32_t t)
{
    return record + r->k.sets_bytes + r->v.sets_bytes + t / 32 * r->group_bytes;
}

struct kvt_stored kvt_stored(const struct kvq_format *f, uint32_t dim, const uint8_t *record,
                             bool v, uint32_t t, uint32_t c)
{
    struct record r = record_of(f, dim);
    const uint8_t *group = group_at(&r, record, t);
    struct kvt_stored x;
    if (v)
        return stored_at(&r.v, group + r.k_bytes + r.norms, record + r.k.sets_bytes, t, c);
    x = stored_at(&r.k, group, record, t, c);
    x.norm = r.norms ? f16_at(group + r.k_bytes, t % 32) : 1;
    return x;
}

static void hadamard(double *x, uint32_t dim)
{
    double y[KVQ_MAX_HEAD_DIM];
    for (uint32_t h = dim / 2; h > 0; h /= 2) {
        for (uint32_t i = 0; i < dim; i++)
            y[i] = i & h ? x[i ^ h] - x[i] : x[i] + x[i ^ h];
        memcpy(x, y, sizeof *x * dim);
    }
    for (uint32_t i = 0; i < dim; i++)
        x[i] /= sqrt(dim);
}

// Out of the rotated basis; the transform is its own inverse.
void kvt_rotate_back(uint8_t rotation, double *x, uint32_t dim)
{
    bool flips = rotation == KVQ_ROTATE_SIGNED;
    if (rotation == KVQ_ROTATE_NONE)
        return;
    for (uint32_t i = 0; i < dim && flips; i++)
        x[i] *= kvq_signs_after[i / 32] >> i % 32 & 1 ? -1 : 1;
    hadamard(x, dim);
    for (uint32_t i = 0; i < dim && flips; i++)
        x[i] *= kvq_signs_before[i / 32] >> i % 32 & 1 ? -1 : 1;
}

// ---- Extras ----

// One KV head's extras (section 6); what the format lacks has a size of 0.
struct rest {
    const uint8_t *factors, *pool, *pool_k, *pool_v, *sink_k, *sink_v;
};

static struct rest rest_of(const struct kvq_attend *a, uint32_t head)
{
    const struct kvq_format *f = a->format;
    size_t row = 2 * (size_t)a->shape->k_dim, entries = 0, pool = 0;
    size_t factors = f->k_channel == KVQ_CHANNEL_PROMPT ? row : 0;
    if (f->outliers) {
        entries = (size_t)f->outliers + f->extra_outliers;
        pool = (4 + 4 + 8 + 64 * (8 + 4) + 63) / 64 * 64;
    }
    size_t bytes = factors + pool + 2 * row * (entries + f->sink_tokens);
    if (bytes == 0)
        return (struct rest){0};
    struct rest r = {.factors = a->extras + bytes * head};
    r.pool = r.factors + factors;
    r.pool_k = r.pool + pool;
    r.pool_v = r.pool_k + entries * row;
    r.sink_k = r.pool_v + entries * row;
    r.sink_v = r.sink_k + f->sink_tokens * row;
    return r;
}

static void load_row(const struct kvq_attend *a, const uint8_t *row, double *x)
{
    for (uint32_t c = 0; c < a->shape->k_dim; c++) {
        uint16_t half;
        memcpy(&half, row + 2 * c, 2);
        x[c] = a->shape->dtype == KVQ_F16 ? kvt_f16(half) : kvt_bf16(half);
    }
}

// Whether the position is an outlier, whose rows then are what counts.
static bool outlier(const struct kvq_attend *a, uint32_t head, uint64_t position, double *k,
                    double *v)
{
    struct rest r = rest_of(a, head);
    size_t row = 2 * (size_t)a->shape->k_dim;
    uint32_t count = 0;
    if (a->format->outliers == 0 || a->extras == NULL)
        return false;
    memcpy(&count, r.pool, sizeof count);
    if (a->pool)
        count = a->pool[head];
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at;
        memcpy(&at, r.pool + 16 + 8 * i, sizeof at);
        if (at != position)
            continue;
        load_row(a, r.pool_k + i * row, k);
        load_row(a, r.pool_v + i * row, v);
        return true;
    }
    return false;
}

// ---- Keys ----

static void undo_factors(const struct kvq_attend *a, uint32_t head, double *k)
{
    uint32_t dim = a->shape->k_dim;
    if (a->format->k_channel == KVQ_CHANNEL_PROMPT)
        for (uint32_t c = 0; c < dim; c++)
            k[c] *= f16_at(rest_of(a, head).factors, c);
    if (a->format->k_channel == KVQ_CHANNEL_BOOK && a->book && a->book->smooth)
        for (uint32_t c = 0; c < dim; c++)
            k[c] *= a->book->smooth[head * dim + c];
}

static void packed_key(const struct kvq_attend *a, uint32_t head, const uint8_t *block, uint32_t t,
                       double *k, double *v)
{
    const struct kvq_format *f = a->format;
    uint32_t dim = a->shape->k_dim;
    struct record r = record_of(f, dim);
    const uint8_t *record =
        block + (size_t)head * (r.k.sets_bytes + r.v.sets_bytes) + (size_t)head * 4 * r.group_bytes;
    const uint8_t *group = group_at(&r, record, t);
    if (f->k.codec == KVQ_CODEC_BOOK) {
        r.k.book = a->book->k + head * a->book->k_head;
        r.k.book_sub = a->book->k_sub;
    }
    if (f->v.codec == KVQ_CODEC_BOOK) {
        r.v.book = a->book->v + head * a->book->v_head;
        r.v.book_sub = a->book->v_sub;
    }
    for (uint32_t c = 0; c < dim; c++) {
        k[c] = value_at(&r.k, group, record, t, c);
        v[c] = value_at(&r.v, group + r.k_bytes + r.norms, record + r.k.sets_bytes, t, c);
        if (r.norms)
            k[c] *= f16_at(group + r.k_bytes, t % 32);
    }
    kvt_rotate_back(f->k_rotation, k, dim);
    undo_factors(a, head, k);
    uint8_t by_shape = a->shape->v_rotation == KVQ_V_ROT_DAEMON ? KVQ_ROTATE_HADAMARD : 0;
    kvt_rotate_back(f->v_rotation ? f->v_rotation : by_shape, v, dim);
}

static void raw_key(const struct kvq_attend *a, uint32_t head, const uint8_t *block, uint32_t t,
                    double *k, double *v)
{
    size_t row = 2 * (size_t)a->shape->k_dim;
    block += (t / 32 * a->shape->kv_heads + head) * 64 * row;
    load_row(a, block + t % 32 * row, k);
    load_row(a, block + (32 + t % 32) * row, v);
}

// The first tokens stay raw.
static void sink_key(const struct kvq_attend *a, uint32_t head, uint32_t t, double *k, double *v)
{
    size_t row = 2 * (size_t)a->shape->k_dim;
    load_row(a, rest_of(a, head).sink_k + t * row, k);
    load_row(a, rest_of(a, head).sink_v + t * row, v);
}

bool kvt_key(const struct kvq_attend *a, uint32_t head, uint64_t position, double *k, double *v)
{
    uint64_t fresh = position - a->fresh_start;
    if (position >= a->fresh_start && fresh < a->fresh_tokens) {
        for (uint32_t c = 0; c < a->shape->k_dim; c++) {
            k[c] = as_dtype(element(&a->fresh_k, fresh, head, c), a->shape->dtype);
            v[c] = as_dtype(element(&a->fresh_v, fresh, head, c), a->shape->dtype);
        }
        return true;
    }
    uint32_t t = (uint32_t)(position % 128);
    if (position / 128 >= a->n_pages || t >= a->pages[position / 128].tokens)
        return false;
    const struct kvq_page *page = &a->pages[position / 128];
    bool raw_format = a->format->k.codec == KVQ_CODEC_RAW;
    if (t >= page->packed_tokens)
        raw_key(a, head, page->raw, t, k, v);
    else if (!raw_format && position < a->format->sink_tokens)
        sink_key(a, head, t, k, v);
    else if (raw_format)
        raw_key(a, head, page->packed, t, k, v);
    else if (!outlier(a, head, position, k, v))
        packed_key(a, head, page->packed, t, k, v);
    return true;
}

// ---- Attention ----

static bool sees(const struct kvq_attend *a, uint32_t query, uint64_t position)
{
    uint64_t own = a->q_start + query;
    if (a->flags & KVQ_ATTEND_PAST_ONLY ? position >= a->past_tokens : position > own)
        return false;
    return a->shape->window == 0 || position + a->shape->window > own;
}

struct keys {
    double *k, *v; // [total][dim]
    bool *held;
    uint64_t total;
};

static void attend_row(const struct kvq_attend *a, const struct keys *keys, uint32_t query,
                       uint32_t head, double *out, double *lse)
{
    uint32_t dim = a->shape->k_dim;
    double *logit = malloc(sizeof(double) * (keys->total + 1)), max = -INFINITY, sum = 0;
    for (uint64_t p = 0; p < keys->total; p++) {
        logit[p] = -INFINITY;
        if (!keys->held[p] || !sees(a, query, p))
            continue;
        double dot = 0, cap = a->shape->softcap;
        for (uint32_t c = 0; c < dim; c++)
            dot += element(&a->q, query, head, c) * keys->k[p * dim + c];
        dot *= a->shape->scale;
        logit[p] = cap != 0 ? cap * tanh(dot / cap) : dot;
        max = fmax(max, logit[p]);
    }
    memset(out, 0, sizeof *out * dim);
    for (uint64_t p = 0; p < keys->total && max > -INFINITY; p++) {
        double weight = exp(logit[p] - max);
        sum += weight;
        for (uint32_t c = 0; c < dim && weight > 0; c++)
            out[c] += weight * keys->v[p * dim + c];
    }
    for (uint32_t c = 0; c < dim && sum > 0; c++)
        out[c] /= sum;
    *lse = sum > 0 ? max + log(sum) : -INFINITY;
    free(logit);
}

void kvt_oracle(const struct kvq_attend *a, double *out, double *lse)
{
    uint32_t heads = a->shape->q_heads, gqa = heads / a->shape->kv_heads, dim = a->shape->k_dim;
    struct keys keys = {.total = a->past_tokens + a->step_tokens};
    keys.k = calloc(keys.total * dim + 1, sizeof(double));
    keys.v = calloc(keys.total * dim + 1, sizeof(double));
    keys.held = calloc(keys.total + 1, sizeof(bool));
    for (uint32_t h = 0; h < heads; h++) {
        for (uint64_t p = 0; p < keys.total && h % gqa == 0; p++)
            keys.held[p] = kvt_key(a, h / gqa, p, keys.k + p * dim, keys.v + p * dim);
        for (uint32_t i = 0; i < a->q_tokens; i++)
            attend_row(a, &keys, i, h, out + ((size_t)i * heads + h) * dim, lse + i * heads + h);
    }
    free(keys.k);
    free(keys.v);
    free(keys.held);
}

double kvt_rel_error(const float *out, const double *want, size_t rows, size_t dim)
{
    double worst = 0;
    for (size_t r = 0; r < rows; r++) {
        double largest = DBL_MIN, difference = 0;
        for (size_t i = r * dim; i < (r + 1) * dim; i++) {
            largest = fmax(largest, fabs(want[i]));
            difference = fmax(difference, isnan(out[i]) ? INFINITY : fabs(out[i] - want[i]));
        }
        worst = fmax(worst, difference / largest);
    }
    return worst;
}
