// SPDX-License-Identifier: Apache-2.0
//
// Pure computation over KV caches: formats, packing, decode attention, reading back, merging.
//
// Nothing here knows a process, a file or a socket; nothing allocates, locks or prints. All
// functions are reentrant: they touch only their arguments, so any number of threads may work
// on different items. The bits of a result depend on the session's own tokens and counts alone: on
// the same ISA and path it does not matter which thread computes which item of an attention.
#ifndef KVQ_KERNELS_KERNELS_H
#define KVQ_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KVQ_MAX_HEAD_DIM = 256,
    KVQ_MAX_QUERY_TOKENS = 1 << 15, // per session and call
    KVQ_MAX_GQA = 64,               // query heads per KV head (MQA by tiles)
    KVQ_TILE_ROWS = 64,             // query rows (tokens x heads of the group) in one item
    KVQ_SPLIT_MIN = 512,
    KVQ_SPLIT_MAX = 2048,
};

enum kvq_dtype { KVQ_F16 = 1, KVQ_BF16 = 2, KVQ_F32 = 3 };

// ---- Formats: a format is a row of orthogonal stages ----
//
// KVQ_LAST_* bounds what comes from a wire or a file.

// The factor of each channel that K is divided by before all other stages, and q multiplied with.
enum kvq_k_channel {
    KVQ_CHANNEL_NONE,
    KVQ_CHANNEL_PROMPT, // sqrt(max |K_c|) over the prompt's first tokens (InnerQ)
    KVQ_CHANNEL_BOOK,   // the smoothing factors of a codebook file (VecInfer)
    KVQ_LAST_CHANNEL = KVQ_CHANNEL_BOOK,
};
enum kvq_rotation {
    KVQ_ROTATE_NONE,
    KVQ_ROTATE_HADAMARD, // x * H / sqrt(dim)
    KVQ_ROTATE_SIGNED,   // signs, H / sqrt(dim), signs again; layout.h has the signs
    KVQ_LAST_ROTATION = KVQ_ROTATE_SIGNED,
};
enum kvq_token_scale {
    KVQ_SCALE_NONE,
    KVQ_SCALE_L2_HEAD,
    KVQ_SCALE_L2_CROSS, // over all KV heads
    KVQ_SCALE_MAX,      // max |x| of the head
    KVQ_SCALE_MEAN_ABS, // mean |x| of the head
    KVQ_LAST_TOKEN_SCALE = KVQ_SCALE_MEAN_ABS,
};
enum kvq_codec {
    KVQ_CODEC_RAW,
    KVQ_CODEC_AFFINE,    // scale * code + zero
    KVQ_CODEC_SYMMETRIC, // scale * (code - 2^(bits-1)), levels -top..top with top = 2^(bits-1)-1
    KVQ_CODEC_HYBRID,    // symmetric, or affine of one bit less, group by group (InnerQ)
    KVQ_CODEC_LLOYD,     // scale * level[code], levels of the normal distribution (TurboQuant)
    KVQ_CODEC_BOOK,      // centroid[code] of `vector` channels (VecInfer, MILLION)
    KVQ_LAST_CODEC = KVQ_CODEC_BOOK,
};
enum kvq_axis {
    KVQ_PER_CHANNEL, // a scale serves `group` tokens of one channel
    KVQ_PER_TOKEN,   // a scale serves `group` channels of one token
    KVQ_LAST_AXIS = KVQ_PER_TOKEN,
};
enum kvq_zero {
    KVQ_ZERO_INTEGER, // a multiple of the scale
    KVQ_ZERO_MINIMUM, // the smallest value
    KVQ_ZERO_FITTED,  // zero and scale by least squares
    KVQ_LAST_ZERO = KVQ_ZERO_FITTED,
};

// How one side, K or V, becomes codes.
struct kvq_side {
    uint8_t codec;  // enum kvq_codec
    uint8_t bits;   // of a code: 1, 2, 3, 4, 8; of a codebook 3 to 16; 16 if raw
    uint8_t axis;   // enum kvq_axis
    uint8_t zero;   // enum kvq_zero, affine only
    uint8_t full;   // symmetric and hybrid: use also the code that the papers leave unused
    uint8_t wide;   // Lloyd: the first quarter of the channels has one bit more and its own scale
    uint8_t vector; // codebooks: channels per code; 2, 4 or 8
    uint16_t group; // values per scale: 32, 64 or 128; 0 = all channels. More than dim means dim
};

