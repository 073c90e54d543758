// SPDX-License-Identifier: Apache-2.0
//
// The software driver, for tests: a library, libkvq-emu.so, with the symbols of NVIDIA's
// libcuda.so.1 that kernels/cuda/driver.h names, and the emulator with our kernels beneath. Opened
// by kvq_gpu_driver_open, it lets whole programs use GPUs that are not there, several processes at
// once: memory and events cross processes as on a GPU, streams run side by side.
//
// docs/emulator.md says what it promises and which variables of the environment steer it. This
// header declares what a test can ask and do in its own process; the library exports these
// functions, so dlsym finds them in driver.library. Any thread may call them at any time after
// driver.init.
#ifndef KVQ_KERNELS_EMU_SOFT_H
#define KVQ_KERNELS_EMU_SOFT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvq_gpu_stream;

// What this process holds now. All are zero when everything was given back.
struct kvq_soft_counts {
    uint64_t allocations;  // of memory_alloc
    uint64_t memories;     // handles of memory_create and memory_import
    uint64_t reservations; // of addresses
    uint64_t mappings;     // of memories at reserved addresses
    uint64_t imports;      // of ipc_memory_open, each counted once however often it was opened
    uint64_t host;         // pieces of host_alloc
    uint64_t registered;   // ranges of host_register
    uint64_t streams;
    uint64_t events; // own and opened ones
    uint64_t graphs; // and those made ready
    uint64_t modules;
    uint64_t contexts; // retained, counted as often as they were
    uint64_t bytes;    // of device memory that this process took, in blocks of 2 MiB
};
void kvq_soft_counts(struct kvq_soft_counts *counts);

// Makes the n-th call from now (1: the next) of a row of KVQ_GPU_CALLS, named as its field, return
// `result` without doing anything; with every_later, all from there on. "kernel" stands for
// kernels that run, not launches: its result comes later and is sticky. n = 0 takes back what was
// asked for this call. 0, or -1 if there is no such call.
int kvq_soft_fail(const char *call, uint64_t n, bool every_later, int result);

// How many calls a thread of this process (gettid) has made that wait for the device or take the
// driver's locks for long: making, mapping, exporting, registering and freeing memory, and waiting
// for a stream, an event or the context. A thread that has to go on makes none of them.
uint64_t kvq_soft_slow(int thread);

// How many calls of a row of KVQ_GPU_CALLS this process has made, those that failed included.
uint64_t kvq_soft_calls(const char *call);

// Bytes that kernels of this process have brought from device memory by asynchronous copies, which
// is how they read blocks.
uint64_t kvq_soft_brought(void);

// What can be changed while a program runs, also from another process: KVQ_EMU_CONTROL names a
// file that starts with this struct and is mapped by driver.init. Plain 32-bit words.
struct kvq_soft_control {
    uint32_t stall; // not 0: streams begin nothing new
    uint32_t fault; // not 0: the sticky error that every call tells from now on
    uint32_t held;  // written by the driver: streams that `stall` holds back now
    uint32_t calls; // written by the driver: of the table, so far; it wraps around
    uint32_t naps;  // written by the driver: how often a seed made somebody sleep; it wraps around
};
struct kvq_soft_control *kvq_soft_control(void); // that of this process, with a file or without

// Holds one stream back, or lets it go on.
void kvq_soft_stall(struct kvq_gpu_stream *stream, bool held);

// Another seed for what comes; 0: nothing is delayed or reordered.
void kvq_soft_seed(uint64_t seed);

// From now on streams have no threads: the calling thread, which alone may call the driver then,
// does their work in steps, in an order and at moments that come from the seed and from nothing
// else: some steps in every call, as many as it takes in calls that wait, and one in each call of
// kvq_soft_step, which returns false if all work waits for something. To be called when no stream
// has work, again for another seed. A call that waits for what no stream is going to do is a fault
// (719), as is one of another thread. Graphs are not launched (801).
void kvq_soft_steps(uint64_t seed);
bool kvq_soft_step(void);

#ifdef __cplusplus
}
#endif

#endif
