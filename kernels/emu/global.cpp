// SPDX-License-Identifier: Apache-2.0
//
// Device memory of the emulator: its pieces, see global.h, and what kernels do there.
#include "kernels/emu/global.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "kernels/emu/machine.h"

namespace gpu
{
enum { PAGE = 4096, ALIGN = 256, CANARY = 0xa5 };

struct piece : emu_piece {
    uint8_t *base; // of the mapping; NULL if it is not ours
    size_t mapped;
};

typedef std::map<uintptr_t, piece> piece_map;
static piece_map pieces;
static std::mutex pieces_lock;

typedef std::lock_guard<std::mutex> guard;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

// With pieces_lock held.
static void add(void *at, const piece &p)
{
    memset((uint8_t *)at + p.bytes, CANARY, p.room - p.bytes);
    pieces[(uintptr_t)at] = p;
}

void *emu_global_alloc(size_t bytes)
{
    guard g(pieces_lock);
    const size_t room = round_up(bytes, ALIGN), inner = round_up(room, PAGE);
    piece p = {{bytes, room, ~0u, ~0u, 0}, NULL, inner + 2 * PAGE};
    void *base =
        mmap(NULL, p.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    p.base = (uint8_t *)base;
    if (mprotect(p.base + PAGE, inner, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, p.mapped);
        return NULL;
    }
    uint8_t *at = p.base + PAGE + inner - room;
    memset(at, 0xff, bytes); // NaN as fp16 and as fp32
    add(at, p);
    return at;
}

bool emu_global_free(void *at)
{
    guard g(pieces_lock);
    const auto found = pieces.find((uintptr_t)at);
    if (found == pieces.end() || !found->second.base)
        return false;
    munmap(found->second.base, found->second.mapped);
    pieces.erase(found);
    return true;
}

void emu_global_add(void *at, const emu_piece &what)
{
    guard g(pieces_lock);
    add(at, piece{what, NULL, 0});
}

bool emu_global_remove(void *at)
{
    guard g(pieces_lock);
    return pieces.erase((uintptr_t)at) > 0;
}

size_t emu_global_pieces()
{
    guard g(pieces_lock);
    size_t n = 0;
    for (const auto &p : pieces)
        n += p.second.base != NULL;
    return n;
}

size_t emu_global_used()
{
    guard g(pieces_lock);
    size_t sum = 0;
    for (const auto &p : pieces)
        sum += p.second.base ? p.second.bytes : 0;
    return sum;
}

static bool holds(const piece_map &map, const void *from, size_t bytes, bool write,
                  uint32_t devices)
{
    uintptr_t at = (uintptr_t)from;
    auto found = map.upper_bound(at);
    if (found == map.begin())
        return false;
    --found;
    for (;;) {
        const piece &p = found->second;
        const size_t offset = at - found->first;
        if (!((write ? p.writable : p.readable) & devices) || offset > p.bytes)
            return false;
        if (bytes <= p.bytes - offset)
            return true;
        bytes -= p.bytes - offset;
        at = found->first + p.bytes;
        if (++found == map.end() || found->first != at || p.group == 0 ||
            found->second.group != p.group)
            return false;
    }
}

bool emu_global_holds(const void *at, size_t bytes, bool write, uint32_t devices)
{
    guard g(pieces_lock);
    return holds(pieces, at, bytes, write, devices);
}

bool emu_global_spilled(char *text, size_t n)
{
    guard g(pieces_lock);
    for (const auto &p : pieces) {
        const uint8_t *at = (const uint8_t *)p.first;
        for (size_t i = p.second.bytes; i < p.second.room; i++) {
            if (at[i] == CANARY)
                continue;
            snprintf(text, n, "device memory written %zu bytes behind the end of a piece of %zu",
                     i - p.second.bytes, p.second.bytes);
            return true;
        }
    }
    return false;
}

// The pieces as they were when the launch began: other threads may allocate meanwhile.
static piece_map launched;

// ---- Who wrote what in this launch ----
//
// Blocks run one after the other, and yet only a release and an acquire of the same word let one
// see what another wrote. Reads are not noted: that a block overwrites what another still reads
// goes unseen.

enum { UNIT = 2 }; // bytes

struct written {
    uintptr_t unit; // address / UNIT; 0: free
    int block;
    bool counted; // by a counter's word
    touch by;
};

static std::vector<written> table; // open addressing; a power of two long
static size_t in_table;

// A bit for each 64 bytes, by a few bits of the address: most loads are of what nobody writes.
enum { LINE = 64, LINES = 1 << 16 };
static uint64_t lines[LINES / 64];

static size_t line_of(uintptr_t unit)
{
    return unit / (LINE / UNIT) % LINES;
}

static bool may_be_written(uintptr_t unit)
{
    return lines[line_of(unit) / 64] >> line_of(unit) % 64 & 1;
}

struct counter {
    std::shared_ptr<const foreign> told; // by those who were here
};
static std::map<uintptr_t, counter> counters;

void emu_global_start()
{
    if (in_table > 0 || table.empty())
        table.assign(1024, written());
    in_table = 0;
    memset(lines, 0, sizeof(lines));
    counters.clear();
    guard g(pieces_lock);
    launched = pieces;
}

static written &slot_of(uintptr_t unit)
{
    size_t i = (size_t)(unit * 0x9e3779b97f4a7c15ull >> 32) & (table.size() - 1);
    while (table[i].unit != 0 && table[i].unit != unit)
        i = (i + 1) & (table.size() - 1);
    return table[i];
}

static void grow()
{
    std::vector<written> old(2 * table.size());
    old.swap(table);
    for (const written &w : old)
        if (w.unit)
            slot_of(w.unit) = w;
}

// Whether this thread has seen what that one did.
static bool seen(const written &w)
{
    if (w.block == emu_block())
        return emu_ordered(w.by);
    const std::shared_ptr<const foreign> &others = emu_self().others;
    if (!others)
        return false;
    const auto found = others->find(w.block);
    return found != others->end() && found->second[w.by.thread] >= w.by.time;
}

static void check_seen(uintptr_t unit, site here, bool counting)
{
    const written &w = slot_of(unit);
    if (w.unit == 0 || (counting && w.counted) || seen(w))
        return;
    const place &p = emu_place(here), &by = emu_place(w.by.at);
    emu_refuse("race on device memory: block %d, thread %d in %s at %s:%d and block %d, thread %d "
               "in %s at %s:%d, which has not seen it",
               w.block, w.by.thread, by.what, by.file, by.line, emu_block(), thread(), p.what,
               p.file, p.line);
}

static void check_place(const void *at, uint32_t bytes, bool write, site here)
{
    const place &p = emu_place(here);
    const uint32_t align = bytes < 16 ? bytes : 16, device = 1u << emu_machine->device;
    if ((uintptr_t)at % align != 0)
        emu_refuse("%s at %p by block %d, thread %d at %s:%d: the address must be a multiple of %u",
                   p.what, at, emu_block(), thread(), p.file, p.line, align);
    if (emu_machine->driver && !holds(launched, at, bytes, write, device))
        emu_refuse("%s of %u bytes at %p by block %d, thread %d at %s:%d: no piece of device "
                   "memory %s",
                   p.what, bytes, at, emu_block(), thread(), p.file, p.line,
                   holds(launched, at, bytes, false, ~0u) ? "that this device may so use has them"
                                                          : "has them all");
}

void emu_global_check(const void *from, uint32_t bytes, site p)
{
    check_place(from, bytes, false, p);
    if (in_table == 0)
        return;
    for (uintptr_t u = (uintptr_t)from / UNIT; u <= ((uintptr_t)from + bytes - 1) / UNIT; u++)
        if (may_be_written(u))
            check_seen(u, p, false);
}

static void note_write(const void *at, uint32_t bytes, site p, bool counting)
{
    check_place(at, bytes, true, p);
    for (uintptr_t u = (uintptr_t)at / UNIT; u <= ((uintptr_t)at + bytes - 1) / UNIT; u++) {
        check_seen(u, p, counting);
        written &w = slot_of(u);
        in_table += w.unit == 0;
        lines[line_of(u) / 64] |= 1ull << line_of(u) % 64;
        w = {u, emu_block(), counting, emu_now(p)};
        if (in_table > table.size() / 2)
            grow();
    }
}

void emu_global_load(void *to, const void *from, uint32_t bytes, const char *file, int line)
{
    emu_global_check(from, bytes, emu_site({"a load", file, line}));
    memcpy(to, from, bytes);
}

void emu_global_store(void *at, const void *from, uint32_t bytes, const char *file, int line)
{
    note_write(at, bytes, emu_site({"a store", file, line}), false);
    memcpy(at, from, bytes);
}

// ---- Counters ----

static void acquire(const void *at)
{
    const std::shared_ptr<const foreign> &told = counters[(uintptr_t)at].told;
    if (!told)
        return;
    const auto own = told->find(emu_block());
    if (own != told->end())
        emu_learn(own->second);
    emu_self().others = emu_merge_foreign(emu_self().others, told);
}

static void release(const void *at)
{
    counter &c = counters[(uintptr_t)at];
    std::shared_ptr<foreign> own = std::make_shared<foreign>();
    emu_tell((*own)[emu_block()]);
    c.told = emu_merge_foreign(emu_merge_foreign(c.told, emu_self().others), own);
}

// Nothing comes between reading and writing, since fibers take turns only where they say so.
template <typename Change> static uint32_t count(uint32_t *at, Change change, site p)
{
    note_write(at, sizeof(*at), p, true);
    const uint32_t before = *at;
    *at = change(before);
    return before;
}

uint32_t fetch_count(uint32_t *at, uint32_t x, const char *file, int line)
{
    acquire(at);
    const uint32_t before = count(
        at, [=](uint32_t was) { return was + x; }, emu_site({"fetch_count", file, line}));
    release(at);
    return before;
}

uint32_t fetch_add(uint32_t *at, uint32_t x, const char *file, int line)
{
    return count(
        at, [=](uint32_t before) { return before + x; }, emu_site({"fetch_add", file, line}));
}

uint32_t fetch_max(uint32_t *at, uint32_t x, const char *file, int line)
{
    return count(
        at, [=](uint32_t before) { return before > x ? before : x; },
        emu_site({"fetch_max", file, line}));
}

uint32_t load_acquire(const uint32_t *at, const char *file, int line)
{
    acquire(at);
    return count((uint32_t *)at, [](uint32_t x) { return x; },
                 emu_site({"load_acquire", file, line}));
}

void store_release(uint32_t *at, uint32_t x, const char *file, int line)
{
    count(
        at, [=](uint32_t) { return x; }, emu_site({"store_release", file, line}));
    release(at);
}
} // namespace gpu
