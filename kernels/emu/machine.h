// SPDX-License-Identifier: Apache-2.0
//
// The state of the emulated machine, shared by emu.cpp and shared.cpp: one block at a time.
#ifndef KVQ_KERNELS_EMU_MACHINE_H
#define KVQ_KERNELS_EMU_MACHINE_H

#include <stdarg.h>
#include <stdio.h>
#include <ucontext.h>

#include <deque>
#include <vector>

#include "kernels/emu/emu.h"

namespace gpu
{
struct place {
    const char *what, *file;
    int line;
};

// A 16-byte asynchronous copy that has been started and has not landed.
struct copy {
    smem to;
    const void *from;
    uint64_t batch;
    place at;
};

enum fiber_state { READY, AT_WARP, AT_BLOCK, ENDED };

struct fiber {
    ucontext_t context;
    std::vector<char> stack;
    enum fiber_state state;
    place at; // where it waits
    std::vector<copy> copies;
    uint64_t batch; // number of the batch that copies join
    uint64_t loads; // shared loads so far
};

// One shared load of a warp: what its lanes asked for so far.
struct warp_load {
    place at;
    uint32_t bytes;
    int lanes;
    smem from[WARP];
};

struct warp_state {
    uint32_t in[WARP][10], out[WARP][4];
    int arrived;
    uint64_t syncs;
    std::deque<warp_load> loads; // that not all lanes have made yet
    uint64_t loads_before;       // number of the first of them
};

struct machine {
    void (*kernel)(const void *);
    const void *args;
    emu_report *report;
    int grid_x, block_x, block_y, current;
    std::vector<fiber> fibers;
    std::vector<warp_state> warps;
    int arrived;    // at a block_sync
    uint64_t syncs; // of the block
    uint64_t random;
    bool truncate;
    bool refused;
    ucontext_t scheduler;
};

extern machine *emu_machine;

uint64_t emu_random();
fiber &emu_self();

// Ends the launch with this text. Called by a fiber, it does not return.
void emu_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

void emu_shared_reset(uint32_t bytes); // before a block
void emu_shared_end();                 // after it: what remains to be counted
void emu_copy_start(smem to, const char *file, int line);
void emu_copy_land(const copy &c);
} // namespace gpu

#endif