enum { KVQ_FORMAT_NAME = 64, KVQ_MAX_SINK = 96, KVQ_MAX_LEARN = 4096 };

struct kvq_format {
    char name[KVQ_FORMAT_NAME];
    const char *source;      // paper and section
    uint8_t k_channel;       // enum kvq_k_channel
    uint8_t k_rotation;      // enum kvq_rotation
    uint8_t k_token_scale;   // enum kvq_token_scale
    uint8_t v_rotation;      // enum kvq_rotation; NONE leaves it to the shape
    uint8_t raw_dtype;       // raw formats: the one 16-bit dtype it holds; else 0 (either)
    uint8_t outliers;        // how many tokens with the smallest |K|_1 stay raw (OTT); 0 = none
    uint8_t extra_outliers;  // room for outliers that later ones displaced
    uint8_t plain_layers;    // how many first layers have no outliers
    uint8_t paper_rotates_v; // 1: its paper rotates V in the weights; see kvq_v_rotation_by_paper
    struct kvq_side k, v;
    uint16_t unit_tokens;   // tokens that are packed at a time: 32, 64 or 128
    uint16_t recent_tokens; // newest tokens kept raw besides the unit being filled
    uint16_t sink_tokens;   // first tokens of a session, always raw; 0, 32, 64 or 96
};

// The named rows; a row with an empty name ends the table.
extern const struct kvq_format kvq_formats[];

const struct kvq_format *kvq_format_by_name(const char *name); // a row above; NULL if there is none

// Finds the format of a name: a row above, or a row and suffixes that change single stages
// (docs/formats.md lists them: "-g64", "-fm", "-xh", ..), or "vecinfer-k<d,b>v<d,b>", or two such
// names joined by "+": K as in the first and V as in the second. ":stage=value:.." may follow any
// of these, see kvq_format_change. Returns 0, or -1 with a sentence in text.
int kvq_format_parse(const char *name, struct kvq_format *format, char *text, size_t n);

// Changes single stages: "stage=value:stage=value", as docs/formats.md lists them. Keeps the name,
// and does not check the row (kvq_format_check does). Returns 0, or -1 with a sentence in text that
// says what is allowed; the format is then unchanged.
int kvq_format_change(struct kvq_format *format, const char *changes, char *text, size_t n);

// The number of the stage that these n bytes name, from 0 on; -1 if there is none. At most 32.
int kvq_format_stage(const char *name, size_t n);

// Makes K as in *format and V as in *v, with the longer of their units and windows. 0, or -1 with a
// sentence in text if they hold two 16-bit types. The name stays.
int kvq_format_join(struct kvq_format *format, const struct kvq_format *v, char *text, size_t n);

// Whether a composed row is a valid format: 0, or -1 with a sentence in text.
int kvq_format_check(const struct kvq_format *f, char *text, size_t n);

static inline bool kvq_is_raw(const struct kvq_format *f)
{
    return f->k.codec == KVQ_CODEC_RAW;
}
// Whether its codes are numbers of centroids, which a codebook holds.
static inline bool kvq_has_centroids(const struct kvq_format *f)
{
    return f->k.codec == KVQ_CODEC_BOOK || f->v.codec == KVQ_CODEC_BOOK;
}
// How many first tokens of a session a format learns from before it packs any, given the end of the
// prompt (0 = unknown). 0 for formats that learn nothing.
uint32_t kvq_learn_tokens(const struct kvq_format *f, uint64_t prompt_tokens);

// The codebooks of one layer, as fp32: smoothing factors and centroids. Strides count floats; 0
// where all heads (or all sub-vectors) share a table.
struct kvq_book {
    const float *smooth; // [kv_heads][dim], greater than 0; NULL = none
    const float *k, *v;  // centroids [2^bits][vector]
    size_t k_head, k_sub, v_head, v_sub;
};

