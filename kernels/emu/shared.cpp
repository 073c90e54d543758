// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the emulated block: contents, who touched which word and whether later ones
// have seen it, and the bank conflicts of loads.
#include <string.h>

#include "kernels/emu/machine.h"

namespace gpu
{
enum { BANKS = 32, WORD = 4 };

enum word_state { UNWRITTEN, WRITTEN, FLYING, BARRIER }; // FLYING: a copy is bringing it

// Readers of a word that have not seen each other: a few, or the times of all by thread.
struct readers {
    enum { FEW = 8 };
    int n;
    touch few[FEW];
    uint32_t *times; // NULL: few are enough
};

struct word {
    touch writer;
    touch reader;  // the last one since the last write
    readers *many; // NULL: the last one has seen those before
    enum word_state state;
};

static std::vector<uint8_t> bytes;
static std::vector<word> words;
static std::vector<uint32_t> loads;

// ---- Several readers of a word ----

static std::vector<uint32_t *> spare_times;
static std::vector<readers *> spare;
static int spare_threads;

template <typename T> static T *take_spare(std::vector<T *> &from)
{
    if (from.empty())
        return NULL;
    T *one = from.back();
    from.pop_back();
    return one;
}

static uint32_t *take_times()
{
    uint32_t *times = take_spare(spare_times);
    if (!times)
        times = new uint32_t[emu_machine->threads];
    memset(times, 0, emu_machine->threads * sizeof(times[0]));
    return times;
}

static void add_reader(readers *r, const touch &t)
{
    int i = 0;
    if (!r->times) {
        while (i < r->n && r->few[i].thread != t.thread)
            i++;
        if (i < readers::FEW) {
            r->few[i] = t;
            r->n += i == r->n;
            return;
        }
        r->times = take_times();
        for (const touch &one : r->few)
            r->times[one.thread] = one.time;
    }
    r->times[t.thread] = t.time;
}

static void leave_readers(word &w)
{
    if (w.many && w.many->times)
        spare_times.push_back(w.many->times);
    if (w.many)
        spare.push_back(w.many);
    w.many = NULL;
}

void emu_shared_reset(uint32_t size)
{
    const touch nobody = {0, -1, 0};
    const word fresh = {nobody, nobody, NULL, UNWRITTEN};
    for (word &w : words)
        leave_readers(w);
    if (spare_threads != emu_machine->threads) {
        for (const uint32_t *times : spare_times)
            delete[] times;
        spare_times.clear();
        spare_threads = emu_machine->threads;
    }
    bytes.assign(size, 0xff); // NaN as fp16 and as fp32
    words.assign(size / WORD, fresh);
    loads.assign(emu_machine->count_bytes ? size : 0, 0);
}

const uint32_t *emu_byte_loads()
{
    return loads.data();
}

static void refuse_race(const touch &before, const touch &now, smem at)
{
    char who[32];
    const place &first = emu_place(before.at), &second = emu_place(now.at);
    snprintf(who, sizeof(who), "thread %d", before.thread);
    emu_refuse("race on shared byte %u: %s in %s at %s:%d and thread %d in %s at %s:%d without a "
               "sync between",
               at, before.thread == emu_machine->threads ? "a bulk copy" : who, first.what,
               first.file, first.line, now.thread, second.what, second.file, second.line);
}

static void check_range(smem at, uint32_t size, uint32_t align, site here)
{
    const place &p = emu_place(here);
    if (at % align != 0 || at > bytes.size() || size > bytes.size() - at)
        emu_refuse("%s of %u shared bytes at %u by thread %d at %s:%d: the block has %zu, and the "
                   "address must be a multiple of %u",
                   p.what, size, at, thread(), p.file, p.line, bytes.size(), align);
}

// ---- Bank conflicts ----

// Passes that the lanes of `mask` need: the most different words that one bank must give.
static int passes_of(const warp_load &l, uint32_t mask)
{
    uint32_t wanted[BANKS][WARP];
    int count[BANKS] = {0}, most = 0;
    for (; mask; mask &= mask - 1) {
        const uint32_t first = l.from[__builtin_ctz(mask)] / WORD;
        for (uint32_t w = first; w < first + (l.bytes + WORD - 1) / WORD; w++) {
            const uint32_t bank = w % BANKS;
            int i = 0;
            while (i < count[bank] && wanted[bank][i] != w)
                i++;
            wanted[bank][i] = w;
            count[bank] += i == count[bank];
            most = count[bank] > most ? count[bank] : most;
        }
    }
    return most;
}

static void count_load(const warp_load &l)
{
    emu_report *r = emu_machine->report;
    const int parts = l.bytes > WORD ? (int)l.bytes / WORD : 1, lanes = WARP / parts;
    int passes = 0, least = 0;
    for (int part = 0; part < parts; part++) {
        const uint32_t mask = (lanes == WARP ? ~0u : (1u << lanes) - 1) << part * lanes;
        passes += passes_of(l, l.lanes & mask);
        least += (l.lanes & mask) != 0;
    }
    r->loads++;
    r->passes += passes;
    r->least += least;
    r->uneven += l.lanes != ~0u;
    if (passes > least && !r->conflict[0])
        snprintf(r->conflict, sizeof(r->conflict), "%s:%d: %d passes instead of %d",
                 emu_place(l.at).file, emu_place(l.at).line, passes, least);
}

// Loads of all lanes at the same line are one instruction, each lane's n-th there the n-th.
static void note_load(smem at, uint32_t size, site here)
{
    fiber &f = emu_self();
    warp_state &w = emu_machine->warps[warp()];
    const uint32_t own = 1u << lane();
    while (f.loads < w.loads.size() &&
           (w.loads[f.loads].at != here || w.loads[f.loads].bytes != size ||
            w.loads[f.loads].lanes & own))
        f.loads++;
    if (f.loads == w.loads.size()) {
        w.loads.emplace_back();
        warp_load &fresh = w.loads.back();
        fresh.at = here;
        fresh.bytes = size;
        fresh.lanes = 0;
    }
    warp_load &l = w.loads[f.loads++];
    l.from[lane()] = at;
    l.lanes |= own;
}

void emu_loads_end(warp_state &w)
{
    for (const warp_load &l : w.loads)
        count_load(l);
    w.loads.clear();
}

void emu_shared_end()
{
    for (warp_state &w : emu_machine->warps)
        emu_loads_end(w);
}

// ---- Accesses ----

static void refuse_load(const word &w, smem at, site here)
{
    const place &p = emu_place(here), &writer = emu_place(w.writer.at);
    switch (w.state) {
    case FLYING:
        emu_refuse("load of shared byte %u by thread %d at %s:%d while the copy started at %s:%d "
                   "is under way",
                   at, thread(), p.file, p.line, writer.file, writer.line);
        break;
    case BARRIER:
        emu_refuse("load of shared byte %u by thread %d at %s:%d, where a barrier stands", at,
                   thread(), p.file, p.line);
        break;
    default:
        emu_refuse("load of shared byte %u by thread %d at %s:%d, which nothing wrote", at,
                   thread(), p.file, p.line);
    }
}

// Notes that this thread reads the word.
static void note_reader(word &w, const touch &now)
{
    if (!w.many && !emu_ordered(w.reader)) {
        w.many = take_spare(spare);
        if (!w.many)
            w.many = new readers;
        w.many->n = 0;
        w.many->times = NULL;
        add_reader(w.many, w.reader);
    }
    if (w.many)
        add_reader(w.many, now);
    w.reader = now;
}

void emu_load(void *to, smem at, uint32_t size, const char *file, int line)
{
    const touch now = emu_now(emu_site({"a load", file, line}));
    check_range(at, size, size, now.at);
    for (uint32_t i = at / WORD; i <= (at + size - 1) / WORD; i++) {
        word &w = words[i];
        if (w.state != WRITTEN)
            refuse_load(w, WORD * i, now.at);
        if (!emu_ordered(w.writer))
            refuse_race(w.writer, now, WORD * i);
        note_reader(w, now);
    }
    if (emu_machine->count_bytes)
        for (uint32_t i = at; i < at + size; i++)
            loads[i]++;
    note_load(at, size, now.at);
    memcpy(to, bytes.data() + at, size);
}

// Some reader whom this thread has not seen; -1 if there is none. Of many, that there is none is
// found for several threads at once.
static int unseen_reader(const readers &r, const touch &now)
{
    const int32_t *known = (const int32_t *)emu_knows(now.thread);
    if (!r.times) {
        for (int i = 0; i < r.n; i++)
            if ((int32_t)r.few[i].time > known[r.few[i].thread] && r.few[i].thread != now.thread)
                return r.few[i].thread;
        return -1;
    }
    const int32_t *times = (const int32_t *)r.times;
    int unseen = 0, t = 0;
    r.times[now.thread] = 0;
    for (int i = 0; i < emu_machine->threads; i++)
        unseen |= times[i] > known[i];
    while (unseen && times[t] <= known[t])
        t++;
    return unseen ? t : -1;
}

static void refuse_barrier(smem at, const touch &now)
{
    const place &p = emu_place(now.at);
    emu_refuse("%s of shared byte %u by thread %d at %s:%d, where a barrier stands", p.what, at,
               now.thread, p.file, p.line);
}

// Takes words over for writing, after everybody who touched them.
static void take(smem at, uint32_t size, const touch &now, enum word_state state)
{
    for (uint32_t i = at / WORD; i <= (at + size - 1) / WORD; i++) {
        word &w = words[i];
        if (w.state == BARRIER)
            refuse_barrier(WORD * i, now);
        if (w.state == FLYING || !emu_ordered(w.writer))
            refuse_race(w.writer, now, WORD * i);
        if (w.many) {
            w.reader.thread = (int16_t)unseen_reader(*w.many, now);
            if (w.reader.thread >= 0)
                refuse_race(w.reader, now, WORD * i);
            leave_readers(w);
        } else if (!emu_ordered(w.reader)) {
            refuse_race(w.reader, now, WORD * i);
        }
        w.reader.thread = -1;
        w.writer = now;
        w.state = state;
    }
}

void emu_store(smem at, const void *from, uint32_t size, const char *file, int line)
{
    const site p = emu_site({"a store", file, line});
    check_range(at, size, size, p);
    take(at, size, emu_now(p), WRITTEN);
    memcpy(bytes.data() + at, from, size);
}

void emu_copy_start(smem to, uint32_t size, site p)
{
    check_range(to, size, 16, p);
    take(to, size, emu_now(p), FLYING);
}

void emu_copy_land(const copy &c, int by)
{
    const touch now = {emu_machine->time, (int16_t)by, c.at};
    for (uint32_t i = c.to / WORD; i < (c.to + c.bytes) / WORD; i++) {
        words[i].writer = now;
        words[i].state = WRITTEN;
    }
    memcpy(bytes.data() + c.to, c.from, c.bytes);
}

void emu_barrier_take(smem at, site p)
{
    check_range(at, 8, 8, p);
    take(at, 8, emu_now(p), BARRIER);
}
} // namespace gpu
