// SPDX-License-Identifier: Apache-2.0
//
// Which bytes a strided tensor [rows][heads][width] covers, and whether two tensors overlap. The
// daemon and libkvq refuse a request whose outputs overlap each other or the tensors that it reads;
// both call these functions. Pure functions. All numbers are allowed: sums have 128 bits.
#ifndef KVQ_PROTO_ROWS_H
#define KVQ_PROTO_ROWS_H

#include <stdbool.h>
#include <stdint.h>

typedef unsigned __int128 kvq_wide;

struct kvq_rows {
    uint64_t start; // address of row 0
    uint64_t row_stride, head_stride;
    uint64_t first, n; // rows [first, first + n)
    uint32_t heads, width;
};

// Bytes of one row, from its first byte to the end of its last head.
static inline kvq_wide kvq_rows_row(const struct kvq_rows *r)
{
    return (kvq_wide)(r->heads - 1) * r->head_stride + r->width;
}

// Bytes of one head, from its first row to the end of its last row.
static inline kvq_wide kvq_rows_head(const struct kvq_rows *r)
{
    return (kvq_wide)(r->n - 1) * r->row_stride + r->width;
}

static inline kvq_wide kvq_rows_begin(const struct kvq_rows *r)
{
    return (kvq_wide)r->first * r->row_stride + r->start;
}

static inline kvq_wide kvq_rows_end(const struct kvq_rows *r)
{
    return kvq_rows_begin(r) + kvq_rows_head(r) + kvq_rows_row(r) - r->width;
}

static inline bool kvq_rows_empty(const struct kvq_rows *r)
{
    return r->n == 0 || r->heads == 0 || r->width == 0;
}

// Whether two rows or heads of one tensor share a byte. Exact.
static inline bool kvq_rows_fold(const struct kvq_rows *r)
{
    if (kvq_rows_empty(r))
        return false;
    if ((r->n > 1 && r->row_stride < r->width) || (r->heads > 1 && r->head_stride < r->width))
        return true;
    if (r->n == 1 || r->heads == 1 || r->row_stride >= kvq_rows_row(r) ||
        r->head_stride >= kvq_rows_head(r))
        return false;
    for (uint32_t h = 1; h < r->heads; h++) { // against the two rows next to where this head starts
        kvq_wide at = (kvq_wide)h * r->head_stride, row = at / r->row_stride;
        kvq_wide behind = at - row * r->row_stride;
        if ((row < r->n && behind < r->width) ||
            (row + 1 < r->n && r->row_stride - behind < r->width))
            return true;
    }
    return false;
}

// Whether pieces of a bytes and pieces of b bytes, `apart` bytes behind them, both repeated every
// `period` bytes, never overlap.
static inline bool kvq_rows_interleave(kvq_wide apart, kvq_wide period, kvq_wide a, kvq_wide b)
{
    return period > 0 && a <= period && b <= period && apart % period >= a &&
           apart % period + b <= period;
}

// Whether two tensors share a byte. Exact if one lies behind the other, and if they alternate by
// rows or by heads, as in a fused buffer of Q, K and V. Returns true for all other tensors whose
// ranges of addresses overlap.
static inline bool kvq_rows_meet(const struct kvq_rows *a, const struct kvq_rows *b)
{
    if (kvq_rows_empty(a) || kvq_rows_empty(b))
        return false;
    kvq_wide a_at = kvq_rows_begin(a), b_at = kvq_rows_begin(b);
    if (kvq_rows_end(a) <= b_at || kvq_rows_end(b) <= a_at)
        return false;
    if (a_at > b_at) {
        const struct kvq_rows *other = a;
        a = b;
        b = other;
    }
    kvq_wide apart = a_at > b_at ? a_at - b_at : b_at - a_at;
    bool rows = a->row_stride == b->row_stride, heads = a->head_stride == b->head_stride;
    if (rows && kvq_rows_interleave(apart, a->row_stride, kvq_rows_row(a), kvq_rows_row(b)))
        return false;
    if (heads && kvq_rows_interleave(apart, a->head_stride, kvq_rows_head(a), kvq_rows_head(b)))
        return false;
    bool nested = rows && heads && a->head_stride && a->row_stride % a->head_stride == 0;
    return !(nested && kvq_rows_interleave(apart, a->head_stride, a->width, b->width));
}

#endif
