// SPDX-License-Identifier: Apache-2.0
//
// What indexes of prefixes have alone: blocks whose one reference is an index's. They are counted
// where references come and go, so that nobody has to walk an index to know whether it could make
// room, or how much it keeps.
#include <assert.h>

#include "daemon/core/state.h"

static void count_of_page(struct kvq__alone *a, uint64_t bytes, bool is, uint64_t now)
{
    bool had = a->bytes > 0;
    assert(is || (a->bytes >= bytes && a->of->bytes >= bytes));
    a->bytes += is ? bytes : -bytes;
    a->of->bytes += is ? bytes : -bytes;
    if (!had) {
        a->since = now;
        TAILQ_INSERT_TAIL(&a->of->lists[a->leaf], a, link);
    } else if (a->bytes == 0) {
        TAILQ_REMOVE(&a->of->lists[a->leaf], a, link);
    }
}

void kvq__alone_count(const struct kvq__block *b, bool is)
{
    struct kvq__arena *arena = b->extent->owner;
    uint64_t *counts[] = {&arena->index_bytes, &arena->pool->index_bytes};
    assert(kvq__block_is_alone(b) && b->index && b->bytes > 0);
    count_of_page((struct kvq__alone *)b->index, b->bytes, is, arena->ns->core->now);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        assert(is || *counts[i] >= b->bytes);
        *counts[i] += is ? b->bytes : -b->bytes;
    }
}

void kvq__alone_place(struct kvq__alone *a, bool leaf, bool first)
{
    if (a->bytes > 0)
        TAILQ_REMOVE(&a->of->lists[a->leaf], a, link);
    a->leaf = leaf;
    if (a->bytes > 0 && first)
        TAILQ_INSERT_HEAD(&a->of->lists[leaf], a, link);
    else if (a->bytes > 0)
        TAILQ_INSERT_TAIL(&a->of->lists[leaf], a, link);
}

struct kvq__ref kvq__block_index(struct kvq__ref ref, const struct kvq__alone *alone)
{
    struct kvq__ref shared = kvq__block_share(ref);
    assert(ref.block->refs > 1 && ref.block->indexes < UINT16_MAX);
    ref.block->indexes++;
    ref.block->index ^= (uintptr_t)alone;
    return shared;
}

void kvq__block_unindex(struct kvq__block *b, const struct kvq__alone *alone)
{
    assert(b->refs > 0 && b->indexes > 0 && (b->indexes > 1 || b->index == (uintptr_t)alone));
    if (kvq__block_is_alone(b))
        kvq__alone_count(b, false);
    b->indexes--;
    b->index ^= (uintptr_t)alone;
}
