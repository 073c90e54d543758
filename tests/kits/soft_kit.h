// SPDX-License-Identifier: Apache-2.0
//
// For tests of the software driver: it is opened by its path, as programs do, and other processes
// (this program, run again) make its calls when they are asked to.
#ifndef KVQ_TESTS_SOFT_KIT_H
#define KVQ_TESTS_SOFT_KIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/cuda/gpu.h"
#include "kernels/emu/soft.h"

enum { SOFT_BLOCK = 2 << 20 };

extern struct kvq_gpu_driver drv;
extern struct kvq_gpu_context *soft_context; // of device 0
extern struct kvq_soft_counts (*soft_counts)(void);
extern uint64_t (*soft_brought)(void);
extern uint64_t (*soft_calls)(const char *call);
extern int (*soft_fail)(const char *call, uint64_t n, bool every_later, int result);
extern struct kvq_soft_control *(*soft_control)(void);
extern void (*soft_stall)(struct kvq_gpu_stream *stream, bool held);
extern void (*soft_seed)(uint64_t seed);

// Around a call that may wait for a stalled stream: a thread lets the stream go on when the call
// has returned, or after so many looks that a call which does not wait has returned before.
void soft_call_begin(struct kvq_gpu_stream *stalled);
void soft_call_end(void);

// Flags of a kvqd that has this driver's GPU, for daemon_kit.
extern const char *const soft_daemon_flags[];

// Opens the library and makes device 0 current. Ends the test program if that fails.
void soft_open(void);

// 0, or fails the test with the driver's own words.
#define OK(call) soft_ok(call, #call, __FILE__, __LINE__)
void soft_ok(int result, const char *what, const char *file, int line);

// What can be asked of another process; a, b and c are its arguments, `value` its answer. Work is
// given to that process's one stream.
enum soft_op {
    SOFT_ALLOC,         // a: bytes. An address
    SOFT_FREE,          // a: address
    SOFT_CREATE,        // a: bytes, b: whether exportable. A memory
    SOFT_EXPORT,        // a: memory. A descriptor comes with the answer
    SOFT_IMPORT,        // a descriptor goes with the question. A memory
    SOFT_MAP,           // a: memory, b: bytes, c: access. An address
    SOFT_UNMAP,         // a: address, b: bytes; also gives the addresses back
    SOFT_RELEASE,       // a: memory
    SOFT_MEMORY_GET,    // a: address. A handle
    SOFT_MEMORY_OPEN,   // handle. An address
    SOFT_MEMORY_CLOSE,  // a: address
    SOFT_BUFFER,        // a: address. Its buffer's number
    SOFT_FILL,          // a: address, b: 32-bit value, c: count
    SOFT_READ,          // a: address. The 64-bit word there, after all work before
    SOFT_WRITE64,       // a: address, b: value
    SOFT_WAIT64,        // a: address, b: value
    SOFT_SYNC,          //
    SOFT_QUERY,         //
    SOFT_EVENT_CREATE,  // An event
    SOFT_EVENT_GET,     // a: event. A handle
    SOFT_EVENT_OPEN,    // handle. An event
    SOFT_EVENT_DESTROY, // a: event
    SOFT_RECORD,        // a: event
    SOFT_STREAM_WAIT,   // a: event
    SOFT_BAD_LAUNCH,    // a: address, or 0. A kernel reads there, or memory that is not there
    SOFT_COUNTS,        // a: which of the counts
    SOFT_STORE,         // a: address, b: value. A plain store by the host
    SOFT_EXIT,          // by exit(), without giving anything back; there is no answer
};

struct soft_question {
    uint64_t op, a, b, c;
    uint8_t handle[64];
};

struct soft_answer {
    int result;
    uint64_t value;
    uint8_t handle[64];
};

struct soft_peer {
    pid_t pid;
    int socket;
};

// Runs this program once more, with this environment added ("NAME=value", or NULL).
struct soft_peer soft_start(const char *environment);

// Asks; the descriptor that goes along is `fd` (-1: none), one that comes back goes to *got.
struct soft_answer soft_ask_fd(const struct soft_peer *peer, const struct soft_question *question,
                               int fd, int *got);

// Asks for what must succeed: the value of the answer.
uint64_t soft_ask(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b,
                  uint64_t c);
int soft_result(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b, uint64_t c);

// Tells it to do something, without waiting for the answer.
void soft_tell(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b, uint64_t c);

void soft_kill(struct soft_peer *peer); // SIGKILL
int soft_end(struct soft_peer *peer);   // asks it to end; its exit status

// What the program does that was run once more: main calls it first.
void soft_serve_if_peer(int argc, char **argv);

// Launches a kernel that reads 2 KiB from there, or where no memory is. What the launch returns.
int soft_launch_reading(kvq_gpu_ptr at, struct kvq_gpu_stream *on);
int soft_bad_launch(struct kvq_gpu_stream *on);

// Before and after a test: after it, this process holds what it held before, counted, and no more
// descriptors or mappings.
extern struct kvq_soft_counts soft_before;
int soft_remember(void **state);
int soft_compare(void **state);

int soft_open_files(void); // descriptors of this process

#endif
