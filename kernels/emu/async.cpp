// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous copies, and the barriers in shared memory that bulk copies tell when they land.
#include <algorithm>

#include "kernels/emu/machine.h"

namespace gpu
{
static site here(const char *what, const char *file, int line)
{
    return emu_site({what, file, line});
}

// ---- Copies of 16 bytes: they land when their thread waits ----

void copy16(smem to, const void *from, bool wanted, const char *file, int line)
{
    if (!wanted)
        return;
    const copy c = {to, from, 16, emu_self().batch, 0, here("copy16", file, line)};
    emu_global_check(from, 16, c.at);
    emu_copy_start(to, 16, c.at);
    emu_machine->report->brought += 16;
    emu_self().copies.push_back(c);
}

void copy_commit()
{
    emu_self().batch++;
}

void emu_copy_wait(int left)
{
    fiber &f = emu_self();
    const auto due = std::partition(f.copies.begin(), f.copies.end(), [&](const copy &c) {
        return c.batch + (uint64_t)left >= f.batch;
    });
    for (auto i = due; i != f.copies.end(); ++i)
        std::swap(*i, *(due + (ptrdiff_t)(emu_random() % (uint64_t)(f.copies.end() - due))));
    for (auto i = due; i != f.copies.end(); ++i)
        emu_copy_land(*i, emu_machine->current);
    f.copies.erase(due, f.copies.end());
}

// ---- Barriers ----

// The barrier that stands there, which this thread has seen made.
static barrier_state &barrier_at(smem at, site here)
{
    const place &p = emu_place(here);
    barrier_state &b = emu_machine->barriers[at];
    if (b.count == 0)
        emu_refuse("%s on shared byte %u by thread %d at %s:%d: no barrier was made there", p.what,
                   at, thread(), p.file, p.line);
    if (!emu_ordered(b.maker))
        emu_refuse("%s on shared byte %u by thread %d at %s:%d without a sync after the barrier "
                   "was made at %s:%d",
                   p.what, at, thread(), p.file, p.line, emu_place(b.maker.at).file,
                   emu_place(b.maker.at).line);
    if (!b.fenced)
        emu_refuse("%s on shared byte %u by thread %d at %s:%d without a barrier_fence after the "
                   "barrier was made at %s:%d",
                   p.what, at, thread(), p.file, p.line, emu_place(b.maker.at).file,
                   emu_place(b.maker.at).line);
    return b;
}

void barrier_init(smem at, uint32_t count, const char *file, int line)
{
    const site p = here("barrier_init", file, line);
    if (count == 0)
        emu_refuse("barrier_init on shared byte %u by thread %d at %s:%d: nobody would arrive", at,
                   thread(), file, line);
    emu_barrier_take(at, p);
    barrier_state &b = emu_machine->barriers[at];
    b.count = b.pending = count;
    b.maker = emu_now(p);
}

void barrier_fence()
{
    for (auto &b : emu_machine->barriers)
        b.second.fenced |= b.second.maker.thread == thread();
}

// Ends the phase if all have arrived and all bytes are there.
static void barrier_turn(smem at, barrier_state &b)
{
    machine *m = emu_machine;
    if (b.pending > 0 || b.bytes != 0)
        return;
    b.past.swap(b.now);
    b.now.clear();
    b.pending = b.count;
    b.phase++;
    for (int t = 0; t < m->threads; t++)
        if (m->fibers[t].state == AT_BARRIER && m->fibers[t].barrier == at)
            emu_wake(t);
}

static void arrive(smem at, uint32_t bytes, site here)
{
    const place &p = emu_place(here);
    barrier_state &b = barrier_at(at, here);
    if (b.pending == 0)
        emu_refuse("%s on shared byte %u by thread %d at %s:%d: more than %u arrive in one phase",
                   p.what, at, thread(), p.file, p.line, b.count);
    b.pending--;
    b.bytes += bytes;
    emu_tell(b.now);
    barrier_turn(at, b);
}

void barrier_arrive(smem at, const char *file, int line)
{
    arrive(at, 0, here("barrier_arrive", file, line));
}

void barrier_expect(smem at, uint32_t bytes, const char *file, int line)
{
    arrive(at, bytes, here("barrier_expect", file, line));
}

void barrier_wait(smem at, uint32_t parity, const char *file, int line)
{
    const site p = here("barrier_wait", file, line);
    barrier_state *b = &barrier_at(at, p);
    while (b->phase % 2 == parity % 2) {
        emu_self().barrier = at;
        emu_self().phase = b->phase;
        emu_sleep(AT_BARRIER, p);
        emu_yield();
    }
    emu_learn(b->past);
}

// ---- Bulk copies: they land when they like, at the latest when nothing else can happen ----

void copy_bulk(smem to, const void *from, uint32_t bytes, smem barrier, const char *file, int line)
{
    const site p = here("copy_bulk", file, line);
    barrier_at(barrier, p);
    if (bytes == 0 || bytes % 16 != 0 || to % 16 != 0 || (uintptr_t)from % 16 != 0)
        emu_refuse("copy_bulk of %u bytes from %p to shared byte %u by thread %d at %s:%d: all "
                   "three must be multiples of 16",
                   bytes, from, to, thread(), file, line);
    const copy c = {to, from, bytes, 0, barrier, p};
    emu_global_check(from, bytes, p);
    emu_copy_start(to, bytes, p);
    emu_machine->report->brought += bytes;
    emu_machine->flights.push_back(c);
}

bool emu_flights_land()
{
    machine *m = emu_machine;
    if (m->flights.empty())
        return false;
    std::swap(m->flights[emu_random() % m->flights.size()], m->flights.back());
    const copy c = m->flights.back();
    m->flights.pop_back();
    emu_copy_land(c, m->threads);
    barrier_state &b = m->barriers[c.barrier];
    b.now.resize(m->threads + 1);
    b.now[m->threads] = m->time++;
    b.bytes -= c.bytes;
    barrier_turn(c.barrier, b);
    return true;
}

void emu_flights_end()
{
    const machine *m = emu_machine;
    if (m->flights.empty())
        return;
    const copy &c = m->flights[0];
    snprintf(m->report->text, sizeof(m->report->text),
             "block (%d, %d) ended while the copy started at %s:%d was under way", m->block_x,
             m->block_y, emu_place(c.at).file, emu_place(c.at).line);
    emu_machine->refused = true;
}
} // namespace gpu
