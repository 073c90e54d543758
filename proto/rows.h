// SPDX-License-Identifier: Apache-2.0
//
// Which bytes a strided tensor [rows][heads][width] covers, and whether two tensors overlap. The
// daemon refuses a request by these functions, libkvq one that it serves itself, and libkvq says by
// them why the daemon has refused one. Pure functions. All numbers are allowed: sums have 128 bits.
#ifndef KVQ_PROTO_ROWS_H
#define KVQ_PROTO_ROWS_H

#include <stdbool.h>
#include <stdint.h>

typedef unsigned __int128 kvq_wide;

struct kvq_rows {
    uint64_t start; // address of row 0, or where it begins in its buffer
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

// Adds rows [row, row + n) of heads x width: the tensor then goes from the first row to the last,
// and has the most heads and the largest width.
static inline void kvq_rows_add(struct kvq_rows *r, uint64_t row, uint64_t n, uint32_t heads,
                                uint32_t width)
{
    if (n == 0)
        return;
    uint64_t first = r->n && r->first < row ? r->first : row;
    uint64_t end = r->n && r->first + r->n > row + n ? r->first + r->n : row + n;
    r->first = first;
    r->n = end - first;
    r->heads = heads > r->heads ? heads : r->heads;
    r->width = width > r->width ? width : r->width;
}

// Whether a stride is less than what it steps over, which no entry's rows may have.
static inline bool kvq_rows_narrow(const struct kvq_rows *r)
{
    return (r->n > 1 && r->row_stride < r->width) || (r->heads > 1 && r->head_stride < r->width);
}

// Whether two rows or heads of one tensor share a byte. Exact.
static inline bool kvq_rows_fold(const struct kvq_rows *r)
{
    if (kvq_rows_empty(r))
        return false;
    if (kvq_rows_narrow(r))
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

// Whether what attention writes overlaps itself or what it reads: Q, K and V.
static inline bool kvq_rows_clash(const struct kvq_rows *out, const struct kvq_rows *lse,
                                  const struct kvq_rows in[3])
{
    bool bad = kvq_rows_fold(out) || kvq_rows_fold(lse) || kvq_rows_meet(out, lse);
    for (int i = 0; i < 3 && !bad; i++)
        bad = kvq_rows_meet(out, &in[i]) || kvq_rows_meet(lse, &in[i]);
    return bad;
}

#endif
