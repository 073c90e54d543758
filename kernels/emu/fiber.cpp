// SPDX-License-Identifier: Apache-2.0
//
// Stacks and switching; see fiber.h. On x86-64 a switch is a dozen instructions; elsewhere it is
// swapcontext, which does the same with two system calls.
#include "kernels/emu/fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define CLEAN(at, bytes) __asan_unpoison_memory_region(at, bytes)
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define CLEAN(at, bytes) __asan_unpoison_memory_region(at, bytes)
#endif
#endif
#ifndef CLEAN
#define CLEAN(at, bytes) (void)(at)
#endif

namespace gpu
{
// All stacks at the same distance from a page would share a few sets of every cache: their tops
// are some lines apart, at COLORS places.
enum { STACK_BYTES = 256 * 1024, COLORS = 61, COLOR_BYTES = 17 * 64 };

// The memory of stack `number`, without marks that a sanitizer left there when it was last used.
static char *memory(size_t number)
{
    static std::vector<char *> all;
    while (all.size() <= number) {
        void *at = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED)
            abort();
        all.push_back((char *)at);
    }
    CLEAN(all[number], STACK_BYTES);
    return all[number];
}

#ifdef __x86_64__
// A stack that is not running has its six preserved registers and where to go on at its top.
extern "C" void kvq_emu_switch(emu_stack **from, emu_stack *to);
__asm__(".text\n"
        ".globl kvq_emu_switch\n"
        ".hidden kvq_emu_switch\n"
        ".type kvq_emu_switch, @function\n"
        "kvq_emu_switch:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    ret\n"
        ".size kvq_emu_switch, . - kvq_emu_switch\n");

emu_stack *emu_stack_start(size_t number, void (*run)())
{
    // `run` finds the stack as after a call: 8 bytes off a multiple of 16.
    const size_t color = number % COLORS * COLOR_BYTES;
    uint64_t *top = (uint64_t *)(memory(number) + STACK_BYTES - color) - 1;
    top[0] = 0;
    *--top = (uint64_t)run;
    for (int i = 0; i < 6; i++)
        *--top = 0;
    return (emu_stack *)top;
}

void emu_stack_switch(emu_stack **from, emu_stack *to)
{
    kvq_emu_switch(from, to);
}
#else
} // namespace gpu

#include <ucontext.h>

namespace gpu
{
static ucontext_t *context(size_t number)
{
    static std::vector<ucontext_t *> all;
    while (all.size() <= number)
        all.push_back(new ucontext_t);
    return all[number];
}

emu_stack *emu_stack_start(size_t number, void (*run)())
{
    ucontext_t *c = context(number + 1);
    getcontext(c);
    c->uc_stack.ss_sp = memory(number);
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = NULL;
    makecontext(c, run, 0);
    return (emu_stack *)c;
}

// Whoever has no stack of ours is the one that launches.
void emu_stack_switch(emu_stack **from, emu_stack *to)
{
    if (!*from)
        *from = (emu_stack *)context(0);
    swapcontext((ucontext_t *)*from, (ucontext_t *)to);
}
#endif
} // namespace gpu