// How a layer's V is rotated, besides what its format says (OScaR, Algorithm 1).
enum kvq_v_rotation {
    KVQ_V_ROT_NONE,   // V is quantized as it comes
    KVQ_V_ROT_ENGINE, // the engine rotated it in its weights; nothing to do here
    KVQ_V_ROT_DAEMON, // rotated when packed; the packed part of the output is rotated back
};

// The default rotation of V: DAEMON if the format's paper rotates V in the weights, and K's
// rotation and V's codes are still those of the paper; else NONE.
enum kvq_v_rotation kvq_v_rotation_by_paper(const struct kvq_format *f);

// Shape of one layer. All heads of a layer share it.
struct kvq_shape {
    uint16_t q_heads, kv_heads; // q_heads is a multiple of kv_heads, at most KVQ_MAX_GQA times
    uint16_t k_dim, v_dim;      // of rows as they are stored: 64, 128 or 256, and equal
    uint16_t head_dim;          // of rows of K, V, Q and out as engines have them, where they are
                                // narrower: zeros are stored behind. 0 = k_dim
    uint8_t dtype;              // KVQ_F16 or KVQ_BF16: dtype of raw records
    uint8_t v_rotation;         // enum kvq_v_rotation
    uint32_t window;            // sliding window in tokens, own token included; 0 = none
    float softcap;              // logits become softcap * tanh(logit / softcap); 0 = none
    float scale;                // softmax scale, usually 1/sqrt(head_dim)
};

// The dims of an engine's rows: sets k_dim, v_dim and head_dim. What cannot be stored is left for
// kvq_shape_check to refuse. Zeros behind Q and K add nothing to their products, and V's come out
// as zeros, which are not written.
void kvq_shape_set_dims(struct kvq_shape *s, uint16_t k_dim, uint16_t v_dim);

// The dim of an engine's rows: what was given to kvq_shape_set_dims.
static inline uint16_t kvq_row_dim(const struct kvq_shape *s)
{
    return s->head_dim ? s->head_dim : s->k_dim;
}

// The dim that rows of this dim are stored with: 64, 128 or 256; 0 if they cannot be stored.
uint16_t kvq_stored_dim(uint32_t row_dim);

// Whether two formats (or shapes) have the same blocks: all fields are equal, but for a format's
// name, source and paper_rotates_v.
bool kvq_format_same(const struct kvq_format *a, const struct kvq_format *b);
bool kvq_shape_same(const struct kvq_shape *a, const struct kvq_shape *b);

// 0, or -1 with a plain sentence in text (what is wrong, the value, what is allowed).
int kvq_shape_check(const struct kvq_shape *s, const struct kvq_format *f, char *text, size_t n);

// Offsets and sizes of a format's records. The shape must have passed kvq_shape_check with this
// format.
struct kvq_layout kvq_layout_of(const struct kvq_format *f, const struct kvq_shape *s);
size_t kvq_block_bytes(const struct kvq_layout *l, const struct kvq_shape *s);
struct kvq_raw_layout kvq_raw_layout_of(const struct kvq_shape *s); // of the window's blocks
double kvq_bits_per_value(const struct kvq_format *f, const struct kvq_shape *s);

// ---- Kernels of one instruction set ----

enum kvq_path { KVQ_PATH_EXACT, KVQ_PATH_FAST };

struct kvq_kernels; // a table of functions; see kernels/internal.h
enum {
    KVQ_ISA_C = 0,
    KVQ_ISA_AVX2 = 1,
    KVQ_ISA_AVX512 = 2,
    KVQ_ISA_AMX = 3, // AVX-512, and AMX's tiles for prompts
    KVQ_ISA_BEST = KVQ_ISA_AMX,
};

// The best that the CPU (and `max_isa`, one of KVQ_ISA_*) allows. Environment variable
// KVQ_CPU_MASK=c|avx2|avx512 lowers it further, for tests. AMX is there with KVQ_CPU_MASK=amx
// alone, set before the first call.
int kvq_isa_best(int max_isa);
const char *kvq_isa_name(int isa); // "c", "avx2", "avx512", "amx"

