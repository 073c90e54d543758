// SPDX-License-Identifier: Apache-2.0
//
// The emulator behind emu.h: launches, fibers and their turns, and who has seen what.
#include "kernels/emu/emu.h"

#include <stdlib.h>
#include <string.h>

#include <string>
#include <tuple>

#include "kernels/emu/machine.h"

namespace gpu
{
machine *emu_machine;

uint64_t emu_random()
{
    // xorshift64*; the seed is never 0.
    uint64_t x = emu_machine->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    emu_machine->random = x;
    return (x * 0x2545f4914f6cdd1dull) >> 16;
}

// ---- Places by number ----

known_site emu_sites[SITES_AT_HAND];

// By what they say, for one line can have several copies of its file's name.
static std::map<std::tuple<std::string, std::string, int>, site> site_numbers;
static std::vector<place> sites;

site emu_site_new(const place &p)
{
    const auto made =
        site_numbers.emplace(std::make_tuple(p.what, p.file, p.line), (site)sites.size());
    if (made.second)
        sites.push_back(p);
    if (sites.size() > UINT16_MAX)
        abort();
    const size_t i = (size_t)p.file / 8 + (size_t)p.what + (size_t)p.line;
    emu_sites[i % SITES_AT_HAND] = {p, made.first->second};
    return made.first->second;
}

const place &emu_place(site number)
{
    return sites[number];
}

// ---- Turns ----

void emu_refuse(const char *format, ...)
{
    machine *m = emu_machine;
    emu_report *r = m->report;
    va_list list;
    va_start(list, format);
    vsnprintf(r->text, sizeof(r->text), format, list);
    va_end(list);
    m->refused = true;
    emu_stack *nobody = NULL;
    emu_stack_switch(&nobody, m->launcher); // abandons all fibers
}

// Where a fiber waits, in words.
static int describe(char *text, size_t n, size_t t, const fiber &f)
{
    const place &at = emu_place(f.at);
    if (f.state == ENDED)
        return snprintf(text, n, "\n  warp %zu from lane %zu: ended", t / WARP, t % WARP);
    if (f.state == AT_BARRIER)
        return snprintf(text, n, "\n  warp %zu from lane %zu: waits in %s at %s:%d for phase %u",
                        t / WARP, t % WARP, at.what, at.file, at.line, f.phase);
    return snprintf(text, n, "\n  warp %zu from lane %zu: waits in %s at %s:%d", t / WARP, t % WARP,
                    at.what, at.file, at.line);
}

// Says for each warp which lanes wait at which line, and which have ended. Lanes that wait in a
// collective for one that has ended, and the like.
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
                           (f.state == ENDED || emu_place(before->at).line == emu_place(f.at).line);
        if (!alike)
            used += describe(r->text + used, sizeof(r->text) - used, t, f);
    }
    m->refused = true;
}

// A warp that can run, most often the one whose turn it is; -1 if none can.
static int next_warp()
{
    machine *m = emu_machine;
    const int count = (int)m->warps.size(), own = m->current / WARP;
    const uint64_t x = emu_random();
    if (m->warps[own].ready && x % 8 != 0)
        return own;
    for (int i = 0, w = (int)(x / 8 % count); i < count; i++, w = w + 1 == count ? 0 : w + 1)
        if (m->warps[w].ready)
            return w;
    return -1;
}

static int next_lane(warp_state &w)
{
    for (;;) {
        const uint32_t lane = (w.start + w.step * w.next++) % WARP;
        if (w.ready & 1u << lane)
            return (int)lane;
    }
}

// The thread to run next; -1 if the block is done or stuck. Now and then, and when nothing else
// can happen, a bulk copy lands.
static int next_thread()
{
    machine *m = emu_machine;
    if (emu_random() % 64 == 0)
        emu_flights_land();
    int w = next_warp();
    while (w < 0 && m->ended < m->threads && emu_flights_land())
        w = next_warp();
    if (w >= 0)
        return w * WARP + next_lane(m->warps[w]);
    if (m->ended < m->threads)
        report_deadlock();
    return -1;
}

void emu_yield()
{
    machine *m = emu_machine;
    fiber &own = emu_self();
    const int next = next_thread();
    if (next == m->current)
        return;
    if (next < 0) {
        emu_stack_switch(&own.stack, m->launcher);
        return;
    }
    m->current = next;
    emu_stack_switch(&own.stack, m->fibers[next].stack);
}

void emu_wake(int thread)
{
    emu_machine->fibers[thread].state = READY;
    emu_machine->warps[thread / WARP].ready |= 1u << thread % WARP;
}

void emu_new_order(warp_state &w)
{
    const uint64_t x = emu_random();
    w.start = (uint32_t)(x % WARP);
    w.step = (uint32_t)(x / WARP % WARP) | 1;
    w.next = 0;
}

