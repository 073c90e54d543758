// SPDX-License-Identifier: Apache-2.0
//
// The copying of moves; see move.h. A piece of a block goes through a slot of pinned memory: a GPU
// or the poller fills it, a GPU or the poller empties it. So a few pieces are always under way, and
// memory of the pool, which the driver does not know, is touched by this process alone.
#include <string.h>

#include "daemon/core/residency/move.h"

enum {
    SLOTS = 16,
    SLOT_BYTES = 256 << 10,
    AT_ONCE = 2, // pieces that the poller itself copies between two looks at the rings
};

enum slot_state { EMPTY, FILLING, FULL, EMPTYING };

struct slot {
    enum slot_state state;
    uint8_t *memory;
    const uint8_t *from;
    uint8_t *to;
    size_t bytes;
    struct kvq__gpu *source, *target;           // NULL: the host
    struct kvq_gpu_event *events[KVQ_MAX_GPUS]; // made when first needed
    bool noted; // the event says when the copy under way has ended; else the whole stream does
};

struct kvq__mover {
    uint8_t *memory; // of all slots
    struct kvq_gpu_stream *streams[KVQ_MAX_GPUS];
    struct slot slots[SLOTS];
};

// ---- Life ----

// A later attempt keeps what an earlier one has made.
static int open_parts(struct kvq__core *core, struct kvq__mover *mover)
{
    const unsigned flags = KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED;
    int result = 0;
    for (uint32_t i = 0; result == 0 && i + 1 < core->n_pools; i++) {
        struct kvq__gpu *gpu = core->pools[i + 1].gpu;
        const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
        void *memory = mover->memory;
        result = kvq__gpu_enter(gpu);
        if (result == 0 && !memory)
            result = d->host_alloc(&memory, (size_t)SLOTS * SLOT_BYTES, flags);
        mover->memory = memory;
        mover->streams[i] = kvq__gpu_stream(gpu, KVQ__GPU_STREAM_COPIES);
        if (result)
            return kvq__gpu_failed(gpu, result, "making what copies sessions");
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        mover->slots[i].memory = mover->memory + (size_t)i * SLOT_BYTES;
    return 0;
}

int kvq__mover_open(struct kvq__core *core)
{
    if (!core->moving.mover)
        core->moving.mover = kvq__allocate(core, sizeof *core->moving.mover);
    return core->moving.mover ? open_parts(core, core->moving.mover) : KVQ_E_NO_MEMORY;
}

void kvq__mover_close(struct kvq__core *core)
{
    struct kvq__mover *mover = core->moving.mover;
    if (!mover)
        return;
    for (uint32_t i = 0; i + 1 < core->n_pools; i++) {
        const struct kvq_gpu_driver *d = kvq__gpu_driver(core->pools[i + 1].gpu);
        kvq__gpu_enter(core->pools[i + 1].gpu);
        for (uint32_t j = 0; j < SLOTS; j++)
            if (mover->slots[j].events[i])
                d->event_destroy(mover->slots[j].events[i]);
    }
    if (mover->memory)
        kvq__gpu_driver(core->pools[1].gpu)->host_free(mover->memory);
    kvq__deallocate(core, mover, sizeof *mover);
    core->moving.mover = NULL;
}

// ---- Pieces ----

// The next piece of the move into an empty slot; false behind the last one.
static bool next_piece(struct kvq__move *move, struct slot *slot)
{
    for (; move->at < move->n; move->at++, move->ref = 0) {
        const struct kvq__moved *m = &move->moved[move->at];
        for (; move->ref < kvq__moved_refs(m); move->ref++, move->offset = 0) {
            const struct kvq__ref *here = kvq__moved_here(m, move->ref);
            uint64_t bytes = here->block ? kvq__moved_bytes(m, move->ref) : 0;
            if (move->offset >= bytes)
                continue;
            size_t left = bytes - move->offset;
            slot->source = m->session->pool->gpu;
            slot->target = move->to->gpu;
            slot->from = here->data + move->offset;
            slot->to = kvq__moved_there(m, move->ref)->data + move->offset;
            slot->bytes = left < SLOT_BYTES ? left : SLOT_BYTES;
            move->offset += slot->bytes;
            return true;
        }
    }
    return false;
}

static int note_end(struct kvq__gpu *gpu, uint32_t i, struct kvq__mover *mover, struct slot *slot)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
    int result = slot->events[i] ? 0 : d->event_create(&slot->events[i], KVQ_GPU_EVENT_UNTIMED);
    return result ? result : d->event_record(slot->events[i], mover->streams[i]);
}

