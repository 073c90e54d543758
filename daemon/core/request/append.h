// SPDX-License-Identifier: Apache-2.0
//
// Storing K and V: its checks, and the parts that STEP and APPEND share (append.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_APPEND_H
#define KVQ_DAEMON_CORE_REQUEST_APPEND_H

#include "daemon/core/state.h"

// Checks for storing: of the request as a whole, and of an entry that kvq__entry_open_at has
// opened; then the hold on the entry's session.
int kvq__append_open(struct kvq__queue *q);
int kvq__append_check(struct kvq__queue *q, uint32_t i);
// An entry's append was refused. If the session has no such layer of its own the step is spoiled;
// else the client can append the layer again.
void kvq__append_refused(struct kvq__queue *q, uint32_t i);
void kvq__append_hold(struct kvq__queue *q, uint32_t i);
// The request ends and the entry has failed: if its layer was not stored, it can be appended again.
void kvq__append_failed(struct kvq__queue *q, uint32_t i);
// Checks that an entry's tensors of a layer exist and that the session's place can reach them.
int kvq__append_reach(const struct kvq__queue *q, uint32_t i, const struct kvq_shape *s);
// Takes memory for the entry's page list, NULL if it is not paged; false if there is no room.
bool kvq__store_list(struct kvq__queue *q, uint32_t i, int32_t **list);
// Copies the list into the daemon's memory, for kvq__paged_check. 0 or KVQ_E_BOUNDS.
int kvq__list_copy(struct kvq__queue *q, uint32_t i, int32_t *list);
// Where the K and V views' tensors of an entry lie.
struct kvq__source kvq__store_source(const struct kvq__queue *q, uint32_t i, const int32_t *list);
// Stores the part of an entry's tokens that one page and KV head have. Any thread.
struct kvq__store_part {
    const struct kvq__layer *layer;
    const struct kvq__source *source;
    uint8_t *raw;        // the page's raw block
    uint32_t page, head; // page: counted from that of the entry's first token
};
void kvq__store_page(const struct kvq__queue *q, uint32_t i, const struct kvq__store_part *part,
                     struct kvq_store_counts *counts);
// The counts of an entry's items, together.
struct kvq_store_counts kvq__store_counts_sum(const struct kvq_store_counts *counts, uint32_t n);
// Where token t of an entry's source lies, and how many follow it there.
uint32_t kvq__store_run(const struct kvq__queue *queue, uint32_t i,
                        const struct kvq__source *source, uint32_t t, struct kvq_view *k,
                        struct kvq_view *v);

#endif
