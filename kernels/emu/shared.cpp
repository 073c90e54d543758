// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the emulated block: contents, who touched which word since the last sync, and
// the bank conflicts of loads.
#include <string.h>

#include "kernels/emu/machine.h"

namespace gpu
{
enum { BANKS = 32, WORD = 4 };

// When a thread touched a word: ordered before later accesses of others by a sync of its warp
// (for the warp) or of the block.
struct touch {
    int thread; // -1: nobody
    uint64_t warp_syncs, block_syncs;
    place at;
};

struct word {
    bool written, flying; // flying: an asynchronous copy is bringing it
    touch writer;
    touch reader; // the last one
    bool others;  // before it, and not ordered with it, other threads
};

static std::vector<uint8_t> bytes;
static std::vector<word> words;
static std::vector<uint32_t> loads;

void emu_shared_reset(uint32_t size)
{
    const touch nobody = {-1, 0, 0, {NULL, NULL, 0}};
    const word fresh = {false, false, nobody, nobody, false};
    bytes.assign(size, 0xff); // NaN as fp16 and as fp32
    words.assign(size / WORD, fresh);
    loads.assign(size, 0);
    emu_machine->arrived = 0;
    for (warp_state &w : emu_machine->warps) {
        w.arrived = 0;
        w.loads.clear();
        w.loads_before = 0;
    }
    for (fiber &f : emu_machine->fibers) {
        f.copies.clear();
        f.loads = 0;
    }
}

const uint32_t *emu_byte_loads()
{
    return loads.data();
}

static touch touch_now(const char *what, const char *file, int line)
{
    const machine *m = emu_machine;
    const touch t = {m->current, m->warps[m->current / WARP].syncs, m->syncs, {what, file, line}};
    return t;
}

static bool ordered(const touch &before)
{
    const machine *m = emu_machine;
    if (before.thread < 0 || before.thread == m->current || m->syncs > before.block_syncs)
        return true;
    return before.thread / WARP == m->current / WARP &&
           m->warps[m->current / WARP].syncs > before.warp_syncs;
}

// No sync of the toucher's warp or block since.
static bool same_stretch(const touch &before, const touch &now)
{
    return before.block_syncs == now.block_syncs && before.warp_syncs == now.warp_syncs;
}

static void refuse_race(const touch &before, const touch &now, smem at)
{
    emu_refuse("race on shared byte %u: thread %d in %s at %s:%d and thread %d in %s at %s:%d "
               "without a sync between",
               at, before.thread, before.at.what, before.at.file, before.at.line, now.thread,
               now.at.what, now.at.file, now.at.line);
}

static void check_range(smem at, uint32_t size, const touch &now)
{
    if (at % size != 0 || at > bytes.size() || size > bytes.size() - at)
        emu_refuse("%s of %u shared bytes at %u by thread %d at %s:%d: the block has %zu, and the "
                   "address must be a multiple of the size",
                   now.at.what, size, at, now.thread, now.at.file, now.at.line, bytes.size());
}

// ---- Bank conflicts ----

// Passes that `count` lanes from `first` need: the most different words that one bank must give.
static int passes_of(const warp_load &l, int first, int count)
{
    std::vector<uint32_t> wanted[BANKS];
    size_t most = 1;
    for (int i = first; i < first + count; i++) {
        for (uint32_t k = 0; k < l.bytes / WORD; k++) {
            const uint32_t w = l.from[i] / WORD + k;
            std::vector<uint32_t> &bank = wanted[w % BANKS];
            bool there = false;
            for (const uint32_t other : bank)
                there |= other == w;
            if (!there)
                bank.push_back(w);
            most = bank.size() > most ? bank.size() : most;
        }
    }
    return (int)most;
}

static void count_load(const warp_load &l)
{
    emu_report *r = emu_machine->report;
    const int parts = (int)l.bytes / WORD, lanes = WARP / parts;
    int passes = 0;
    for (int part = 0; part < parts; part++)
        passes += passes_of(l, part * lanes, lanes);
    r->loads++;
    r->passes += passes;
    r->least += parts;
    if (passes > parts && !r->conflict[0])
        snprintf(r->conflict, sizeof(r->conflict), "%s:%d: %d passes instead of %d", l.at.file,
                 l.at.line, passes, parts);
}

// The n-th shared load of every lane of a warp is one instruction, if they are at the same line.
static void note_load(smem at, uint32_t size, const place &here)
{
    fiber &f = emu_self();
    warp_state &w = emu_machine->warps[warp()];
    const uint64_t index = f.loads++ - w.loads_before;
    while (w.loads.size() <= index) {
        const warp_load fresh = {here, size, 0, {0}};
        w.loads.push_back(fresh);
    }
    warp_load &l = w.loads[index];
    if (l.at.line != here.line || strcmp(l.at.file, here.file) != 0)
        emu_refuse("divergent shared loads: lanes of warp %d at %s:%d and %s:%d", warp(), l.at.file,
                   l.at.line, here.file, here.line);
    l.from[lane()] = at;
    l.lanes++;
    while (!w.loads.empty() && w.loads.front().lanes == WARP) {
        count_load(w.loads.front());
        w.loads.pop_front();
        w.loads_before++;
    }
}

void emu_shared_end()
{
    for (const warp_state &w : emu_machine->warps)
        emu_machine->report->uneven += w.loads.size();
}

// ---- Accesses ----

void emu_load(void *to, smem at, uint32_t size, const char *file, int line)
{
    const touch now = touch_now("a load", file, line);
    check_range(at, size, now);
    for (uint32_t i = at; i < at + size; i += WORD) {
        word &w = words[i / WORD];
        if (w.flying)
            emu_refuse("load of shared byte %u by thread %d at %s:%d while the copy started at "
                       "%s:%d is under way",
                       i, now.thread, file, line, w.writer.at.file, w.writer.at.line);
        if (!w.written)
            emu_refuse("load of shared byte %u by thread %d at %s:%d, which nothing wrote", i,
                       now.thread, file, line);
        if (!ordered(w.writer))
            refuse_race(w.writer, now, i);
        w.others = !ordered(w.reader) || (w.others && same_stretch(w.reader, now));
        w.reader = now;
    }
    for (uint32_t i = at; i < at + size; i++)
        loads[i]++;
    note_load(at, size, now.at);
    memcpy(to, bytes.data() + at, size);
}

// Takes words over for writing, after everybody who touched them.
static void take(smem at, uint32_t size, const touch &now, bool flying)
{
    check_range(at, size, now);
    for (uint32_t i = at; i < at + size; i += WORD) {
        word &w = words[i / WORD];
        if (!ordered(w.writer) || (w.flying && !flying))
            refuse_race(w.writer, now, i);
        if (!ordered(w.reader) || (w.others && same_stretch(w.reader, now)))
            refuse_race(w.reader, now, i);
        w.writer = now;
        w.flying = flying;
        w.written = !flying;
    }
}

void emu_store(smem at, const void *from, uint32_t size, const char *file, int line)
{
    take(at, size, touch_now("a store", file, line), false);
    memcpy(bytes.data() + at, from, size);
}

void emu_copy_start(smem to, const char *file, int line)
{
    take(to, 16, touch_now("a copy", file, line), true);
}

void emu_copy_land(const copy &c)
{
    const touch now = touch_now("a copy", c.at.file, c.at.line);
    for (uint32_t i = c.to; i < c.to + 16; i += WORD) {
        words[i / WORD].writer = now;
        words[i / WORD].flying = false;
        words[i / WORD].written = true;
    }
    memcpy(bytes.data() + c.to, c.from, 16);
}
} // namespace gpu
