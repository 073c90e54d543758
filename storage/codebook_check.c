// SPDX-License-Identifier: Apache-2.0
//
// What makes a codebook valid: its header, its rows, its values.
#define XXH_INLINE_ALL
#include <assert.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "proto/status.h"
#include "storage/codebook_internal.h"

enum {
    KNOWN_FLAGS = KVQ_CODEBOOK_GLOBAL | KVQ_CODEBOOK_OWN_HEADS | KVQ_CODEBOOK_OWN_SUBS |
                  KVQ_CODEBOOK_FACTORS | KVQ_CODEBOOK_PART,
};

uint64_t kvq__codebook_front(uint32_t layers)
{
    assert(layers > 0 && layers <= KVQ_MAX_LAYERS);
    uint64_t n =
        sizeof(struct kvq_codebook_header) + (uint64_t)layers * sizeof(struct kvq_codebook_row);
    return (n + KVQ_CODEBOOK_ALIGN - 1) / KVQ_CODEBOOK_ALIGN * KVQ_CODEBOOK_ALIGN;
}

// ---- The two checks ----

uint64_t kvq__codebook_data_check(const struct kvq_codebook *book)
{
    static const uint8_t zeros[KVQ_CODEBOOK_ALIGN];
    size_t rows = book->head.layers * sizeof(struct kvq_codebook_row);
    assert(book->values);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, zeros,
                       kvq__codebook_front(book->head.layers) - sizeof book->head - rows);
    XXH3_64bits_update(&state, book->values, book->n_values * sizeof *book->values);
    return XXH3_64bits_digest(&state);
}

uint64_t kvq__codebook_head_check(const struct kvq_codebook *book)
{
    struct kvq_codebook_header plain = book->head;
    XXH3_state_t state;
    plain.check = 0;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, &plain, sizeof plain);
    XXH3_64bits_update(&state, book->rows, book->head.layers * sizeof book->rows[0]);
    return XXH3_64bits_digest(&state);
}

// ---- Header ----

// Printable ASCII, ended by 0, zeros behind.
static bool is_text(const char *text, size_t n)
{
    size_t i = 0;
    while (i < n && text[i] >= ' ' && text[i] <= '~')
        i++;
    if (i == n)
        return false;
    while (i < n && text[i] == '\0')
        i++;
    return i == n;
}

static int check_texts(const struct kvq_codebook_header *h, const struct kvq__complaint *c)
{
    static const uint8_t zeros[sizeof h->zero];
    const char *wrong = NULL;
    if (!is_text(h->format, sizeof h->format))
        wrong = "the format's name";
    else if (!is_text(h->model, sizeof h->model))
        wrong = "the model's name";
    else if (!is_text(h->made, sizeof h->made))
        wrong = "the text on how it was made";
    else if (memcmp(h->zero, zeros, sizeof zeros) != 0)
        wrong = "the part of its header that has to be 0";
    if (wrong)
        return kvq__complain(c, KVQ_E_INVALID, "is damaged in %s", wrong);
    return KVQ_OK;
}

static int check_numbers(const struct kvq_codebook_header *h, const struct kvq__complaint *c)
{
    if (memcmp(h->magic, KVQ_CODEBOOK_MAGIC, sizeof h->magic) != 0)
        return kvq__complain(c, KVQ_E_INVALID,
                             "is no codebook: it does not begin with " KVQ_CODEBOOK_MAGIC);
    if (h->version != KVQ_CODEBOOK_VERSION)
        return kvq__complain(c, KVQ_E_INVALID,
                             "is a codebook of version %u; this program reads version %d",
                             h->version, KVQ_CODEBOOK_VERSION);
    if (h->layers == 0 || h->layers > KVQ_MAX_LAYERS)
        return kvq__complain(c, KVQ_E_LIMIT, "has %u layers; 1 to %d are allowed", h->layers,
                             KVQ_MAX_LAYERS);
    if (h->flags & ~(uint32_t)KNOWN_FLAGS)
        return kvq__complain(c, KVQ_E_INVALID, "has flags %#x; known are %#x", h->flags,
                             KNOWN_FLAGS);
    if (h->dtype != KVQ_F32)
        return kvq__complain(c, KVQ_E_DTYPE, "has values of dtype %u; %d (fp32) is possible",
                             h->dtype, KVQ_F32);
    return KVQ_OK;
}

