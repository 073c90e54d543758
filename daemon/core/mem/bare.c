// SPDX-License-Identifier: Apache-2.0
//
// Bare extents: their memory is mapped and counted, but not all of its pages have been taken from
// the system. That takes a quarter of a second for each GiB, so a session that is read from disk
// has blocks in bare extents, and the thread that reads takes the pages of each block just before
// its bytes come. Whoever else is given a block there has all pages of the extent taken first.
#include <assert.h>

#include "daemon/core/state.h"

enum { BACK_AGAIN_NS = 100000000 }; // after the system had no pages for an extent

int kvq__extent_memory(const struct kvq__pool *pool, const struct kvq__grant *grant,
                       struct kvq__extent *e)
{
    const struct kvq__memory_ops *ops = &pool->memory;
    assert(!e->bare && !e->memory.base);
    if (ops->take && grant && grant->may_wait)
        return ops->take(ops->context, e->size->bytes, &e->memory);
    if (!ops->reserve || !grant || !grant->bare)
        return ops->acquire(ops->context, e->size->bytes, &e->memory);
    e->bare = true;
    return ops->reserve(ops->context, e->size->bytes, &e->memory);
}

int kvq__extent_back(const struct kvq__core *core, const struct kvq__pool *pool,
                     struct kvq__extent *e, const struct kvq__grant *grant)
{
    if (!e->bare || (grant && grant->bare))
        return 0;
    if (core->now < e->back_after)
        return KVQ_E_NO_MEMORY;
    int rc = pool->memory.back(&e->memory, 0, e->size->bytes);
    e->bare = rc < 0;
    e->back_after = core->now + BACK_AGAIN_NS;
    return rc;
}

int kvq__block_back(const struct kvq__pool *pool, const struct kvq__block *b)
{
    assert(pool->memory.back && b->at + b->bytes <= b->extent->size->bytes);
    return pool->memory.back(&b->extent->memory, b->at, b->bytes);
}
