// SPDX-License-Identifier: Apache-2.0
//
// The emulator behind emu.h: fibers and their scheduler, collectives, and asynchronous copies.
// Shared memory with its checks is in shared.cpp.
#include "kernels/emu/emu.h"

#include <algorithm>

#include "kernels/emu/machine.h"

namespace gpu
{
machine *emu_machine;

enum { STACK_BYTES = 256 * 1024 };

// ---- Fibers ----

uint64_t emu_random()
{
    // xorshift64*; the seed is never 0.
    uint64_t x = emu_machine->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    emu_machine->random = x;
    return x * 0x2545f4914f6cdd1dull;
}

fiber &emu_self()
{
    return emu_machine->fibers[emu_machine->current];
}

static void to_scheduler()
{
    swapcontext(&emu_self().context, &emu_machine->scheduler);
}

void emu_refuse(const char *format, ...)
{
    emu_report *r = emu_machine->report;
    va_list list;
    va_start(list, format);
    vsnprintf(r->text, sizeof(r->text), format, list);
    va_end(list);
    emu_machine->refused = true;
    to_scheduler(); // which abandons all fibers
}

static void fiber_main()
{
    emu_machine->kernel(emu_machine->args);
    emu_self().state = ENDED;
    for (;;)
        to_scheduler();
}

static void start_fiber(int t)
{
    machine *m = emu_machine;
    fiber &f = m->fibers[t];
    f.state = READY;
    f.stack.resize(STACK_BYTES);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = NULL;
    makecontext(&f.context, fiber_main, 0);
}

// Says for each warp which lanes wait at which line, and which have ended.
static void report_deadlock()
{
    machine *m = emu_machine;
    emu_report *r = m->report;
    size_t used =
        snprintf(r->text, sizeof(r->text), "deadlock in block (%d, %d):", m->block_x, m->block_y);
    for (size_t t = 0; t < m->fibers.size() && used < sizeof(r->text); t++) {
        const fiber &f = m->fibers[t];
        const fiber *before = t % WARP ? &m->fibers[t - 1] : NULL;
        const bool alike = before && before->state == f.state &&
                           (f.state == ENDED || before->at.line == f.at.line);
        if (alike)
            continue;
        if (f.state == ENDED)
            used += snprintf(r->text + used, sizeof(r->text) - used,
                             "\n  warp %zu from lane %zu: ended", t / WARP, t % WARP);
        else
            used += snprintf(r->text + used, sizeof(r->text) - used,
                             "\n  warp %zu from lane %zu: waits in %s at %s:%d", t / WARP, t % WARP,
                             f.at.what, f.at.file, f.at.line);
    }
    m->refused = true;
}

template <typename T> static void shuffle_order(std::vector<T> &v)
{
    for (size_t i = v.size(); i > 1; i--)
        std::swap(v[i - 1], v[emu_random() % i]);
}

// Lets every fiber that can run run until it waits, in a new order each round.
static void run_block()
{
    machine *m = emu_machine;
    std::vector<int> order(m->fibers.size());
    for (size_t t = 0; t < order.size(); t++) {
        order[t] = t;
        start_fiber(t);
    }
    size_t ended = 0;
    while (ended < order.size() && !m->refused) {
        bool moved = false;
        shuffle_order(order);
        for (size_t i = 0; i < order.size() && !m->refused; i++) {
            if (m->fibers[order[i]].state != READY)
                continue;
            m->current = order[i];
            swapcontext(&m->scheduler, &m->fibers[order[i]].context);
            moved = true;
            ended += m->fibers[order[i]].state == ENDED;
        }
        if (!moved)
            report_deadlock();
    }
}

int emu_launch(void (*kernel)(const void *), const void *args, const emu_shape &shape,
               emu_report *report)
{
    machine m = {};
    memset(report, 0, sizeof(*report));
    m.kernel = kernel;
    m.args = args;
    m.report = report;
    m.grid_x = shape.grid_x;
    m.random = shape.seed * 2 + 1;
    m.truncate = shape.truncate;
    m.fibers.resize(shape.threads);
    m.warps.resize(shape.threads / WARP);
    emu_machine = &m;
    for (m.block_y = 0; m.block_y < shape.grid_y; m.block_y++) {
        for (m.block_x = 0; m.block_x < shape.grid_x && !m.refused; m.block_x++) {
            emu_shared_reset(shape.shared);
            run_block();
            if (!m.refused)
                emu_shared_end();
        }
    }
    emu_machine = NULL;
    return m.refused ? -1 : 0;
}

int thread()
{
    return emu_machine->current;
}

int block_x()
{
    return emu_machine->block_x;
}

int block_y()
{
    return emu_machine->block_y;
}

int grid_x()
{
    return emu_machine->grid_x;
}

// ---- Collectives ----

static void release(int first, int count, enum fiber_state from)
{
    for (int t = first; t < first + count; t++)
        if (emu_machine->fibers[t].state == from)
            emu_machine->fibers[t].state = READY;
    emu_machine->report->collectives++;
}

// All of `count` fibers from `first` have arrived: at the same line, or the kernel is refused.
static void check_together(int first, int count)
{
    const place &a = emu_machine->fibers[first].at;
    for (int t = first + 1; t < first + count; t++) {
        const place &b = emu_machine->fibers[t].at;
        if (a.line != b.line || strcmp(a.file, b.file) != 0 || strcmp(a.what, b.what) != 0)
            emu_refuse("divergent collective: thread %d in %s at %s:%d, thread %d in %s at %s:%d",
                       first, a.what, a.file, a.line, t, b.what, b.file, b.line);
    }
}

static place here(const char *what, const char *file, int line)
{
    const place p = {what, file, line};
    return p;
}

// Hands in `n` words; returns when all lanes have, and the last one has run `compute`. The
// results of a lane stay in out[] until it enters its next collective.
static const uint32_t *meet(const place &at, const uint32_t *in, int n,
                            void (*compute)(warp_state &))
{
    const int first = warp() * WARP;
    warp_state &w = emu_machine->warps[warp()];
    fiber &f = emu_self();
    memcpy(w.in[lane()], in, n * sizeof(in[0]));
    f.at = at;
    f.state = AT_WARP;
    if (++w.arrived == WARP) {
        check_together(first, WARP);
        compute(w);
        w.arrived = 0;
        release(first, WARP, AT_WARP);
    }
    to_scheduler();
    return emu_machine->warps[warp()].out[lane()];
}

static void compute_sync(warp_state &w)
{
    w.syncs++;
}

void warp_sync(const char *file, int line)
{
    const uint32_t nothing = 0;
    meet(here("warp_sync", file, line), &nothing, 1, compute_sync);
}

void block_sync(const char *file, int line)
{
    machine *m = emu_machine;
    const int threads = (int)m->fibers.size();
    emu_self().at = here("block_sync", file, line);
    emu_self().state = AT_BLOCK;
    if (++m->arrived == threads) {
        check_together(0, threads);
        m->syncs++;
        m->arrived = 0;
        release(0, threads, AT_BLOCK);
    }
    to_scheduler();
}

// terms[0..16] added up in one of the two ways of emu.h. Products of fp16 are exact in a double.
static float sum_terms(const double terms[17])
{
    double sum = 0, unit = 0;
    if (emu_machine->truncate) {
        double most = 0;
        for (int i = 0; i < 17; i++)
            most = fmax(most, fabs(terms[i]));
        unit = most > 0 && isfinite(most) ? ldexp(1, ilogb(most) - 23) : 0;
    }
    for (int i = 0; i < 17; i++)
        sum += unit > 0 ? trunc(terms[i] / unit) * unit : terms[i];
    return (float)sum;
}

static float low_bf16(uint32_t x)
{
    return as_float(x << 16);
}

static float high_bf16(uint32_t x)
{
    return as_float(x & 0xffff0000u);
}

// Words of a lane: a[0..3], b0, b1, then c[0..3] as bits. The two functions take the halves apart.
static void compute_mma_of(warp_state &w, float (*low)(uint32_t), float (*high)(uint32_t))
{
    float a[16][16], b[16][8];
    for (int l = 0; l < WARP; l++) {
        const int g = l >> 2, j = l & 3;
        for (int r = 0; r < 4; r++) {
            a[g + 8 * (r & 1)][2 * j + 8 * (r >> 1)] = low(w.in[l][r]);
            a[g + 8 * (r & 1)][2 * j + 8 * (r >> 1) + 1] = high(w.in[l][r]);
        }
        for (int r = 0; r < 2; r++) {
            b[2 * j + 8 * r][g] = low(w.in[l][4 + r]);
            b[2 * j + 8 * r + 1][g] = high(w.in[l][4 + r]);
        }
    }
    for (int l = 0; l < WARP; l++) {
        for (int r = 0; r < 4; r++) {
            const int row = (l >> 2) + 8 * (r >> 1), column = 2 * (l & 3) + (r & 1);
            double terms[17] = {as_float(w.in[l][6 + r])};
            for (int k = 0; k < 16; k++)
                terms[1 + k] = (double)a[row][k] * b[k][column];
            w.out[l][r] = as_bits(sum_terms(terms));
        }
    }
}

static void compute_mma(warp_state &w)
{
    compute_mma_of(w, low, high);
}

static void compute_mma_bf16(warp_state &w)
{
    compute_mma_of(w, low_bf16, high_bf16);
}

static void mma_of(const place &at, void (*compute)(warp_state &), float d[4], const uint32_t a[4],
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
    const uint32_t *out = meet(at, row.v, 4, compute);
    for (int i = 0; i < 4; i++)
        r[i] = out[i];
}

void ldmatrix(uint32_t r[4], smem at, const char *file, int line)
{
    load_matrices(here("ldmatrix", file, line), compute_matrix, r, at);
}

void ldmatrix_trans(uint32_t r[4], smem at, const char *file, int line)
{
    load_matrices(here("ldmatrix_trans", file, line), compute_matrix_trans, r, at);
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

// Words of a lane: its value, and the lane whose value it wants.
static void compute_shuffle(warp_state &w)
{
    for (int l = 0; l < WARP; l++)
        w.out[l][0] = w.in[w.in[l][1] % WARP][0];
}

float shuffle(float x, int from, const char *file, int line)
{
    const uint32_t in[2] = {as_bits(x), (uint32_t)from};
    return as_float(meet(here("shuffle", file, line), in, 2, compute_shuffle)[0]);
}

float shuffle_xor(float x, int mask, const char *file, int line)
{
    const uint32_t in[2] = {as_bits(x), (uint32_t)(lane() ^ mask)};
    return as_float(meet(here("shuffle_xor", file, line), in, 2, compute_shuffle)[0]);
}

uint32_t shuffle_bits(uint32_t x, int from, const char *file, int line)
{
    const uint32_t in[2] = {x, (uint32_t)from};
    return meet(here("shuffle_bits", file, line), in, 2, compute_shuffle)[0];
}

static void compute_ballot(warp_state &w)
{
    uint32_t said = 0;
    for (int l = 0; l < WARP; l++)
        said |= (uint32_t)(w.in[l][0] != 0) << l;
    for (int l = 0; l < WARP; l++)
        w.out[l][0] = said;
}

uint32_t ballot(bool x, const char *file, int line)
{
    const uint32_t in = x;
    return meet(here("ballot", file, line), &in, 1, compute_ballot)[0];
}

static void compute_any(warp_state &w)
{
    uint32_t some = 0;
    for (int l = 0; l < WARP; l++)
        some |= w.in[l][0];
    for (int l = 0; l < WARP; l++)
        w.out[l][0] = some;
}

bool any(bool x, const char *file, int line)
{
    const uint32_t in = x;
    return meet(here("any", file, line), &in, 1, compute_any)[0] != 0;
}

// ---- Asynchronous copies ----

void copy16(smem to, const void *from, bool wanted, const char *file, int line)
{
    if (!wanted)
        return;
    emu_copy_start(to, file, line);
    const copy c = {to, from, emu_self().batch, here("copy16", file, line)};
    emu_self().copies.push_back(c);
}

void copy_commit()
{
    emu_self().batch++;
}

void emu_copy_wait(int left)
{
    fiber &f = emu_self();
    std::vector<copy> later, due;
    for (const copy &c : f.copies)
        (c.batch + (uint64_t)left < f.batch ? due : later).push_back(c);
    shuffle_order(due);
    for (const copy &c : due)
        emu_copy_land(c);
    f.copies = later;
}

// ---- Numbers ----

float half_to_float(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) // infinities and NaN
        return as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest < 0x400) // subnormals count 2^-24
        return as_float(sign | as_bits((float)rest * 0x1p-24f));
    return as_float(sign | ((rest << 13) + (112u << 23)));
}