// The table of kvq_isa_best. Never NULL; valid for ever.
const struct kvq_kernels *kvq_kernels_get(int max_isa);
const char *kvq_kernels_isa(const struct kvq_kernels *k);
bool kvq_kernels_has_fast(const struct kvq_kernels *k, const struct kvq_format *f,
                          const struct kvq_shape *s);

// A strided view of [tokens][heads][kvq_row_dim()]; strides in bytes, a row contiguous. The
// strides may be anything that keeps dtype alignment; the caller has checked the bounds.
struct kvq_view {
    const void *data;
    int64_t token_stride, head_stride;
    uint8_t dtype; // enum kvq_dtype
};

// ---- Storing: from the caller's tensors into raw blocks ----

struct kvq_store_counts {
    uint64_t nonfinite; // NaN or Inf seen in the source; the caller refuses the append
    uint64_t saturated; // fp32 (or bf16 to fp16) values beyond the 16-bit range, clamped
};

// Rounds (to nearest even, saturating) `tokens` tokens of one KV head into slots
// [slot, slot + tokens) of a raw block. Both views' data point at the first token and head 0.
void kvq_store(const struct kvq_kernels *k, const struct kvq_shape *s, const struct kvq_view *kv_k,
               const struct kvq_view *kv_v, uint32_t head, uint32_t slot, uint32_t tokens,
               uint8_t *raw_block, struct kvq_store_counts *counts);

// ---- Pages ----

// 128 positions of one layer: page i of a table holds positions 128 i to 128 i + tokens - 1.
// Tokens below packed_tokens are read from `packed`, the others from `raw` (same slots). A raw
// format's packed block is a raw block, too. A raw block may end behind the strip (layout.h) of the
// last token that is read from it. Where either count ends within a unit, the unit's
// other slots of `packed` must still have been packed: kernels compute with them and mask the
// result. Kernels never read the first sink_tokens positions of a session packed: those below
// packed_tokens they read from the extras.
struct kvq_page {
    const uint8_t *packed; // may be NULL if packed_tokens == 0
    const uint8_t *raw;    // may be NULL if packed_tokens == tokens
    uint16_t tokens, packed_tokens;
};

// ---- Extras: what a session's layer holds besides blocks ----

// Formats with sink tokens, outliers or factors learned from the prompt keep an extras record for
// each session and layer, one piece of memory (layout.h, 6). 0 bytes for formats that need none.
size_t kvq_extras_bytes(const struct kvq_format *f, const struct kvq_shape *s);
// Whether sink tokens are all that the extras hold. Once the first block is packed nothing changes
// them, so they can go wherever that block goes.
bool kvq_extras_are_sinks(const struct kvq_format *f);
// Whether two sessions of a format may have their common blocks read together, by what they have
// besides: nothing, or the same sinks.
static inline bool kvq_extras_shared(const struct kvq_format *f, const uint8_t *a, const uint8_t *b)
{
    return a == b && (!a || kvq_extras_are_sinks(f));
}
void kvq_extras_init(const struct kvq_format *f, const struct kvq_shape *s, uint8_t *extras);

// Learns from the session's first kvq_learn_tokens() tokens of one KV head: channel factors, and
// the first choice of outliers. Call it once, before the first kvq_pack of that head; all these
// tokens must be in raw blocks.
void kvq_learn(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
               const struct kvq_page *pages, uint32_t learn_tokens, uint32_t head, uint8_t *extras,
               void *workspace);

// Whether foreign bytes are valid extras: 0, or -1 if kernels would read out of bounds with them.
int kvq_extras_check(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *extras);

// Copies extras for a fork that keeps the tokens below `at`. `to` may be `from`.
void kvq_extras_fork(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *from,
                     uint8_t *to, uint64_t at);

// Copies the first `tokens` sinks of every KV head, of extras that are sinks.
void kvq_sinks_copy(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *from,
                    uint8_t *to, uint32_t tokens);

// Outliers of one KV head. kvq_learn and kvq_pack append entries, and kvq_outliers_publish, after
// that work, makes them count. So an attention that was given the published numbers may run while
// another unit is being packed. One thread publishes and asks.
void kvq_outliers_publish(const struct kvq_format *f, const struct kvq_shape *s, uint8_t *extras);
uint32_t kvq_outliers_published(const struct kvq_format *f, const struct kvq_shape *s,
                                const uint8_t *extras, uint32_t head);

