// SPDX-License-Identifier: Apache-2.0
//
// What indexes of prefixes have alone: blocks whose one reference is an index's. They are counted
// where references come and go, so that nobody has to walk an index to know whether it could make
// room, or how much it keeps.
#include <assert.h>

#include "daemon/core/state.h"

void kvq__alone_count(const struct kvq__block *b, bool is)
{
    struct kvq__arena *arena = b->extent->owner;
    uint64_t *counts[] = {(uint64_t *)b->index, &arena->index_bytes, &arena->pool->index_bytes};
    assert(kvq__block_is_alone(b) && b->index);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        assert(is || *counts[i] >= b->bytes);
        *counts[i] += is ? b->bytes : -b->bytes;
    }
}

struct kvq__ref kvq__block_index(struct kvq__ref ref, uint64_t *alone)
{
    struct kvq__ref shared = kvq__block_share(ref);
    assert(ref.block->refs > 1 && ref.block->indexes < UINT16_MAX);
    ref.block->indexes++;
    ref.block->index ^= (uintptr_t)alone;
    return shared;
}

void kvq__block_unindex(struct kvq__block *b, uint64_t *alone)
{
    assert(b->refs > 0 && b->indexes > 0 && (b->indexes > 1 || b->index == (uintptr_t)alone));
    if (kvq__block_is_alone(b))
        kvq__alone_count(b, false);
    b->indexes--;
    b->index ^= (uintptr_t)alone;
}
