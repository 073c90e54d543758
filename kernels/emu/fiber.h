// SPDX-License-Identifier: Apache-2.0
//
// Stacks and switching between them: what a thread of the emulated GPU runs on.
#ifndef KVQ_KERNELS_EMU_FIBER_H
#define KVQ_KERNELS_EMU_FIBER_H

#include <stddef.h>

namespace gpu
{
struct emu_stack; // a place to come back to

// A stack on which `run` starts when it is switched to first; `run` must not return. Stacks are
// kept by number and used again: an old one that somebody was still on is simply left.
emu_stack *emu_stack_start(size_t number, void (*run)());

// Notes where we are in *from and goes on at `to`.
void emu_stack_switch(emu_stack **from, emu_stack *to);
} // namespace gpu

#endif
