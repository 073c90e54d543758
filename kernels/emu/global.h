// SPDX-License-Identifier: Apache-2.0
//
// Device memory of the emulator: which pieces there are, and whether an access stays in one.
#ifndef KVQ_KERNELS_EMU_GLOBAL_H
#define KVQ_KERNELS_EMU_GLOBAL_H

#include <stddef.h>
#include <stdint.h>

namespace gpu
{
// Each piece ends, rounded up to 256 bytes, at a page that cannot be touched; another such page
// stands before it. NULL if the system has no memory left.
void *emu_global_alloc(size_t bytes);
bool emu_global_free(void *at); // false if no piece starts there
size_t emu_global_pieces();
size_t emu_global_used();

// Whether [at, at + bytes) lies in one piece.
bool emu_global_holds(const void *at, size_t bytes);

// The first piece whose bytes behind its end were overwritten, as text. False if there is none.
bool emu_global_spilled(char *text, size_t n);
} // namespace gpu

#endif
