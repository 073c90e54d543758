// SPDX-License-Identifier: Apache-2.0
//
// The state of the emulated machine, shared by the files of this folder: one block at a time.
//
// Who has seen what: `time` grows with every synchronization. A touch of memory is a thread and a
// time; thread t may follow it if knows(t, thread) has reached that time. Synchronizing merges
// what threads know. One more "thread", number `threads`, stands for bulk copies.
#ifndef KVQ_KERNELS_EMU_MACHINE_H
#define KVQ_KERNELS_EMU_MACHINE_H

#include <stdarg.h>
#include <stdio.h>

#include <map>
#include <memory>
#include <vector>

#include "kernels/emu/emu.h"
#include "kernels/emu/fiber.h"

namespace gpu
{
struct place {
    const char *what, *file;
    int line;
};

// The number of a place: each word of shared memory remembers two.
typedef uint16_t site;

struct touch {
    uint32_t time;
    int16_t thread; // -1: nobody
    site at;
};

// An asynchronous copy that has been started and has not landed.
struct copy {
    smem to;
    const void *from;
    uint32_t bytes;
    uint64_t batch; // of the thread; bulk copies have none
    smem barrier;   // of a bulk copy
    site at;
};

enum fiber_state { READY, AT_WARP, AT_BLOCK, AT_BARRIER, ENDED };

// What a thread has learned of other blocks, by block: what it knows of each of their threads.
typedef std::map<int, std::vector<uint32_t>> foreign;

struct fiber {
    emu_stack *stack;
    enum fiber_state state;
    site at;        // where it waits
    smem barrier;   // that it waits for, or number of the group
    uint32_t phase; // of the barrier
    std::vector<copy> copies;
    uint64_t batch; // number of the batch that copies join
    size_t loads;   // shared loads since the warp last met
    std::shared_ptr<const foreign> others;
};

// One shared load of a warp: what its lanes asked for so far.
struct warp_load {
    site at;
    uint32_t bytes, lanes; // lanes: one bit each
    smem from[WARP];
};

struct warp_state {
    uint32_t in[WARP][10], out[WARP][4];
    int arrived;
    uint32_t ready;               // lanes that can run
    uint32_t next, start, step;   // the order in which they do
    std::vector<warp_load> loads; // since the warp last met
};

struct barrier_state {
    touch maker;
    bool fenced;
    uint32_t count, pending; // threads that arrive in a phase, 0 before it is made; still missing
    int64_t bytes;           // expected and not landed
    uint32_t phase;          // number of the current one
    std::vector<uint32_t> now, past; // what those who arrived knew: in this phase, and before
};

struct machine {
    void (*kernel)(const void *);
    const void *args;
    emu_report *report;
    int threads, grid_x, block_x, block_y, current;
    std::vector<fiber> fibers;
    std::vector<warp_state> warps;
    int ended;
    std::map<int, int> arrived; // at a group's sync, by its number
    std::map<smem, barrier_state> barriers;
    std::vector<copy> flights; // bulk copies
    std::vector<uint32_t> known;
    uint32_t time;
    uint64_t random;
    bool truncate, refused, driver, count_bytes;
    int device;
    emu_stack *launcher;
};

extern machine *emu_machine;

uint64_t emu_random();

static inline fiber &emu_self()
{
    return emu_machine->fibers[emu_machine->current];
}

// The number of the block in its grid.
static inline int emu_block()
{
    return emu_machine->block_y * emu_machine->grid_x + emu_machine->block_x;
}

// ---- Places by number ----

enum { SITES_AT_HAND = 1024 };

struct known_site {
    place at;
    site number;
};
extern known_site emu_sites[SITES_AT_HAND]; // those met last

site emu_site_new(const place &p);
const place &emu_place(site number);

static inline site emu_site(const place &p)
{
    const size_t i = (size_t)p.file / 8 + (size_t)p.what + (size_t)p.line;
    const known_site &s = emu_sites[i % SITES_AT_HAND];
    if (s.at.line == p.line && s.at.file == p.file && s.at.what == p.what)
        return s.number;
    return emu_site_new(p);
}

// Ends the launch with this text. Called by a fiber, it does not return.
void emu_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Lets others run; returns when this fiber is READY again and its turn comes.
void emu_yield();
void emu_wake(int thread);
void emu_new_order(warp_state &w); // of the lanes that run next
static inline void emu_sleep(enum fiber_state why, site at)
{
    emu_self().state = why;
    emu_self().at = at;
    emu_machine->warps[emu_machine->current / WARP].ready &= ~(1u << emu_machine->current % WARP);
}

// Refuses if the threads do not all stand at the same call. `each` is how many apart they are.
void emu_check_together(int first, int count);

// ---- Who has seen what ----

static inline uint32_t *emu_knows(int thread)
{
    return &emu_machine->known[(size_t)thread * (emu_machine->threads + 1)];
}

static inline bool emu_ordered(const touch &t)
{
    return t.thread < 0 || t.thread == emu_machine->current ||
           emu_knows(emu_machine->current)[t.thread] >= t.time;
}

static inline touch emu_now(site at)
{
    const touch t = {emu_machine->time, (int16_t)emu_machine->current, at};
    return t;
}

void emu_merge(int first, int count);              // all of these threads know the same now
void emu_tell(std::vector<uint32_t> &to);          // adds what this thread knows
void emu_learn(const std::vector<uint32_t> &from); // and the other way round
// What threads know of other blocks, together.
std::shared_ptr<const foreign> emu_merge_foreign(const std::shared_ptr<const foreign> &a,
                                                 const std::shared_ptr<const foreign> &b);

// ---- Shared memory ----

void emu_shared_reset(uint32_t bytes); // before a block
void emu_shared_end();                 // after it: what remains to be counted
void emu_loads_end(warp_state &w);     // the warp meets: loads that not all lanes made
void emu_copy_start(smem to, uint32_t bytes, site at);
void emu_copy_land(const copy &c, int thread);
void emu_barrier_take(smem at, site here); // the words become a barrier

// ---- Asynchronous copies and barriers ----

bool emu_flights_land(); // one of them; false if there is none
void emu_flights_end();  // the block ends

// ---- Device memory ----

void emu_global_start(); // before a launch
void emu_global_check(const void *from, uint32_t bytes, site at);
} // namespace gpu

#endif
