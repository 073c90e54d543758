// SPDX-License-Identifier: Apache-2.0
//
// What a client of attach_kit.h asks of a daemon with a GPU, the software driver's, which lies in
// the test program as well; and counting of what it must give back.
#ifndef KVQ_TESTS_ATTACH_GPU_KIT_H
#define KVQ_TESTS_ATTACH_GPU_KIT_H

#include "tests/edge/attach_kit.h"
#include "tests/kits/soft_kit.h"

void gpu_attach(void); // by main: daemons of the tests have the driver
extern struct kvq_gpu_uuid gpu_uuid;
extern struct kvq_soft_counts gpu_before;

// Setup and teardown: a daemon with the GPU. There is as much at the end, once those clients have
// ended that are left and what nobody waits for is given back, as at the beginning. The daemon has
// streams and contexts of its own, which stay.
int gpu_start(void **state);
int gpu_stop(void **state);
#define GPU_TEST(test) TEST_BETWEEN(test, gpu_start, gpu_stop)
// The same with another process, which has memory of the GPU and ends behind the clients.
int gpu_start_exporter(void **state);
int gpu_stop_exporter(void **state);
#define EXPORTER_TEST(test) TEST_BETWEEN(test, gpu_start_exporter, gpu_stop_exporter)
extern struct soft_peer exporter;
// A first client with a timeline makes the daemon take what it keeps for the next one; then what
// there is is counted.
void gpu_count(void);
// Returns when so much more than at the beginning is there of a field of struct kvq_soft_counts.
#define SETTLES(field, more)                                                                       \
    gpu_settles_at(offsetof(struct kvq_soft_counts, field), gpu_before.field + more)
void gpu_settles_at(size_t offset, uint64_t value);

void peer_says(const struct peer *p, const char *words); // in the text of its last reply

ProtobufCBinaryData bytes_of(const void *data, size_t n);
int peer_create_on(struct peer *p, uint64_t bytes);
void peer_send_create_on(struct peer *p, uint64_t bytes); // its first half
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
// An allocation of the exporter's, by its handle.
struct told told_allocate(uint64_t bytes, uint64_t *at);
int peer_import_on(struct peer *p, const struct told *told, uint64_t offset, uint64_t bytes);

#endif
