// SPDX-License-Identifier: Apache-2.0
//
// Saved sessions that are opened with another number of shards than they were saved with.
//
// There is one record per KV head, one after the other in a block or in a strip of a raw block, and
// no record depends on others (kernels/layout.h). So a shard with other KV heads is put together
// from ranges of saved blocks, without a look into them. If shards are layers instead, whole blocks
// get another layer number.
//
// Everything here is a function of its arguments and may run on any thread. Saved shards are
// foreign: they are refused if they do not fit together.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_RESHARD_H
#define KVQ_DAEMON_CORE_RESIDENCY_RESHARD_H

#include <string.h>

#include "daemon/core/residency/saved.h"

// A shard as it was saved.
struct kvq__saved_shard {
    const struct kvq__saved *saved;
    const struct kvq__part *parts; // by layer, page and kind
    uint32_t n_parts;
};

// The shards asked for. n_layers is 0 if the layers were not named: then shards are KV heads.
struct kvq__reshard_as {
    uint32_t shard, shards, n_layers;
};

// n times so many bytes of a source's part, and their place in the part that is made.
struct kvq__range {
    uint32_t source, part, n;
    uint64_t from, to, bytes;
    uint64_t from_step, to_step; // from one time to the next
};

// Whether the range is all of a part of so many bytes, in its order.
static inline bool kvq__range_is_whole(const struct kvq__range *r, uint64_t bytes)
{
    bool together = r->n == 1 || (r->from_step == r->bytes && r->to_step == r->bytes);
    return together && r->n * r->bytes == bytes;
}

// Copies the range out of a part of its source into the part that is made.
static inline void kvq__range_copy(const struct kvq__range *r, const uint8_t *from, uint8_t *to)
{
    for (uint32_t i = 0; i < r->n; i++)
        memcpy(to + r->to + i * r->to_step, from + r->from + i * r->from_step, r->bytes);
}

struct kvq__resharded {
    struct kvq__saved saved; // has layers of its own; ids and spans are those of a source
    struct kvq__part *parts; // id: that of the saved part if it is all of that; else 0
    uint32_t n_parts;
    struct kvq__range *ranges; // of part i: ranges[first[i]] to ranges[first[i + 1] - 1]
    uint32_t *first;
    bool ahead; // some extras know of tokens that are not packed here
};

// Describes shard as->shard of as->shards of what n sources, all the shards that were saved, hold
// together. *out is freed by kvq__resharded_free; it is empty after a failure. The text names the
// session. KVQ_E_EXISTS: so many shards are impossible, and why. KVQ_E_DAMAGED: the sources are no
// shards of one session. KVQ_E_NO_MEMORY.
int kvq__reshard(const struct kvq__saved_shard *sources, uint32_t n,
                 const struct kvq__reshard_as *as, struct kvq__resharded *out, char *text);
void kvq__resharded_free(struct kvq__resharded *r); // accepts zeros

// Poller's thread. Ends the session of that name if it is in memory with another number of shards,
// nobody has it open or works with it, and nothing has changed since the stored save: the stored
// session then comes back with so many shards. Returns whether it did.
bool kvq__reshard_make_way(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                           const struct kvq__saved *stored, uint32_t shards);

// Whether that shard of a session is in memory, with so many shards (0: as many as there are).
bool kvq__session_here(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                       const char *name, uint32_t shard, uint32_t shards);

// Whether any shard of the session is in memory, otherwise than *made is; then *as says how.
bool kvq__reshard_there(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                        const struct kvq__saved *made, struct kvq__reshard_as *as);

#endif
