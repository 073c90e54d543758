// SPDX-License-Identifier: Apache-2.0
//
// Device memory of the emulator: which pieces there are, who may do what there, and whether an
// access stays in one.
#ifndef KVQ_KERNELS_EMU_GLOBAL_H
#define KVQ_KERNELS_EMU_GLOBAL_H

#include <stddef.h>
#include <stdint.h>

namespace gpu
{
// Any thread may call these; memory must not go while a launch or a copy uses it, which is its
// owner's business.

// Each piece ends, rounded up to 256 bytes, at a page that cannot be touched; another such page
// stands before it. NULL if the system has no memory left.
void *emu_global_alloc(size_t bytes);
bool emu_global_free(void *at); // false if no piece starts there
size_t emu_global_pieces();     // made by alloc
size_t emu_global_used();

// A piece that somebody else allocated.
struct emu_piece {
    size_t bytes;
    size_t room;       // at least bytes; what follows them is filled here and watched
    uint32_t readable; // one bit for each device that may
    uint32_t writable;
    uint64_t group; // neighbours of one group hold accesses together; 0: this one stands alone
};
void emu_global_add(void *at, const emu_piece &piece); // or changes the one that starts there
bool emu_global_remove(void *at);                      // false if no piece starts there

// Whether [at, at + bytes) lies in one piece, or group, that one of the devices may read or write.
bool emu_global_holds(const void *at, size_t bytes, bool write, uint32_t devices);

// The first piece whose bytes behind its end were overwritten, as text. False if there is none.
bool emu_global_spilled(char *text, size_t n);
} // namespace gpu

#endif