static bool same_side(const struct kvq_side *side, uint8_t bits, uint8_t vector)
{
    if (side->codec != KVQ_CODEC_BOOK)
        return bits == 0 && vector == 0;
    return bits == side->bits && vector == side->vector;
}

// The header's stages are those of the format that it names.
static int check_format(const struct kvq_codebook_header *h, const struct kvq__complaint *c)
{
    struct kvq_format f;
    char why[200];
    if (kvq_format_parse(h->format, &f, why, sizeof why))
        return kvq__complain(c, KVQ_E_FORMAT, "is for a format that is not known here: %s", why);
    if (!kvq_has_centroids(&f))
        return kvq__complain(c, KVQ_E_FORMAT, "is for format %s, which needs no codebook", f.name);
    bool factors = h->flags & KVQ_CODEBOOK_FACTORS;
    if (!same_side(&f.k, h->k_bits, h->k_vector) || !same_side(&f.v, h->v_bits, h->v_vector) ||
        h->k_rotation != f.k_rotation || h->v_rotation != f.v_rotation ||
        h->k_token_scale != f.k_token_scale || factors != (f.k_channel == KVQ_CHANNEL_BOOK))
        return kvq__complain(c, KVQ_E_FORMAT,
                             "names format %s, but K has %u bits for %u channels and V %u for %u, "
                             "rotations %u and %u, token scale %u, %s factors; that is not what "
                             "%s is here",
                             f.name, h->k_bits, h->k_vector, h->v_bits, h->v_vector, h->k_rotation,
                             h->v_rotation, h->k_token_scale, factors ? "with" : "without", f.name);
    return KVQ_OK;
}

// ---- Rows and sizes ----

size_t kvq__codebook_table(const struct kvq_codebook_header *h, bool v)
{
    assert(h->k_bits < 32 && h->v_bits < 32);
    return (v ? h->v_bits : h->k_bits)
               ? (size_t)(v ? h->v_vector : h->k_vector) << (v ? h->v_bits : h->k_bits)
               : 0;
}

size_t kvq__codebook_tables(const struct kvq_codebook_header *h, const struct kvq_codebook_row *row,
                            bool v)
{
    size_t vector = v ? h->v_vector : h->k_vector;
    if (vector == 0)
        return 0;
    assert(row->dim % vector == 0);
    return (h->flags & KVQ_CODEBOOK_OWN_HEADS ? row->kv_heads : 1u) *
           (h->flags & KVQ_CODEBOOK_OWN_SUBS ? row->dim / vector : 1u);
}

static int check_rows(const struct kvq_codebook *book, const struct kvq__complaint *c)
{
    const struct kvq_codebook_row *first = NULL;
    uint32_t own = book->head.flags & (KVQ_CODEBOOK_OWN_HEADS | KVQ_CODEBOOK_OWN_SUBS);
    for (uint32_t i = 0; i < book->head.layers; i++) {
        const struct kvq_codebook_row *r = &book->rows[i];
        if (r->kv_heads == 0 && r->dim == 0)
            continue;
        if (r->kv_heads == 0 || r->kv_heads > KVQ_MAX_HEADS)
            return kvq__complain(c, KVQ_E_LIMIT, "layer %u has %u KV heads; 1 to %d are allowed", i,
                                 r->kv_heads, KVQ_MAX_HEADS);
        if (r->dim != 64 && r->dim != 128 && r->dim != 256)
            return kvq__complain(c, KVQ_E_LIMIT,
                                 "layer %u has head_dim %u; 64, 128 and 256 are possible", i,
                                 r->dim);
        if (book->head.flags & KVQ_CODEBOOK_GLOBAL && own && first &&
            (r->kv_heads != first->kv_heads || r->dim != first->dim))
            return kvq__complain(c, KVQ_E_INVALID,
                                 "has tables of heads or sub-vectors that all layers share, but "
                                 "layer %u has %u KV heads of %u channels, another %u of %u",
                                 i, r->kv_heads, r->dim, first->kv_heads, first->dim);
        first = first ? first : r;
    }
    return first ? KVQ_OK : kvq__complain(c, KVQ_E_INVALID, "has no layer with keys of its own");
}

