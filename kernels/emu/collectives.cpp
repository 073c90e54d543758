// SPDX-License-Identifier: Apache-2.0
//
// What lanes of a warp, or warps of a block, do together.
#include <string.h>

#include "kernels/emu/machine.h"

namespace gpu
{
static site here(const char *what, const char *file, int line)
{
    return emu_site({what, file, line});
}

void emu_check_together(int first, int count)
{
    const site at = emu_machine->fibers[first].at;
    for (int t = first + 1; t < first + count; t++) {
        const place &a = emu_place(at), &b = emu_place(emu_machine->fibers[t].at);
        if (emu_machine->fibers[t].at != at)
            emu_refuse("divergent collective: thread %d in %s at %s:%d, thread %d in %s at %s:%d",
                       first, a.what, a.file, a.line, t, b.what, b.file, b.line);
    }
}

// Hands in `n` words; returns when all lanes have, and the last one has run `compute`, which then
// goes on at once. The results of a lane stay in out[] until it enters its next collective.
static const uint32_t *meet(site at, const uint32_t *in, int n, void (*compute)(warp_state &))
{
    const int first = warp() * WARP;
    warp_state &w = emu_machine->warps[warp()];
    uint32_t *own = w.in[lane()];
    for (int i = 0; i < n; i++)
        own[i] = in[i];
    emu_self().loads = 0;
    if (++w.arrived < WARP) {
        emu_sleep(AT_WARP, at);
        emu_yield();
        return emu_machine->warps[warp()].out[lane()];
    }
    emu_self().at = at;
    emu_check_together(first, WARP);
    emu_loads_end(w);
    compute(w);
    w.arrived = 0;
    emu_machine->report->collectives++;
    emu_new_order(w);
    for (int t = first; t < first + WARP; t++)
        emu_wake(t);
    return w.out[lane()];
}

// ---- Syncs ----

static void compute_sync(warp_state &)
{
    emu_merge(warp() * WARP, WARP);
}

void warp_sync(const char *file, int line)
{
    const uint32_t nothing = 0;
    meet(here("warp_sync", file, line), &nothing, 1, compute_sync);
}

// Threads [first, first + count) wait for each other.
static void sync_threads(int group, int first, int count, site at)
{
    machine *m = emu_machine;
    emu_self().loads = 0;
    if (++m->arrived[group] < count) {
        emu_self().barrier = (smem)group;
        emu_sleep(AT_BLOCK, at);
        emu_yield();
        return;
    }
    emu_self().at = at;
    emu_check_together(first, count);
    for (int t = first; t < first + count; t += WARP)
        emu_loads_end(m->warps[t / WARP]);
    emu_merge(first, count);
    m->arrived[group] = 0;
    m->report->collectives++;
    for (int t = first; t < first + count; t++) {
        if (t % WARP == 0)
            emu_new_order(m->warps[t / WARP]);
        emu_wake(t);
    }
}

void block_sync(const char *file, int line)
{
    sync_threads(0, 0, emu_machine->threads, here("block_sync", file, line));
}

void warps_sync(int number, int first, int count, const char *file, int line)
{
    const site at = here("warps_sync", file, line);
    if (number < 1 || number > 15 || count < 1 || warp() < first || warp() >= first + count ||
        (first + count) * WARP > emu_machine->threads)
        emu_refuse("warps_sync number %d of %d warps from %d, by thread %d, at %s:%d: numbers are "
                   "1 to 15, and only those warps may call",
                   number, count, first, thread(), file, line);
    sync_threads(number, first * WARP, count * WARP, at);
}

// ---- mma ----

// terms[0..16] added up cut to 24 bits from the largest. Products of fp16 are exact in a double.
static float sum_cut(const double terms[17])
{
    double most = 0, sum = 0;
    for (int i = 0; i < 17; i++)
        most = fmax(most, fabs(terms[i]));
    const double unit = most > 0 && isfinite(most) ? ldexp(1, ilogb(most) - 23) : 0;
    for (int i = 0; i < 17; i++)
        sum += unit > 0 ? trunc(terms[i] / unit) * unit : terms[i];
    return (float)sum;
}

struct matrices {
    double a[16][16], b[16][8], c[16][8];
};

// The matrices in the words of all lanes: a[0..3], b0, b1, then c[0..3] as bits.
template <float lo(uint32_t), float hi(uint32_t)>
static void gather(const warp_state &w, matrices &x)
{
    for (int l = 0; l < WARP; l++) {
        const int g = l >> 2, j = l & 3;
        for (int r = 0; r < 4; r++) {
            x.a[g + 8 * (r & 1)][2 * j + 8 * (r >> 1)] = lo(w.in[l][r]);
            x.a[g + 8 * (r & 1)][2 * j + 8 * (r >> 1) + 1] = hi(w.in[l][r]);
            x.c[g + 8 * (r >> 1)][2 * j + (r & 1)] = as_float(w.in[l][6 + r]);
        }
        for (int r = 0; r < 2; r++) {
            x.b[2 * j + 8 * r][g] = lo(w.in[l][4 + r]);
            x.b[2 * j + 8 * r + 1][g] = hi(w.in[l][4 + r]);
        }
    }
}

static void multiply_cut(matrices &x)
{
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 8; column++) {
            double terms[17] = {x.c[row][column]};
            for (int k = 0; k < 16; k++)
                terms[1 + k] = x.a[row][k] * x.b[k][column];
            x.c[row][column] = sum_cut(terms);
        }
    }
}

static void multiply(matrices &x)
{
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++)
                x.c[row][column] += x.a[row][k] * x.b[k][column];
}

