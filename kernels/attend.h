// SPDX-License-Identifier: Apache-2.0
//
// What the files of the attention driver share: attend.c (plans, items, sums), attend_share.c
// (sessions that share blocks) and attend_pages.c (page tables).
#ifndef KVQ_KERNELS_ATTEND_H
#define KVQ_KERNELS_ATTEND_H

#include "kernels/internal.h"

// One KV head of a session's layer, as a reader of its pages sees it.
struct kvq__reader {
    const struct kvq_kernels *k;
    const struct kvq_attend *a;
    const struct kvq__codec *codec;
    const struct kvq__extras *extras;
    struct kvq_raw_layout raw;
    uint32_t head, dim;
    bool packs;
    uint64_t seen_from, seen_to; // groups without a position in this range stay empty
};

// Fills the chunk of `tokens` positions from `start` on; `room` takes groups that are assembled.
void kvq__build_chunk(const struct kvq__reader *r, uint64_t start, uint32_t tokens,
                      struct kvq__assembled *room, struct kvq__chunk *chunk);

// Sets what follows from heads, parallel and first_split: items and partial_bytes.
void kvq__count_items(const struct kvq_attend *a, struct kvq_attend_plan *plan);

// Query rows of the largest tile.
uint32_t kvq__tile_rows(const struct kvq_attend *a, const struct kvq_attend_plan *plan);

#endif
