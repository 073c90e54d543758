// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups with byte products (vpmaddubsw): AVX2's fast path.
//
// The method is that of vnni_avx512.c: codes on one side, q * scale as int8 (or p * scale as u8) on
// the other, rounded once for each row and group, for all groups of a chunk before the first of
// them is multiplied; the middle of the codes stays in fp32. What differs is what the instruction
// leaves: sums of two products in 16 bits, which are added up in 16 bits as long as they cannot
// overflow (32, 16 and 8 steps for K with 2, 3 and 4 bits, 8, 8 and 4 for V, 4 where V has four
// levels) and then widened. With AVX-VNNI the instruction is the same as there, and what is to be
// widened has 32 bits already.
#include "kernels/bytes_avx2.h"

static void softmax_bytes(struct kvq__tile *tile, uint32_t n)
{
    kvq__bytes_of(tile)->exact->softmax(tile, n);
    kvq__bytes_prepare_v(tile);
}

static bool has_fast_bytes(const struct kvq__codec *c, uint32_t rows)
{
    return kvq__fits_bytes(c) && rows <= KVQ_TILE_ROWS;
}

static void prepare_bytes(struct kvq__tile *tile)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        const float *q = tile->qt + (size_t)r * tile->dim;
        __m256 top = _mm256_set1_ps(1e-30f);
        for (uint32_t i = 0; i < tile->dim; i += 8)
            top =
                _mm256_max_ps(top, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_load_ps(q + i)));
        float max = kvq__max_all(top);
        __m256 factor = _mm256_set1_ps(KVQ__INT16_TOP / max);
        v->q_unit[tile->slot + r] = max / KVQ__INT16_TOP;
        for (uint32_t i = 0; i < tile->dim; i += 16) {
            __m256i x =
                kvq__to_int16(_mm256_load_ps(q + i), _mm256_load_ps(q + i + 8), factor, factor);
            _mm256_store_si256((void *)(v->q16[tile->slot + r] + i), kvq__byte_order(x));
        }
    }
}

// Bytes of q * scale have one step for all channels of a row and group, set by the strongest. If a
// few channels of keys that are neither rotated nor divided (KIVI's) are much stronger than the
// others, that costs up to 0.4 of what quantizing to 4 bits does; such keys take the exact path.
static bool keys_as_bytes(const struct kvq__codec *c)
{
    return c->k_bits < 4 || c->has_norms;
}

// The steps are the common ones, but packed groups are multiplied here.
static void attend_chunk_bytes(const struct kvq_kernels *k, struct kvq__tile *tile,
                               const struct kvq__chunk *chunk)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    struct kvq_kernels fast = *k;
    fast.softmax = softmax_bytes;
    fast.pv_packed[tile->codec->v.kind] = kvq__bytes_pv;
    v->exact = k;
    v->chunk = chunk;
    if (keys_as_bytes(tile->codec)) {
        fast.qk_packed[tile->codec->k.kind] = kvq__bytes_qk;
        kvq__bytes_prepare_k(tile);
    }
    kvq__attend_chunk(&fast, tile, chunk);
    kvq__bytes_flush(tile);
}

void kvq__init_avx2_bytes(struct kvq_kernels *k)
{
    k->has_fast = has_fast_bytes;
    k->prepare_fast = prepare_bytes;
    k->attend_chunk_fast = attend_chunk_bytes;
}
