// SPDX-License-Identifier: Apache-2.0
//
// What the passes of a STEP (step_all.c) are on a GPU (gpu_step_all.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_STEP_ALL_H
#define KVQ_DAEMON_CORE_REQUEST_STEP_ALL_H

#include "daemon/core/state.h"

// Where an entry's tokens of a layer come from.
struct kvq__source kvq__step_all_source(struct kvq__queue *queue, uint32_t i, uint32_t layer);

// As `prepare`, `gpu_room` and `gpu_wave` of struct kvq__pass. An entry that asks for more than a
// chunk goes through several waves (struct kvq__entry, `part`).
bool kvq__gpu_store_all_prepare(struct kvq__queue *queue, uint32_t i);
bool kvq__gpu_pack_all_prepare(struct kvq__queue *queue, uint32_t i);
bool kvq__gpu_publish_prepare(struct kvq__queue *queue, uint32_t i);
void kvq__gpu_part_none(struct kvq__queue *queue, uint32_t i); // prepared to do nothing
size_t kvq__gpu_part_room(const struct kvq__queue *queue, uint32_t i);
int kvq__gpu_store_all_wave(struct kvq__queue *queue);
int kvq__gpu_pack_all_wave(struct kvq__queue *queue);
int kvq__gpu_publish_wave(struct kvq__queue *queue);

#endif
