// SPDX-License-Identifier: Apache-2.0
//
// Clients of the core with requests in the order of streams, over the software driver: what its
// tests share.
#ifndef KVQ_TESTS_STREAM_KIT_H
#define KVQ_TESTS_STREAM_KIT_H

#include "daemon/core/session/work_stream.h"
#include "tests/core/sim.h"

enum {
    HEADS = 2,
    DIM = 64,
    TOKENS = 4,
    MANY = 400, // so many that units are due
    MIB = 1 << 20,
    BUFFER = MIB,
    Q_AT = BUFFER / 4,
    OUT_AT = 3 * (BUFFER / 8),
};

// A client with a session on the first GPU, and a timeline there unless the GPU has too few
// hardware queues (CUDA_DEVICE_MAX_CONNECTIONS).
struct streamer {
    struct member m;
    uint64_t *words; // ready, done
    bool alone;      // it has the timeline; else its requests are in the host's order
    uint64_t session, signal;
};

// Of the test that runs: K lies at the beginning of a client's buffer, V at half of it.
extern struct kit kit;
extern struct streamer one, two;
extern const struct kvq__layer_row stream_row;

int stream_setup(void **state);
int stream_setup_small(void **state); // little memory for what a request hands to the GPU
int stream_teardown(void **state);
#define STREAM_TEST(name)       TEST_BETWEEN(name, stream_setup, stream_teardown)
#define STREAM_TEST_SMALL(name) TEST_BETWEEN(name, stream_setup_small, stream_teardown)

void stream_open(struct streamer *s, const char *name); // with a session of f16
void stream_close(struct streamer *s);
// After a detach: what is left of the client, and another in its place.
void stream_reopen(struct streamer *s, const char *name);
// A session of one layer, or, without a format, an open one; s->session is it from now on.
void stream_session(struct streamer *s, const char *name, const char *format);

// Makes a request one in the order of the client's stream, if it has a timeline.
void stream_order(struct streamer *s, struct kvq_request *r);
// Skips the test where clients have no timelines.
void stream_needed(void);
void stream_ready(struct streamer *s); // its stream comes to its last signal
void stream_ends(struct streamer *s);  // and what was asked for in its order has ended
uint64_t stream_done(const struct streamer *s);
// Holds a stream of the driver's back, or lets it go on.
void stream_stall(struct kvq_gpu_stream *stream, bool held);
// Until nothing of the client's work stream is under way, what nobody waits for included.
void stream_settle(struct streamer *s);
// Makes the driver refuse the n-th call of that name from now on.
void stream_refuse(const char *name, uint64_t n, int result);
// The same, and all that come after it, until stream_refuse is called with 0.
void stream_refuse_from(const char *name, uint64_t n, int result);

#endif
