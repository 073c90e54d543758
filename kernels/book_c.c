// SPDX-License-Identifier: Apache-2.0
//
// Codebook codecs in plain C (VecInfer, section 3; MILLION, section 3). A code is the number of
// the centroid nearest to `vector` neighbouring channels (codec_math.h).
#include <assert.h>

#include "kernels/internal.h"
#include "kernels/kernels_c.h"
#include "kernels/planes.h"

static const float *table_of(const struct kvq__side *side, uint32_t sub)
{
    assert(side->book); // whoever opens a session with a codebook format has one
    return side->book + sub * side->book_sub;
}

// Field t of a row of a plane becomes the lowest bits of `code`.
static void put_field(uint8_t *row, uint32_t width, uint32_t t, uint32_t code)
{
    uint32_t bit = width * t % 8, mask = (1u << width) - 1;
    uint8_t *at = row + width * t / 8;
    *at = (uint8_t)((*at & ~(mask << bit)) | (code & mask) << bit);
}

// Code of token t of sub-vector m, `subs` in all. See layout.h, 7.
void kvq__put_book_code(uint8_t *codes, uint32_t bits, uint32_t subs, uint32_t m, uint32_t t,
                        uint32_t code)
{
    uint32_t low = kvq__book_low(bits), high = kvq__book_high(bits);
    assert(code >> bits == 0);
    put_field(codes + kvq__book_low_row(bits, m), low, t, code);
    if (high)
        put_field(codes + kvq__book_high_row(bits, subs, m), high, t, code >> low);
}

// With the length of a vector known to the compiler.
static uint32_t nearest(const float *x, const float *table, uint32_t vector, uint32_t count)
{
    assert(vector == 2 || vector == 4 || vector == 8);
    return vector == 2   ? kvq__nearest_centroid(x, table, 2, count)
           : vector == 4 ? kvq__nearest_centroid(x, table, 4, count)
                         : kvq__nearest_centroid(x, table, 8, count);
}

static void quant(const struct kvq__side *side, uint32_t dim, const float *rows, uint8_t *codes)
{
    uint32_t vector = side->row.vector, bits = side->row.bits, subs = dim / vector;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t m = 0; m < subs; m++)
            kvq__put_book_code(
                codes, bits, subs, m, t,
                nearest(rows + t * dim + m * vector, table_of(side, m), vector, 1u << bits));
}

static void dequant(const struct kvq__side *side, uint32_t dim, const uint8_t *codes, float *rows)
{
    uint32_t vector = side->row.vector, bits = side->row.bits, subs = dim / vector;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t m = 0; m < subs; m++) {
            uint32_t code = kvq__book_code(codes, bits, subs, m, t);
            memcpy(rows + t * dim + m * vector, table_of(side, m) + code * vector,
                   vector * sizeof *rows);
        }
}

static void quant_k_book(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    quant(&c->k, c->dim, rows, kvq_packed_at(&c->layout, record, first).group + c->layout.k_codes);
}

static void quant_v_book(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    quant(&c->v, c->dim, rows, kvq_packed_at(&c->layout, record, first).group + c->layout.v_codes);
}

static void dequant_k_book(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    dequant(&c->k, c->dim, packed->group + c->layout.k_codes, rows);
    kvq__apply_norms(c, packed, rows);
}

static void dequant_v_book(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    dequant(&c->v, c->dim, packed->group + c->layout.v_codes, rows);
}

void kvq__init_book_c(struct kvq_kernels *k)
{
    k->quant_k[KVQ__BOOK] = quant_k_book;
    k->quant_v[KVQ__BOOK] = quant_v_book;
    k->dequant_k[KVQ__BOOK] = dequant_k_book;
    k->dequant_v[KVQ__BOOK] = dequant_v_book;
}
