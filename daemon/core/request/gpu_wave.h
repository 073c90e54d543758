// SPDX-License-Identifier: Apache-2.0
//
// Shared by the files that enqueue waves (gpu_*.c): recipes, copies to the GPU, units to pack.
#ifndef KVQ_DAEMON_CORE_REQUEST_GPU_WAVE_H
#define KVQ_DAEMON_CORE_REQUEST_GPU_WAVE_H

#include "daemon/core/session/work_stream.h"

// The distinct recipes of a wave. They lie in the arena, and at the same offsets on the GPU.
struct kvq__wave {
    struct kvq__queue *queue;
    struct kvq__work_stream *stream;
    const struct kvq_recipe **recipes;
    const struct kvq_format **formats; // of each recipe
    uint32_t n_recipes;
    size_t copied; // bytes of the arena that were copied to the GPU
    char text[KVQ_GPU_TEXT];
};
enum { KVQ__RECIPE_ROOM = sizeof(struct kvq_recipe) + sizeof(struct kvq_book) + 3 * 64 + 32 };

// Takes room for the recipes of the wave's entries. KVQ__WAVE_ROOM and, for each entry,
// KVQ__RECIPE_ROOM are enough.
void kvq__wave_begin(struct kvq__wave *wave, struct kvq__queue *queue);
// As kvq__wave_begin, with room for so many recipes.
void kvq__wave_begin_for(struct kvq__wave *wave, struct kvq__queue *queue, uint32_t recipes);
// The recipe of a layer, in host memory.
const struct kvq_recipe *kvq__wave_recipe(struct kvq__wave *wave, const struct kvq__layer *layer);
// The layer's codebooks as the GPU has them, in host memory; NULL if it has none.
const struct kvq_book *kvq__wave_book(struct kvq__wave *wave, const struct kvq__layer *layer);
// Memory from the arena. There is enough: the wave has asked for its room before.
void *kvq__wave_take(struct kvq__wave *wave, size_t bytes);
// The GPU's address of a place in the arena; NULL for NULL.
const void *kvq__wave_there(const struct kvq__wave *wave, const void *host);
// Copies to the GPU what was written since the last copy.
int kvq__wave_copy(struct kvq__wave *wave);
// Work of cache.h for n entries of an array.
struct kvq_gpu_work kvq__wave_work(const struct kvq__wave *wave, uint32_t n);
// The code for work launched by so many operations at most: `failed` with wave->text filled.
// KVQ_E_SYSTEM if the GPU has faulted, which is for good; KVQ_E_UNSUPPORTED if the GPU only refused
// the launch, which is told and ends the request alone.
int kvq__wave_launched(struct kvq__wave *wave, uint32_t ops, int failed);

// ---- What a wave packs (gpu_pack.c) ----

// One launch (formats that learn or have outliers: a few) for units of any layers and sessions.
void kvq__packs_begin(struct kvq__packs *packs, struct kvq__queue *queue);
// Adds the layer's unpacked units up to `end`, or as far as there is room; returns where it
// stopped. From now on other work streams wait for this one before they read the units. `guard`: as
// in struct kvq_gpu_unit; 0: none. Guarded units are packed only if their STEP commits (`enqueued`
// of struct kvq__layer).
uint64_t kvq__packs_add(struct kvq__packs *packs, struct kvq__session *session, uint32_t layer,
                        uint64_t end, kvq_gpu_ptr guard);
// Bytes of the chunk that adding [first, end) takes, at most.
size_t kvq__packs_room(const struct kvq__layer *layer, uint64_t first, uint64_t end);
// Adds due units of all layers at so many tokens. False if not all were added.
bool kvq__packs_add_all(struct kvq__packs *packs, struct kvq__session *session, uint64_t tokens,
                        kvq_gpu_ptr guard);
// Whether other work has to end before a layer is packed on this work stream: packing on another
// work stream, or readers of the outliers that packing would add to.
bool kvq__packs_must_wait(const struct kvq__session *session, const struct kvq__layer *layer,
                          const struct kvq__work_stream *stream);
// 0, KVQ_E_NO_MEMORY, KVQ_E_UNSUPPORTED, KVQ_E_SYSTEM. The layers are as before.
int kvq__packs_launch(struct kvq__packs *packs);
// Marks the units that were launched without a guard as packed, and frees what their sessions no
// longer need.
void kvq__packs_done(const struct kvq__packs *packs);
// After a launch that failed: its guarded units will not be packed when their STEP commits.
void kvq__packs_refused(const struct kvq__packs *packs);
// Without a request: enqueues packing for the queued sessions on GPUs, on the work streams of their
// writers. Sessions whose work stream has no room, or that must wait for other work, stay queued.
void kvq__pack_on_gpus(struct kvq__core *core);

// ---- Entries ----

// The wave's entries that have not failed.
static inline uint32_t kvq__wave_alive(const struct kvq__queue *q)
{
    uint32_t n = 0;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        n += kvq__entry_alive(q, i);
    return n;
}

static inline bool kvq__wave_has(const struct kvq__queue *q, uint32_t i)
{
    return kvq__entry_alive(q, i) && q->work[i].n_items > 0;
}

// What each pass enqueues for the entries of a wave (gpu_*.c). 0, KVQ_E_NO_MEMORY, KVQ_E_SYSTEM.
int kvq__gpu_store_wave(struct kvq__queue *queue);
int kvq__gpu_pack_wave(struct kvq__queue *queue);
int kvq__gpu_attend_wave(struct kvq__queue *queue);
int kvq__gpu_read_wave(struct kvq__queue *queue);
int kvq__gpu_accept_wave(struct kvq__queue *queue);
int kvq__gpu_fork_wave(struct kvq__queue *queue);
// Whether the partial sums of an entry's attention fit the workspace, if its queries are cut: an
// entry for which they do not is refused.
bool kvq__gpu_attend_fits(const struct kvq__queue *queue, uint32_t i);
// Bytes of the arena that these take for an entry, at most, besides what its prepare took.
size_t kvq__gpu_store_room(const struct kvq__queue *queue, uint32_t i);
size_t kvq__gpu_pack_room(const struct kvq__queue *queue, uint32_t i);
size_t kvq__gpu_attend_room(const struct kvq__queue *queue, uint32_t i);
size_t kvq__gpu_read_room(const struct kvq__queue *queue, uint32_t i);
// Chooses the tokens of an entry that the next wave reads. False: there is no room for any.
bool kvq__gpu_read_prepare(struct kvq__queue *queue, uint32_t i);
// Operations that these take for an entry, at most, besides KVQ__WAVE_OPS.
uint32_t kvq__gpu_attend_ops(const struct kvq__queue *queue, uint32_t i);
uint32_t kvq__gpu_read_ops(const struct kvq__queue *queue, uint32_t i);
size_t kvq__gpu_accept_room(const struct kvq__queue *queue, uint32_t i);
size_t kvq__gpu_fork_room(const struct kvq__queue *queue, uint32_t i);

#endif