// Fills the places; what comes out is exact, since all factors are bounded (less than 2^40 in sum).
static void place_parts(struct kvq_codebook *book)
{
    const struct kvq_codebook_header *h = &book->head;
    uint64_t at = 0, size;
    for (uint32_t i = 0; i < h->layers && h->flags & KVQ_CODEBOOK_FACTORS; i++) {
        book->places[i].smooth = at;
        at += (uint64_t)book->rows[i].kv_heads * book->rows[i].dim;
    }
    for (int v = 0; v < 2; v++) {
        uint64_t shared = at;
        for (uint32_t i = 0; i < h->layers; i++) {
            size = book->rows[i].kv_heads
                       ? kvq__codebook_tables(h, &book->rows[i], v) * kvq__codebook_table(h, v)
                       : 0;
            size_t *place = v ? &book->places[i].v : &book->places[i].k;
            *place = h->flags & KVQ_CODEBOOK_GLOBAL ? shared : at;
            if (!(h->flags & KVQ_CODEBOOK_GLOBAL) || at == shared)
                at += size;
        }
    }
    book->n_values = at;
}

int kvq__codebook_check(struct kvq_codebook *book, const struct kvq__complaint *c)
{
    int rc = check_numbers(&book->head, c);
    if (rc == KVQ_OK)
        rc = check_texts(&book->head, c);
    if (rc == KVQ_OK)
        rc = check_format(&book->head, c);
    if (rc == KVQ_OK)
        rc = check_rows(book, c);
    if (rc)
        return rc;
    place_parts(book);
    uint64_t bytes =
        kvq__codebook_front(book->head.layers) + (uint64_t)book->n_values * sizeof(float);
    if (bytes > KVQ_MAX_CODEBOOK_BYTES)
        return kvq__complain(c, KVQ_E_LIMIT,
                             "has tables of %llu bytes; %d are allowed. Let heads, sub-vectors or "
                             "layers share tables",
                             (unsigned long long)bytes, KVQ_MAX_CODEBOOK_BYTES);
    if (bytes != book->head.bytes)
        return kvq__complain(c, KVQ_E_INVALID, "says that it has %llu bytes; its tables need %llu",
                             (unsigned long long)book->head.bytes, (unsigned long long)bytes);
    return KVQ_OK;
}

// ---- Values ----

int kvq__codebook_check_values(const struct kvq_codebook *book, const struct kvq__complaint *c)
{
    size_t factors = 0;
    for (uint32_t i = 0; i < book->head.layers && book->head.flags & KVQ_CODEBOOK_FACTORS; i++)
        factors += (size_t)book->rows[i].kv_heads * book->rows[i].dim;
    assert(factors <= book->n_values);
    for (size_t i = 0; i < book->n_values; i++) {
        float x = book->values[i];
        if (i < factors && !(x >= KVQ_CODEBOOK_LEAST_FACTOR && x <= KVQ_CODEBOOK_MOST_FACTOR))
            return kvq__complain(
                c, KVQ_E_INVALID, "smoothing factor %zu is %g; %g to %g are possible", i, (double)x,
                (double)KVQ_CODEBOOK_LEAST_FACTOR, (double)KVQ_CODEBOOK_MOST_FACTOR);
        if (i >= factors && !(fabsf(x) <= KVQ_CODEBOOK_MOST_CENTROID))
            return kvq__complain(c, KVQ_E_INVALID,
                                 "number %zu of the centroids is %g; %g is the most", i - factors,
                                 (double)x, (double)KVQ_CODEBOOK_MOST_CENTROID);
    }
    return KVQ_OK;
}