uint16_t float_to_half(float x)
{
    const uint32_t bits = as_bits(x), rest = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (rest > 0x7f800000u)
        return sign | 0x7e00;
    if (rest >= 0x477ff000u) // 65520 and more round to infinity
        return sign | 0x7c00;
    if (rest < 0x38800000u) // below 2^-14; adding 1/2 rounds at the place of a subnormal
        return sign | (uint16_t)(as_bits(as_float(rest) + 0.5f) - 0x3f000000u);
    return sign | (uint16_t)((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

float low(uint32_t x)
{
    return half_to_float((uint16_t)x);
}

float high(uint32_t x)
{
    return half_to_float((uint16_t)(x >> 16));
}

uint32_t pack2(float lo, float hi)
{
    return float_to_half(lo) | (uint32_t)float_to_half(hi) << 16;
}

static uint32_t to_bf16(float x)
{
    const uint32_t bits = as_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000u)
        return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t pack2_bf16(float lo, float hi)
{
    return to_bf16(lo) | to_bf16(hi) << 16;
}

// Blocks run one after the other, and a block's fibers by turns: nothing comes between.
uint32_t atomic_inc(uint32_t *at, uint32_t last)
{
    const uint32_t before = *at;
    *at = before >= last ? 0 : before + 1;
    return before;
}

// The product of two fp16 is exact in fp32.
uint32_t mul2(uint32_t a, uint32_t b)
{
    return pack2(low(a) * low(b), high(a) * high(b));
}
} // namespace gpu
