// SPDX-License-Identifier: Apache-2.0
//
// Codebook files: the smoothing factors and centroids of a model's layers, for formats whose codes
// are numbers of centroids (vecinfer-*, million-*). Made by kvq-codebook, loaded by the daemon.
//
//     header | one row per layer | zeros to a multiple of 64 | factors | K tables | V tables
//
// All numbers are little-endian; values are fp32.
//
//     factors   of each layer: [kv_heads][dim]                      only if the header says so
//     K tables  of each layer: [kv_heads or 1][subs or 1][2^bits][vector],  subs = dim / vector
//     V tables  likewise
//
// Layers that read another layer's cache have a row of 0 and neither factors nor tables. With
// KVQ_CODEBOOK_GLOBAL the K tables and the V tables stand there once, for all layers. A side whose
// bits are 0 is not made of codebooks and has no tables. All parts are multiples of 64 bytes.
//
// The file is foreign: it is read whole and checked before anything of it is used (sizes, both
// checks, ranges, every value), and one that breaks a rule is refused with a sentence that names
// the place, the value and the limit.
//
// A codebook that is open may be read by any number of threads. One that is being made belongs to
// its maker.
#ifndef KVQ_STORAGE_CODEBOOK_H
#define KVQ_STORAGE_CODEBOOK_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "proto/limits.h"

#define KVQ_CODEBOOK_MAGIC "KVQBOOK1"

enum {
    KVQ_CODEBOOK_VERSION = 1,
    KVQ_CODEBOOK_ALIGN = 64,
    KVQ_CODEBOOK_MADE_BYTES = 640,
    // Flags.
    KVQ_CODEBOOK_GLOBAL = 1,    // one set of tables for all layers
    KVQ_CODEBOOK_OWN_HEADS = 2, // each KV head has tables of its own
    KVQ_CODEBOOK_OWN_SUBS = 4,  // each sub-vector has a table of its own
    KVQ_CODEBOOK_FACTORS = 8,   // there are smoothing factors
    KVQ_CODEBOOK_PART = 16,     // work in progress of its maker; nobody else opens it
};

// Bounds of values. Factors are no smaller than fp16 can be, centroids no larger than what bf16
// sources are limited to.
#define KVQ_CODEBOOK_LEAST_FACTOR  0x1p-24f
#define KVQ_CODEBOOK_MOST_FACTOR   0x1p64f
#define KVQ_CODEBOOK_MOST_CENTROID 0x1p119f

struct kvq_codebook_header {
    char magic[8];
    uint64_t check;      // XXH3 (64 bits, seed 0) of header and rows, with this field 0
    uint64_t data_check; // XXH3 of everything behind the rows, the zeros included
    uint64_t bytes;      // of the whole file
    uint32_t version, layers, flags;
    uint8_t dtype;          // of all values: KVQ_F32
    uint8_t k_rotation;     // enum kvq_rotation: before K was cut into sub-vectors
    uint8_t k_token_scale;  // enum kvq_token_scale: likewise
    uint8_t v_rotation;     // enum kvq_rotation: likewise for V
    uint8_t k_bits, v_bits; // of a code; 0: no codebook
    uint8_t k_vector, v_vector;
    uint8_t zero[12];
    char format[KVQ_FORMAT_NAME];       // printable ASCII, then zeros; so are the next two
    char model[KVQ_FINGERPRINT_BYTES];  // name or fingerprint of the model, as captured
    char made[KVQ_CODEBOOK_MADE_BYTES]; // how it was made, as "key=value" words
};
static_assert(sizeof(struct kvq_codebook_header) == 1024, "the header has no gaps");

// 0 for a layer that reads another layer's cache.
struct kvq_codebook_row {
    uint16_t kv_heads, dim;
};
static_assert(sizeof(struct kvq_codebook_row) == 4, "a row has no gaps");

struct kvq_codebook;

// ---- Reading ----

