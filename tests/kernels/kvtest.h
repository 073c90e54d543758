// SPDX-License-Identifier: Apache-2.0
//
// What the tests of kernels/ share: seeded numbers, guarded memory, a small cache to attend to,
// and an oracle. The oracle is written from the prose of kernels/layout.h and in double
// precision; it calls nothing of kernels/.
#ifndef KVQ_TESTS_KVTEST_H
#define KVQ_TESTS_KVTEST_H

#include <stdlib.h>

#include "kernels/kernels.h"

// ---- Numbers ----

// KVQ_SEED from the environment, or a fixed seed. Printed once.
uint64_t kvt_seed(void);

// Whether the program was told to use AMX (KVQ_CPU_MASK) and cannot: then it has nothing to test.
bool kvt_lacks_amx(void);
bool kvt_cpu_has_avx512(void);

// The first instruction set that a test looks at: `lowest`; where AVX-512 and AMX run in software
// (tests/kernels/simde) what the CPU itself lacks of them, or both with KVQ_FULL=1 in the
// environment, since the tests of the same names without software have looked at the rest.
static inline int kvt_lowest_isa(int lowest)
{
#ifdef KVQ_AVX512_IN_SOFTWARE
    lowest = getenv("KVQ_FULL") || !kvt_cpu_has_avx512() ? KVQ_ISA_AVX512 : KVQ_ISA_AMX;
#endif
    return lowest;
}

struct kvt_rng {
    uint64_t state;
};
uint64_t kvt_u64(struct kvt_rng *rng);
uint32_t kvt_below(struct kvt_rng *rng, uint32_t n); // 0 to n - 1
float kvt_normal(struct kvt_rng *rng);               // mean 0, variance 1

enum kvt_kind {
    KVT_NORMAL,   // N(0, 1)
    KVT_OUTLIERS, // N(0, 1) with a few strong channels, and tokens of small and of large norm
    KVT_OFFSETS,  // far from zero compared with their spread
    KVT_EXTREME,  // zeros, subnormals, the largest fp16, constants, mixed with N(0, 1)
    KVT_KINDS,
    KVT_RISING, // tiny for 128 tokens, then up to where bf16 ends; of no loop over kinds
};
// [tokens][channels], strides in that order.
void kvt_fill(struct kvt_rng *rng, enum kvt_kind kind, float *x, uint32_t tokens,
              uint32_t channels);

// ---- Memory ----

// n bytes, `offset` bytes behind a multiple of 64, with guard bytes before and behind.
void *kvt_guarded(size_t n, size_t offset);
void kvt_guarded_free(void *p); // fails the test if a guard byte was changed; NULL is allowed
void *kvt_workspace(void);      // kvq_workspace_bytes(), guarded

// ---- Formats ----

// The format of that name; valid for ever. Fails the test if there is none.
const struct kvq_format *kvt_format(const char *name);
// A row of the table, or what suffixes and pairs make of some.
const char *kvt_any_format(struct kvt_rng *rng);
// Whether a format has codes of 16 bits: packing searches 65,536 centroids for each, so tests that
// go over all formats take fewer tokens of it.
bool kvt_has_huge_book(const struct kvq_format *f);

// Codebooks of random numbers for a format, valid for ever; NULL if it has no use for them.
const struct kvq_book *kvt_book(const struct kvq_format *f, const struct kvq_shape *s);

// ---- A cache of one layer of one session ----

struct kvt_cache {
    struct kvq_shape shape;
    const struct kvq_format *format;
    uint32_t tokens, packed; // packed: how many are read packed, a multiple of the unit
    float *k, *v;            // [tokens][kv_heads][dim] as handed over
    uint8_t *raw, *blocks;   // block after block: raw, packed
    struct kvq_page *pages;
    uint32_t n_pages;
    uint8_t *extras; // NULL if the format has none
    const struct kvq_book *book;
};

struct kvq_shape kvt_shape(uint32_t gqa, uint32_t kv_heads, uint32_t dim, uint8_t dtype);
// Random tokens, stored and packed by table k. packed < 0: as many whole units as there are.
struct kvt_cache kvt_cache(const struct kvq_kernels *k, const char *format, struct kvq_shape shape,
                           uint32_t tokens, int packed, enum kvt_kind kind, uint64_t seed);
// The same with keys and values, [tokens][kv_heads][dim], that `fill` writes.
typedef void kvt_fill_fn(const void *data, const struct kvq_shape *s, float *k, float *v,
                         uint32_t tokens);
struct kvt_cache kvt_cache_of(const struct kvq_kernels *k, const char *format,
                              struct kvq_shape shape, uint32_t tokens, int packed,
                              kvt_fill_fn *fill, const void *data);
void kvt_cache_free(struct kvt_cache *c);
// Fills tokens [from, to) of all heads of a raw block with NaN.
void kvt_spoil(const struct kvq_shape *s, const uint8_t *block, uint32_t from, uint32_t to);
struct kvq_reading kvt_reading(const struct kvt_cache *c);
struct kvq_view kvt_view(const float *x, uint32_t heads, uint32_t dim); // [tokens][heads][dim]

// ---- A request against it ----

struct kvt_request {
    struct kvq_attend a;
    float *q, *out, *lse; // fp32, contiguous; the caller may point `a` elsewhere
};

// The last q_tokens tokens of the cache attend, as in the step that appended them.
struct kvt_request kvt_request(const struct kvt_cache *c, uint32_t q_tokens, uint64_t seed);
void kvt_request_free(struct kvt_request *r);
// Cuts it into at least so many items and runs them in this thread, the last one first.
void kvt_attend(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items);
// The same without partials.
void kvt_attend_whole(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items);
// Runs it in n threads of a pool.
void kvt_attend_threads(const struct kvq_kernels *k, const struct kvq_attend *a, unsigned n);

// ---- The oracle ----

double kvt_f16(uint16_t h);
double kvt_bf16(uint16_t h);
// Key and value at one position and KV head in the engine's basis; false if nobody holds it.
bool kvt_key(const struct kvq_attend *a, uint32_t head, uint64_t position, double *k, double *v);
// Level `code` of the best quantizer of N(0, 1) with 2^bits levels, 1 to 4 bits, by iteration.
double kvt_lloyd(uint32_t bits, uint32_t code);
// What a record holds of token t (0 to 127) and channel c of K or V. Scales keep their sign;
// codebooks have a code alone. norm is K's, 1 if the format has none.
struct kvt_stored {
    uint32_t code;
    double scale, zero, norm;
};
struct kvt_stored kvt_stored(const struct kvq_format *f, uint32_t dim, const uint8_t *record,
                             bool v, uint32_t t, uint32_t c);
// Out of the basis of a rotation (enum kvq_rotation).
void kvt_rotate_back(uint8_t rotation, double *x, uint32_t dim);
// One value of a group of affine codes (K per channel, V per token, 32 each), as layout.h says,
// before any transform is undone.
double kvt_group_k(const uint8_t *group, uint32_t dim, uint32_t bits, bool norms, uint32_t t,
                   uint32_t c);
// `codes` is where the group's V codes start.
double kvt_group_v(const uint8_t *codes, uint32_t dim, uint32_t bits, uint32_t t, uint32_t c);
// Attention in double precision; out [q_tokens][q_heads][dim], lse [q_tokens][q_heads].
void kvt_oracle(const struct kvq_attend *a, double *out, double *lse);
// Largest difference of any element, relative to the largest value of its row of `dim`.
double kvt_rel_error(const float *out, const double *want, size_t rows, size_t dim);

#endif
