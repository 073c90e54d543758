// SPDX-License-Identifier: Apache-2.0
//
// What a client of attach_kit.h asks of a daemon with a GPU, the software driver's, which lies in
// the test program as well; and counting of what it must give back.
#ifndef KVQ_TESTS_ATTACH_GPU_KIT_H
#define KVQ_TESTS_ATTACH_GPU_KIT_H

#include "tests/edge/attach_kit.h"
#include "tests/kits/soft_kit.h"

extern struct kvq_gpu_uuid gpu_uuid; // set by main
extern struct kvq_soft_counts gpu_before;

// A first client with a timeline makes the daemon take what it keeps for the next one; then what
// there is is counted.
void gpu_begin(void);
// As much as then, once what nobody waits for is given back. The daemon's own streams and contexts
// stay.
void gpu_end(void);
// Returns when so much more than at the beginning is there of a field of struct kvq_soft_counts.
#define SETTLES(field, more)                                                                       \
    gpu_settles_at(offsetof(struct kvq_soft_counts, field), gpu_before.field + more)
void gpu_settles_at(size_t offset, uint64_t value);

void peer_says(const struct peer *p, const char *words); // in the text of its last reply

ProtobufCBinaryData bytes_of(const void *data, size_t n);
void peer_put_create(Kvq__Request *request, Kvq__CreateBuffer *create, uint64_t bytes);
int peer_create_on(struct peer *p, uint64_t bytes);
int peer_open_timeline(struct peer *p, uint32_t queue, size_t uuid_bytes);
int peer_open_events(struct peer *p, uint32_t queue, size_t uuid_bytes);
uint32_t peer_made(const struct peer *p); // the buffer of the last reply

// What a client says of an allocation.
struct told {
    struct kvq_gpu_ipc_memory handle;
    bool by_handle;
    int fd;
    uint64_t bytes, number;
};
// An allocation of another process, by its handle.
struct told told_allocate(const struct soft_peer *peer, uint64_t bytes, uint64_t *at);
int peer_import_on(struct peer *p, const struct told *told, uint64_t offset, uint64_t bytes);

#endif
