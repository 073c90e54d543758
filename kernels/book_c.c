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

// Code of token t of sub-vector m, `subs` in all. See layout.h, 7.
void kvq__put_book_code(uint8_t *codes, uint32_t bits, uint32_t subs, uint32_t m, uint32_t t,
                        uint32_t code)
{
    uint32_t more = bits - 8, bit = kvq__book_bit(bits, t);
    codes[m * KVQ_GROUP_TOKENS + t] = (uint8_t)code;
    if (more == 0)
        return;
    uint8_t *high = codes + kvq__book_byte(bits, subs, m, t);
    uint32_t mask = (1u << more) - 1;
    *high = (uint8_t)((*high & ~(mask << bit)) | code >> 8 << bit);
}

static void quant(const struct kvq__side *side, uint32_t dim, const float *rows, uint8_t *codes)
{
    uint32_t vector = side->row.vector, bits = side->row.bits, subs = dim / vector;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t m = 0; m < subs; m++)
            kvq__put_book_code(codes, bits, subs, m, t,
                               kvq__nearest_centroid(rows + t * dim + m * vector, table_of(side, m),
                                                     vector, 1u << bits));
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
