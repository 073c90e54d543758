// SPDX-License-Identifier: Apache-2.0
//
// Cursors that come back; see cursor.h.
#include "daemon/commands/cursor.h"

#include <assert.h>
#include <stdio.h>

#include "proto/status.h"

static const char *name_of_list(uint32_t list)
{
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field(&kvq__request__descriptor, list);
    return f ? f->name : "no list";
}

int kvq__cursor_check(const Kvq__Cursor *cursor, uint64_t epoch, Kvq__Request__CommandCase list,
                      char *text)
{
    assert(list != KVQ__REQUEST__COMMAND__NOT_SET);
    if (!cursor)
        return 0;
    if (cursor->list != (uint32_t)list) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "the cursor is one of %s (%u), not of %s (%u); begin the list anew, without a "
                 "cursor",
                 name_of_list(cursor->list), cursor->list, name_of_list((uint32_t)list),
                 (uint32_t)list);
        return KVQ_E_INVALID;
    }
    if (cursor->epoch != epoch) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "the cursor is of another run of the daemon (%llx, this is %llx); begin the list "
                 "anew, without a cursor",
                 (unsigned long long)cursor->epoch, (unsigned long long)epoch);
        return KVQ_E_EPOCH;
    }
    return 0;
}

Kvq__Cursor *kvq__cursor_new(struct kvq_arena *arena, uint64_t epoch,
                             Kvq__Request__CommandCase list)
{
    Kvq__Cursor *cursor = kvq_arena_alloc(arena, sizeof *cursor);
    assert(list != KVQ__REQUEST__COMMAND__NOT_SET);
    if (!cursor)
        return NULL;
    kvq__cursor__init(cursor);
    cursor->epoch = epoch;
    cursor->list = (uint32_t)list;
    return cursor;
}