template <float lo(uint32_t), float hi(uint32_t)> static void compute_mma_of(warp_state &w)
{
    matrices x;
    gather<lo, hi>(w, x);
    if (emu_machine->truncate)
        multiply_cut(x);
    else
        multiply(x);
    for (int l = 0; l < WARP; l++)
        for (int r = 0; r < 4; r++)
            w.out[l][r] = as_bits((float)x.c[(l >> 2) + 8 * (r >> 1)][2 * (l & 3) + (r & 1)]);
}

static void compute_mma(warp_state &w)
{
    compute_mma_of<low, high>(w);
}

static void compute_mma_bf16(warp_state &w)
{
    compute_mma_of<low_bf16, high_bf16>(w);
}

static void mma_of(site at, void (*compute)(warp_state &), float d[4], const uint32_t a[4],
                   uint32_t b0, uint32_t b1, const float c[4])
{
    const uint32_t in[10] = {a[0], a[1],          a[2],          a[3],          b0,
                             b1,   as_bits(c[0]), as_bits(c[1]), as_bits(c[2]), as_bits(c[3])};
    const uint32_t *out = meet(at, in, 10, compute);
    for (int r = 0; r < 4; r++)
        d[r] = as_float(out[r]);
}

void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4],
         const char *file, int line)
{
    mma_of(here("mma", file, line), compute_mma, d, a, b0, b1, c);
}

void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4],
              const char *file, int line)
{
    mma_of(here("mma_bf16", file, line), compute_mma_bf16, d, a, b0, b1, c);
}

// ---- Matrices from shared memory ----

// The 16-byte row that each lane's address points at, handed to those who want parts of it.
static void compute_matrix(warp_state &w)
{
    for (int l = 0; l < WARP; l++)
        for (int i = 0; i < 4; i++)
            w.out[l][i] = w.in[8 * i + (l >> 2)][l & 3];
}

static void compute_matrix_trans(warp_state &w)
{
    for (int l = 0; l < WARP; l++) {
        const int g = l >> 2, j = l & 3;
        for (int i = 0; i < 4; i++) {
            const uint32_t upper = w.in[8 * i + 2 * j][g / 2],
                           lower = w.in[8 * i + 2 * j + 1][g / 2];
            w.out[l][i] =
                g % 2 ? upper >> 16 | (lower & 0xffff0000u) : (upper & 0xffffu) | lower << 16;
        }
    }
}

static void load_matrices(const place &at, void (*compute)(warp_state &), uint32_t r[4], smem from)
{
    u32x4 row;
    emu_load(&row, from, sizeof(row), at.file, at.line);
    const uint32_t *out = meet(emu_site(at), row.v, 4, compute);
    for (int i = 0; i < 4; i++)
        r[i] = out[i];
}

void ldmatrix(uint32_t r[4], smem at, const char *file, int line)
{
    load_matrices({"ldmatrix", file, line}, compute_matrix, r, at);
}

void ldmatrix_trans(uint32_t r[4], smem at, const char *file, int line)
{
    load_matrices({"ldmatrix_trans", file, line}, compute_matrix_trans, r, at);
}

static void compute_transpose(warp_state &w)
{
    uint16_t x[8][8];
    for (int l = 0; l < WARP; l++) {
        x[l >> 2][2 * (l & 3)] = (uint16_t)w.in[l][0];
        x[l >> 2][2 * (l & 3) + 1] = (uint16_t)(w.in[l][0] >> 16);
    }
    for (int l = 0; l < WARP; l++) {
        const int row = l >> 2, column = 2 * (l & 3);
        w.out[l][0] = x[column][row] | (uint32_t)x[column + 1][row] << 16;
    }
}

uint32_t transpose(uint32_t x, const char *file, int line)
{
    return meet(here("transpose", file, line), &x, 1, compute_transpose)[0];
}

// ---- Shuffles and votes ----

// Words of a lane: its value, and the lane whose value it wants.
static void compute_shuffle(warp_state &w)
{
    for (int l = 0; l < WARP; l++)
        w.out[l][0] = w.in[w.in[l][1] % WARP][0];
}

static uint32_t shuffle_of(uint32_t x, int from, site at)
{
    const uint32_t in[2] = {x, (uint32_t)from};
    return meet(at, in, 2, compute_shuffle)[0];
}

float shuffle(float x, int from, const char *file, int line)
{
    return as_float(shuffle_of(as_bits(x), from, here("shuffle", file, line)));
}

float shuffle_xor(float x, int mask, const char *file, int line)
{
    return as_float(shuffle_of(as_bits(x), lane() ^ mask, here("shuffle_xor", file, line)));
}

uint32_t shuffle_bits(uint32_t x, int from, const char *file, int line)
{
    return shuffle_of(x, from, here("shuffle_bits", file, line));
}

uint32_t shuffle_xor_bits(uint32_t x, int mask, const char *file, int line)
{
    return shuffle_of(x, lane() ^ mask, here("shuffle_xor_bits", file, line));
}

static void compute_ballot(warp_state &w)
{
    uint32_t said = 0;
    for (int l = 0; l < WARP; l++)
        said |= (uint32_t)(w.in[l][0] != 0) << l;
    for (int l = 0; l < WARP; l++)
        w.out[l][0] = said;
}

static uint32_t vote(bool x, site at)
{
    const uint32_t in = x;
    return meet(at, &in, 1, compute_ballot)[0];
}

uint32_t ballot(bool x, const char *file, int line)
{
    return vote(x, here("ballot", file, line));
}

bool any(bool x, const char *file, int line)
{
    return vote(x, here("any", file, line)) != 0;
}

bool all(bool x, const char *file, int line)
{
    return vote(x, here("all", file, line)) == ~0u;
}
} // namespace gpu