static void fiber_main()
{
    emu_machine->kernel(emu_machine->args);
    emu_machine->ended++;
    emu_sleep(ENDED, emu_site({"the end", "", 0}));
    for (;;)
        emu_yield();
}

static void start_block()
{
    machine *m = emu_machine;
    m->ended = 0;
    m->time = 1;
    m->arrived.clear();
    m->barriers.clear();
    m->flights.clear();
    m->known.assign((size_t)m->threads * (m->threads + 1), 0);
    for (warp_state &w : m->warps) {
        w.arrived = 0;
        w.ready = 0;
        w.loads.clear();
        emu_new_order(w);
    }
    for (int t = 0; t < m->threads; t++) {
        fiber &f = m->fibers[t];
        f.stack = emu_stack_start((size_t)t, fiber_main);
        f.copies.clear();
        f.batch = 0;
        f.loads = 0;
        f.others.reset();
        emu_wake(t);
    }
}

static void run_block(uint32_t shared)
{
    machine *m = emu_machine;
    emu_shared_reset(shared);
    start_block();
    m->current = (int)(emu_random() % (uint64_t)m->threads);
    emu_stack_switch(&m->launcher, m->fibers[m->current].stack);
    if (!m->refused)
        emu_flights_end();
    if (!m->refused)
        emu_shared_end();
    m->report->blocks++;
}

// Blocks run one after the other, in an order drawn from the seed: in steps of a prime number that
// does not divide their number.
static void run_grid(const emu_shape &shape)
{
    static const uint64_t primes[] = {7,  11, 13, 17, 19, 23, 29, 31,
                                      37, 41, 43, 47, 53, 59, 61, 67};
    machine *m = emu_machine;
    const uint64_t blocks = (uint64_t)shape.grid_x * shape.grid_y;
    uint64_t prime = emu_random(), at = emu_random() % blocks;
    while (blocks % primes[prime % 16] == 0)
        prime++;
    for (uint64_t i = 0; i < blocks && !m->refused; i++) {
        m->block_x = (int)(at % shape.grid_x);
        m->block_y = (int)(at / shape.grid_x);
        run_block(shape.shared);
        at = (at + primes[prime % 16]) % blocks;
    }
}

int emu_launch(void (*kernel)(const void *), const void *args, const emu_shape &shape,
               emu_report *report)
{
    machine m = {};
    *report = emu_report();
    m.kernel = kernel;
    m.args = args;
    m.report = report;
    m.threads = shape.threads;
    m.grid_x = shape.grid_x;
    m.random = shape.seed * 2 + 1;
    m.truncate = shape.truncate;
    m.driver = shape.driver;
    m.count_bytes = shape.count_bytes;
    m.device = shape.device;
    m.fibers.resize(shape.threads);
    m.warps.resize(shape.threads / WARP);
    emu_machine = &m;
    emu_global_start();
    run_grid(shape);
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

// ---- Who has seen what ----

// Compared as signed numbers, which every CPU does for several at once.
static void raise(uint32_t *to, const uint32_t *from, int n)
{
    for (int i = 0; i < n; i++)
        to[i] = (int32_t)to[i] > (int32_t)from[i] ? to[i] : from[i];
}

// Most often nobody, or all, know the same.
std::shared_ptr<const foreign> emu_merge_foreign(const std::shared_ptr<const foreign> &a,
                                                 const std::shared_ptr<const foreign> &b)
{
    if (!b || a == b)
        return a;
    if (!a)
        return b;
    std::shared_ptr<foreign> both = std::make_shared<foreign>(*a);
    for (const auto &entry : *b) {
        std::vector<uint32_t> &known = (*both)[entry.first];
        known.resize(entry.second.size());
        raise(known.data(), entry.second.data(), (int)known.size());
    }
    return both;
}

void emu_merge(int first, int count)
{
    machine *m = emu_machine;
    const int n = m->threads + 1;
    static std::vector<uint32_t> all;
    std::shared_ptr<const foreign> others;
    all.assign(n, 0);
    for (int t = first; t < first + count; t++) {
        raise(all.data(), emu_knows(t), n);
        all[t] = m->time;
        others = emu_merge_foreign(others, m->fibers[t].others);
    }
    for (int t = first; t < first + count; t++) {
        memcpy(emu_knows(t), all.data(), n * sizeof(all[0]));
        m->fibers[t].others = others;
    }
    m->time++;
}

void emu_tell(std::vector<uint32_t> &to)
{
    machine *m = emu_machine;
    to.resize(m->threads + 1);
    emu_knows(m->current)[m->current] = m->time++;
    raise(to.data(), emu_knows(m->current), m->threads + 1);
}

void emu_learn(const std::vector<uint32_t> &from)
{
    if (!from.empty())
        raise(emu_knows(emu_machine->current), from.data(), emu_machine->threads + 1);
}

} // namespace gpu