// ---- Packing: one unit of one layer, raw block to packed block ----

struct kvq_unit {
    const uint8_t *raw_block;
    uint8_t *packed_block;
    uint32_t head;
    uint32_t first;              // of its tokens, within the block
    uint64_t block_start;        // position of the block's first token
    uint8_t *extras;             // NULL if the format has none
    uint32_t learned;            // kvq_learn_tokens() of the session
    const struct kvq_book *book; // codebook formats
};

// Packs tokens [first, first + unit_tokens) of one KV head. For formats whose token scale spans
// heads, reads all heads' rows of the raw block; otherwise only that head's.
// Bytes are identical on every ISA. Blocks are 64-byte aligned, and the raw one has the unit's
// strips; the call writes only the head's slots of the unit, and of the extras only the head's
// record. Pack the units of a format with outliers one after the other, others in any order. Units
// may be packed again, from any one to the last, with the same result.
// Packing also copies the sink tokens of the unit to the extras, and copies the blocks of raw
// formats.
// `workspace` is at least kvq_workspace_bytes() long, 64-byte aligned, one per thread; about 8 MB,
// of which decoding touches little.
void kvq_pack(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
              const struct kvq_unit *unit, void *workspace);

// ---- Attention over one session's layer ----

enum { KVQ_ATTEND_PAST_ONLY = 1 };

// Query token i stands at position q_start + i and sees the keys at positions p <= q_start + i
// (with PAST_ONLY instead: p < past_tokens, wherever the query stands), and, with a sliding
// window w, p > q_start + i - w. Positions that no page holds are not seen.
// Keys at positions below past_tokens + step_tokens lie in pages; where fresh_tokens > 0 the
// keys at [fresh_start, fresh_start + fresh_tokens) are read from fresh_k and fresh_v instead,
// rounded as kvq_store would have rounded them (so the bits are the same). Fresh tokens are never
// packed ones.
struct kvq_attend {
    const struct kvq_format *format;
    const struct kvq_shape *shape;
    const struct kvq_page *pages;
    uint32_t n_pages;
    uint32_t flags;
    uint8_t path;                // enum kvq_path
    const uint8_t *extras;       // NULL if the format has none
    const uint8_t *pool;         // outliers published of each KV head; NULL = all there are
    const struct kvq_book *book; // codebook formats
    uint64_t past_tokens, step_tokens;
    uint64_t fresh_start;
    uint32_t fresh_tokens;
    struct kvq_view fresh_k, fresh_v;
    uint64_t q_start;
    uint32_t q_tokens; // 1 to KVQ_MAX_QUERY_TOKENS
    struct kvq_view q; // heads are query heads
    void *out;         // [q_tokens][q_heads][kvq_row_dim()], strides below
    int64_t out_token_stride, out_head_stride;
    uint8_t out_dtype;
    float *lse; // [q_tokens][q_heads], natural log, -inf where nothing is visible; or NULL
    int64_t lse_token_stride; // bytes
};

// How an attention is split into items, which threads may compute in any order.
struct kvq_attend_job;
struct kvq_attend_plan {
    uint32_t split_tokens; // fixed token positions, from the call's own counts alone
    uint32_t n_splits;
    uint32_t tile_tokens; // query tokens of a tile, the last of which may have fewer
    uint32_t n_tiles;     // tiles of query rows per KV head
    bool tall;            // whether tiles are those of the table's attend_chunk_tall
    uint32_t heads;       // KV heads in one item
    uint32_t items;       // how many items there are, those for other members included
    uint32_t wanted;      // items that were asked for
    bool parallel;        // splits are separate items whose partials must be merged
    size_t partial_bytes; // memory for all partials; 0 if not parallel
    // Set by kvq_attend_share. Splits below first_split are done by the items of the member that
    // has `members`; those items, shared_items of them, come first among its items.
    uint32_t first_split;
    struct kvq_attend_job *const *members;
    uint32_t n_members, shared_items;
    uint32_t shared_heads, stacks, stack_tiles; // KV heads, and tiles of members, in one item
};

