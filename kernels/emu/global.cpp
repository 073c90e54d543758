// SPDX-License-Identifier: Apache-2.0
//
// Device memory of the emulator; see global.h.
#include "kernels/emu/global.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <map>

namespace gpu
{
enum { PAGE = 4096, ALIGN = 256, CANARY = 0xa5 };

struct piece {
    size_t bytes;  // asked for
    uint8_t *base; // of the mapping
    size_t mapped;
};

static std::map<uintptr_t, piece> pieces;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

void *emu_global_alloc(size_t bytes)
{
    piece p;
    const size_t room = round_up(bytes, ALIGN), inner = round_up(room, PAGE);
    p.bytes = bytes;
    p.mapped = inner + 2 * PAGE;
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
    memset(at + bytes, CANARY, room - bytes);
    pieces[(uintptr_t)at] = p;
    return at;
}

bool emu_global_free(void *at)
{
    const auto found = pieces.find((uintptr_t)at);
    if (found == pieces.end())
        return false;
    munmap(found->second.base, found->second.mapped);
    pieces.erase(found);
    return true;
}

size_t emu_global_pieces()
{
    return pieces.size();
}

size_t emu_global_used()
{
    size_t sum = 0;
    for (const auto &p : pieces)
        sum += p.second.bytes;
    return sum;
}

bool emu_global_holds(const void *at, size_t bytes)
{
    auto found = pieces.upper_bound((uintptr_t)at);
    if (found == pieces.begin())
        return false;
    --found;
    const size_t offset = (uintptr_t)at - found->first;
    return offset <= found->second.bytes && bytes <= found->second.bytes - offset;
}

bool emu_global_spilled(char *text, size_t n)
{
    for (const auto &p : pieces) {
        const uint8_t *at = (const uint8_t *)p.first;
        for (size_t i = p.second.bytes; i < round_up(p.second.bytes, ALIGN); i++) {
            if (at[i] == CANARY)
                continue;
            snprintf(text, n, "device memory written %zu bytes behind the end of a piece of %zu",
                     i - p.second.bytes, p.second.bytes);
            return true;
        }
    }
    return false;
}
} // namespace gpu