// 0 or a negative KVQ_E code (E_SYSTEM, E_INVALID, E_LIMIT, E_FORMAT, E_NO_MEMORY) with a sentence
// in text. *out is released with kvq_codebook_close; NULL after a failure.
int kvq_codebook_open(const char *path, struct kvq_codebook **out, char *text, size_t n);
// The same from a descriptor, which is closed in any case; `name` is for texts.
int kvq_codebook_open_fd(int fd, const char *name, struct kvq_codebook **out, char *text, size_t n);
// Accepts NULL and pointers to NULL.
void kvq_codebook_close(struct kvq_codebook **book);

// Name of the format it was made for. Valid as long as the codebook.
const char *kvq_codebook_format(const struct kvq_codebook *book);
// The same number if and only if all bytes of the file are the same (but for chance, 2^-64).
// 0 before kvq_codebook_save.
uint64_t kvq_codebook_id(const struct kvq_codebook *book);
// The memory that all tables of an opened codebook lie in, as a memfd that cannot be written or
// change its size: it starts with *values, *n of them. It is the codebook's; -1 while it is made.
int kvq_codebook_memory(const struct kvq_codebook *book, const float **values, size_t *n);
const struct kvq_codebook_header *kvq_codebook_head(const struct kvq_codebook *book);
// layer is below head->layers.
const struct kvq_codebook_row *kvq_codebook_row(const struct kvq_codebook *book, uint32_t layer);

// Whether a layer of this format and shape can be quantized with it: the layer is there, heads and
// head_dim are the same, and every stage up to the codes is the one that it was made for. If not,
// a sentence in text. Formats that need no codebook fit any layer.
bool kvq_codebook_fits(const struct kvq_codebook *book, uint32_t layer, const struct kvq_format *f,
                       const struct kvq_shape *s, char *text, size_t n);

// Fills *out with pointers into the codebook, for a layer that is in it. They live as long as it.
void kvq_codebook_layer(const struct kvq_codebook *book, uint32_t layer, struct kvq_book *out);

// ---- Making ----

struct kvq_codebook_plan {
    const struct kvq_format *format; // a format that needs one
    const struct kvq_codebook_row *rows;
    uint32_t layers;
    uint32_t flags;    // GLOBAL, OWN_HEADS, OWN_SUBS; FACTORS follows from the format
    const char *model; // cut to what the header holds
};

// A codebook of that shape: factors 1, centroids 0. E_INVALID, E_LIMIT, E_FORMAT, E_NO_MEMORY.
int kvq_codebook_new(const struct kvq_codebook_plan *plan, struct kvq_codebook **out, char *text,
                     size_t n);

// What a maker fills in. Sizes in floats; 0 and NULL where there is nothing. The tables of a
// global codebook are the same for every layer.
struct kvq_codebook_tables {
    float *smooth, *k, *v;
    size_t smooth_n, k_n, v_n;
};
void kvq_codebook_tables(struct kvq_codebook *book, uint32_t layer, struct kvq_codebook_tables *t);

// Makes the folders of path that are missing, and says whether kvq_codebook_save can create a file
// there: for a maker who computes for long before there is something to save. 0 or a KVQ_E code
// with a sentence; path is left as it is.
int kvq_codebook_try_save(const char *path, char *text, size_t n);

// Writes it: to PATH.tmp-PID in the same folder, synced, then renamed over path; a crash leaves the
// old file or the new. `made` tells how it was made, at most KVQ_CODEBOOK_MADE_BYTES - 1 bytes.
// Refuses values that kvq_codebook_open would refuse. 0 or a KVQ_E code with a sentence.
int kvq_codebook_save(struct kvq_codebook *book, const char *path, const char *made, char *text,
                      size_t n);

// The same with KVQ_CODEBOOK_PART, for work that may have to be taken up again.
int kvq_codebook_save_part(struct kvq_codebook *book, const char *path, const char *made,
                           char *text, size_t n);
// Opens what kvq_codebook_save_part wrote, and nothing else.
int kvq_codebook_open_part(const char *path, struct kvq_codebook **out, char *text, size_t n);

#endif
