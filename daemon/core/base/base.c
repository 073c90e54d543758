// SPDX-License-Identifier: Apache-2.0
//
// See base.h.
#include "daemon/core/base/base.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/core/state.h"

const char *const kvq__counter_names[KVQ__COUNTERS] = {
#define ROW(name, kind, what) #name,
    KVQ__COUNTER_TABLE(ROW)
#undef ROW
};

enum { LARGE = 128 << 10 }; // from here on memory is mapped, so that only what is used is real

// ---- Bookkeeping memory, where the caller gives none ----

static void *default_allocate(void *context, size_t bytes)
{
    (void)context;
    if (bytes >= LARGE) {
        void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return map == MAP_FAILED ? NULL : map;
    }
    void *memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static void default_deallocate(void *context, void *memory, size_t bytes)
{
    // What comes here with another size than it was taken with is seen by this, mostly.
    assert(bytes < LARGE || (uintptr_t)memory % 4096 == 0);
    (void)context;
    if (bytes >= LARGE && memory)
        munmap(memory, bytes);
    else
        free(memory);
}

void kvq__memory_defaults(struct kvq__memory_ops *memory)
{
    assert(!memory->allocate == !memory->deallocate);
    assert(!memory->reserve == !memory->back && !(memory->reserve && memory->take));
    assert(!memory->take == !memory->want && !memory->take == !memory->made);
    if (!memory->allocate) {
        memory->allocate = default_allocate;
        memory->deallocate = default_deallocate;
    }
}

// ---- For the core's rooms ----

void *kvq__allocate(struct kvq__core *core, size_t bytes)
{
    return core->config.memory.allocate(core->config.memory.context, bytes ? bytes : 1);
}

void kvq__deallocate(struct kvq__core *core, void *memory, size_t bytes)
{
    if (memory)
        core->config.memory.deallocate(core->config.memory.context, memory, bytes ? bytes : 1);
}

int kvq__fail(char *text, int code, const char *format, ...)
{
    assert(code < 0);
    va_list args;
    va_start(args, format);
    if (text)
        vsnprintf(text, KVQ_TEXT_BYTES, format, args);
    va_end(args);
    return code;
}

void kvq__event(struct kvq__core *core, enum kvq__event_kind kind, const char *ns,
                const char *session, uint64_t client, const char *text)
{
    struct kvq__event event = {kind, ns, session, client, text};
    assert(kind < KVQ__EVENTS && ns && session && text);
    if (core->config.event)
        core->config.event(core->config.context, &event);
}
