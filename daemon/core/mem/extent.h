// SPDX-License-Identifier: Apache-2.0
//
// Extents that have no owner: their sizes and numbers, and which one a namespace gets next. For
// pool.c.
//
// The extents of a GPU have one size, since they are made ahead (gpu/extents.h). Those of the host
// grow with who has them: a namespace begins with extents of 2 MiB, and gets larger ones the more
// it has, each size twice the one before, up to the configured one. Extents of passing blocks,
// which are many for a moment only, grow by themselves. So what its last extent leaves is a small
// part of what it has, however little that is; and a full pool is still not many extents, each of
// which costs a descriptor, and a mapping in each client that attends in its own context. Of each
// size but the largest there are at most KVQ__SMALL_EXTENTS.
//
// An extent's number says where clients map it, in units of the smallest size. Each size has
// numbers of its own. So whatever else is taken, an extent that the budget allows has its place,
// and a number that is given again stands for as many bytes as before.
#ifndef KVQ_DAEMON_CORE_MEM_EXTENT_H
#define KVQ_DAEMON_CORE_MEM_EXTENT_H

#include "daemon/core/mem/pool.h"

// What a block is asked for, and by whom (NULL: it does not matter).
struct kvq__wanted {
    uint64_t bytes;
    bool passing;
    struct kvq__grant *grant;
};

// Finds an extent without an owner that holds the block: one that the namespace had before, no
// larger than its next one should be; a fresh one; a larger one that it had before; or one of
// another namespace, which is zeroed, or replaced by a fresh one if clients were told of it. Empty
// extents that are too small go back to the system if a larger one then fits. unseen: for passing
// blocks, which go soon; a fresh extent is better then than one that clients may have mapped.
int kvq__extent_find(struct kvq__core *core, const struct kvq__arena *arena,
                     const struct kvq__wanted *wanted, bool unseen, struct kvq__extent **out);

#endif
