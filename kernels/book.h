// SPDX-License-Identifier: Apache-2.0
//
// What the codebook loops of all vector instruction sets share: one side of a group, and the sizes
// of its codes and centroids as constants.
//
// Codes become offsets of 16 bits into the tables. A centroid of 2 or 4 channels lies at its offset
// in bytes, one of 8 channels at twice that, for 4,096 of them take 128 KiB. The offset of a code
// of 16 bits is the code itself.
#ifndef KVQ_KERNELS_BOOK_H
#define KVQ_KERNELS_BOOK_H

#include "kernels/internal.h"
#include "kernels/planes.h"

// The codes of one side of a group, and the tables that they are numbers of.
struct kvq__book_codes {
    const uint8_t *low, *high; // layout.h, 7
    const char *table;         // of sub-vector 0
    size_t stride;             // bytes to that of the next; 0: all share one
    uint32_t dim, subs, bits;
    int shift; // from a code to its offset
};

static inline struct kvq__book_codes kvq__book_codes_of(const struct kvq__side *s, uint32_t dim,
                                                        const uint8_t *codes)
{
    uint32_t bits = s->row.bits, subs = dim / s->row.vector;
    return (struct kvq__book_codes){.low = codes,
                                    .high = codes + kvq__book_high_row(bits, subs, 0),
                                    .table = (const char *)s->book,
                                    .stride = s->book_sub * sizeof(float),
                                    .dim = dim,
                                    .subs = subs,
                                    .bits = bits,
                                    .shift = bits == 16           ? 0
                                             : s->row.vector == 2 ? 3
                                                                  : 4};
}

// Calls something with VECTOR, the channels of a code, and UNIT, the bytes that an offset counts,
// as constants.
#define KVQ__BY_BOOK(side, call)                                                                   \
    do {                                                                                           \
        if ((side)->bits == 16) {                                                                  \
            enum { VECTOR = 8, UNIT = 32 };                                                        \
            call;                                                                                  \
        } else if ((side)->vector == 8) {                                                          \
            enum { VECTOR = 8, UNIT = 2 };                                                         \
            call;                                                                                  \
        } else if ((side)->vector == 4) {                                                          \
            enum { VECTOR = 4, UNIT = 1 };                                                         \
            call;                                                                                  \
        } else {                                                                                   \
            enum { VECTOR = 2, UNIT = 1 };                                                         \
            call;                                                                                  \
        }                                                                                          \
    } while (0)

// And with LOW and HIGH, the bits of a code in its two planes.
#define KVQ__BY_PLANES(bits, call)                                                                 \
    do {                                                                                           \
        switch (bits) {                                                                            \
        case 3: {                                                                                  \
            enum { LOW = 2, HIGH = 1 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        case 4: {                                                                                  \
            enum { LOW = 4, HIGH = 0 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        case 6: {                                                                                  \
            enum { LOW = 4, HIGH = 2 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        case 8: {                                                                                  \
            enum { LOW = 8, HIGH = 0 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        case 10: {                                                                                 \
            enum { LOW = 8, HIGH = 2 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        case 12: {                                                                                 \
            enum { LOW = 8, HIGH = 4 };                                                            \
            call;                                                                                  \
        } break;                                                                                   \
        default: {                                                                                 \
            enum { LOW = 8, HIGH = 8 };                                                            \
            call;                                                                                  \
        }                                                                                          \
        }                                                                                          \
    } while (0)

#endif