// The slot's memory from the place that it comes from, or to the one that it goes to.
static int enqueue(struct kvq__core *core, struct kvq__gpu *gpu, struct slot *slot, bool fill)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
    uint32_t i = kvq__gpu_index(core, gpu);
    struct kvq_gpu_stream *stream = core->moving.mover->streams[i];
    int result = kvq__gpu_enter(gpu);
    if (result == 0)
        result = fill ? d->copy_out(slot->memory, (uintptr_t)slot->from, slot->bytes, stream)
                      : d->copy_in((uintptr_t)slot->to, slot->memory, slot->bytes, stream);
    if (result)
        return kvq__gpu_failed(gpu, result, "copying a session");
    // From here on the GPU writes to the slot or to the block, with or without an event.
    slot->state = fill ? FILLING : EMPTYING;
    result = note_end(gpu, i, core->moving.mover, slot);
    slot->noted = result == KVQ_GPU_OK;
    if (result && result != KVQ_GPU_OUT_OF_MEMORY)
        return kvq__gpu_failed(gpu, result, "copying a session");
    return 0;
}

// 1 if the GPU is done with the slot.
static int slot_has_ended(struct kvq__core *core, struct kvq__gpu *gpu, const struct slot *slot)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
    uint32_t i = kvq__gpu_index(core, gpu);
    int result = kvq__gpu_enter(gpu);
    if (result == 0)
        result = slot->noted ? d->event_query(slot->events[i])
                             : d->stream_query(core->moving.mover->streams[i]);
    if (result == KVQ_GPU_NOT_READY)
        return 0;
    return result ? kvq__gpu_failed(gpu, result, "copying a session") : 1;
}

struct pump {
    struct kvq__move *move;
    uint32_t own;   // pieces that the poller may yet copy itself
    bool any, over; // something was done; there is no further piece
};

static int fill_slot(struct pump *p, struct slot *slot)
{
    if (p->over || p->own == 0)
        return 0;
    if (!next_piece(p->move, slot)) {
        p->over = true;
        return 0;
    }
    p->any = true;
    if (slot->source)
        return enqueue(p->move->ticket.core, slot->source, slot, true);
    p->own--;
    memcpy(slot->memory, slot->from, slot->bytes);
    slot->state = FULL;
    return 0;
}

static int empty(struct pump *p, struct slot *slot)
{
    if (slot->target)
        return enqueue(p->move->ticket.core, slot->target, slot, false);
    if (p->own == 0)
        return 0;
    p->own--;
    p->any = true;
    memcpy(slot->to, slot->memory, slot->bytes);
    p->move->ticket.moved_bytes += slot->bytes;
    slot->state = EMPTY;
    return 0;
}

// Takes a slot as far as it goes.
static int pump_slot(struct pump *p, struct slot *slot)
{
    struct kvq__core *core = p->move->ticket.core;
    int rc = 0;
    if (slot->state == EMPTYING && (rc = slot_has_ended(core, slot->target, slot)) == 1) {
        p->move->ticket.moved_bytes += slot->bytes;
        slot->state = EMPTY;
        p->any = true;
    }
    if (rc >= 0 && slot->state == EMPTY)
        rc = fill_slot(p, slot);
    if (rc >= 0 && slot->state == FILLING && (rc = slot_has_ended(core, slot->source, slot)) == 1) {
        slot->state = FULL;
        p->any = true;
    }
    if (rc >= 0 && slot->state == FULL)
        rc = empty(p, slot);
    return rc < 0 ? rc : 0;
}

int kvq__mover_copy(struct kvq__move *move, bool *any)
{
    struct kvq__mover *mover = move->ticket.core->moving.mover;
    struct pump p = {.move = move, .own = AT_ONCE};
    bool empty_all = true;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < SLOTS; i++)
        rc = pump_slot(&p, &mover->slots[i]);
    for (uint32_t i = 0; i < SLOTS; i++)
        empty_all &= mover->slots[i].state == EMPTY;
    *any = p.any;
    if (rc)
        return rc;
    return p.over && empty_all ? KVQ__COMPLETE : KVQ__MORE;
}

bool kvq__mover_drained(struct kvq__core *core)
{
    bool drained = true;
    for (uint32_t i = 0; core->moving.mover && i < SLOTS; i++) {
        struct slot *slot = &core->moving.mover->slots[i];
        struct kvq__gpu *gpu = slot->state == FILLING    ? slot->source
                               : slot->state == EMPTYING ? slot->target
                                                         : NULL;
        if (!gpu || slot_has_ended(core, gpu, slot) != 0) // one that has faulted does nothing more
            slot->state = EMPTY;
        drained &= slot->state == EMPTY;
    }
    return drained;
}

void kvq__mover_sync(struct kvq__core *core)
{
    for (uint32_t i = 0; core->moving.mover && i + 1 < core->n_pools; i++)
        if (core->moving.mover->streams[i] && kvq__gpu_enter(core->pools[i + 1].gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(core->pools[i + 1].gpu)->stream_sync(core->moving.mover->streams[i]);
}