// One session's attention in a batch.
struct kvq_attend_job {
    struct kvq_attend call;
    struct kvq_attend_plan plan;
    void *partials; // plan.partial_bytes of the caller's memory, 64-byte aligned
};

// Into how many items a batch is cut for so many threads (at least 1) of a daemon, an engine or a
// pool: a few for each of them, so that the last item keeps the others waiting for a short time
// only, and not many, since splits are merged and heads read apart. For one thread 1.
uint32_t kvq_attend_items(uint32_t threads);

// The work of an attention, to be held against that of others of the same batch: `tokens` are those
// that pages hold.
uint64_t kvq_attend_work(const struct kvq_shape *s, uint64_t tokens, uint32_t queries);
// How many of the `items` items of a batch, whose attentions are `all` work together, one of `work`
// is to have; at least 1. A long session among short ones would else keep one thread at work while
// the others have nothing to do.
uint32_t kvq_attend_part(uint32_t items, uint64_t work, uint64_t all);

// Splits an attention into at least `items` items if possible; into as few as possible for 1. The
// plan does not change a bit of the result. Items must then be computed with the same kernels.
void kvq_attend_plan(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items,
                     struct kvq_attend_plan *plan);
// Does without partials, for which there is no room: splits are one item's, and heads and tiles
// alone make as many items as were asked for, if possible. The same bits. Not for a plan that
// kvq_attend_share has changed.
void kvq_attend_plan_whole(const struct kvq_attend *a, struct kvq_attend_plan *plan);
// Splits the calls of n jobs for so many threads: together into at least kvq_attend_items() if
// possible, each into its part of them.
void kvq_attend_plan_batch(const struct kvq_kernels *k, struct kvq_attend_job *const *jobs,
                           uint32_t n, uint32_t threads);

// Finds sessions among planned jobs whose pages start with the same blocks, and changes their plans
// so that an item unpacks these blocks once for the query rows of all. Sorts the array, which must
// stay until the items are done. Returns whether there are such sessions: their plans are then
// parallel, and the caller allocates partials for them (or calls kvq_attend_plan again for every
// job). Sessions with different extras, or with extras that are more than sinks, share nothing, nor
// do sessions that would not get faster.
bool kvq_attend_share(struct kvq_attend_job **jobs, uint32_t n);

// Computes one item. `workspace` is the thread's own.
void kvq_attend_item(const struct kvq_kernels *k, const struct kvq_attend_job *job, uint32_t item,
                     void *workspace);

// After every item of all jobs is done: merges the partials of one (KV head, tile), left to right,
// and writes out and lse. `index` is below kvq_attend_merges(), which is 0 if not parallel.
void kvq_attend_merge(const struct kvq_kernels *k, const struct kvq_attend_job *job, uint32_t index,
                      void *workspace);
uint32_t kvq_attend_merges(const struct kvq_attend_job *job);

size_t kvq_workspace_bytes(void); // per thread, for every call above

// ---- Reading back ----

struct kvq_reading {
    const struct kvq_format *format;
    const struct kvq_shape *shape;
    const struct kvq_page *pages;
    uint32_t n_pages;
    const uint8_t *extras; // these three as in struct kvq_attend
    const uint8_t *pool;
    const struct kvq_book *book;
    uint32_t first_page; // number of pages[0]
};

// Reads tokens [from, from + n) of one KV head as fp32 [n][k_dim], dequantized and rotated back to
// the engine's basis: the values that attention computes with. Leaves rows of tokens that no page
// holds untouched, and returns the number of tokens read.
uint32_t kvq_read_rows(const struct kvq_kernels *k, const struct kvq_reading *r, uint64_t from,
                       uint32_t n, uint32_t head, float *k_out, float *v_out, void *workspace);

// ---- Merging two attentions over disjoint keys ----

// out = (out_a e^lse_a + out_b e^lse_b) / (e^lse_a + e^lse_b), lse likewise, for `rows` rows of
// `dim` fp32. Outputs may alias either input. A side whose lse is -inf adds nothing.
void kvq_merge_rows(const float *out_a, const float *lse_a, const float *out_b, const float *lse_b,
                    float *out, float *lse, size_t rows, size_t dim);

#ifdef __cplusplus
}
#endif

#endif
