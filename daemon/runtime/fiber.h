// SPDX-License-Identifier: Apache-2.0
//
// Fibers: functions of one thread that can wait in the middle, each on a stack of its own, while
// the thread does other things. What takes several threads and several waits is then written as one
// function, from the top down. A fiber never leaves its thread: what is to be done on another one
// is sent there, and the fiber waits for it.
//
//   fiber_make --> MADE --fiber_run--> RUNNING --fiber_wait--> WAITING
//                    |                  |    ^                    |
//               fiber_unmake         returns `-- fiber_wake ------'
//                    v                  v
//                   NONE <------------ NONE, and then ended()
//
// The stacks are pages of memory with a page below them that may not be touched, so that a fiber
// that needs too much ends the process instead of writing over another one's. Sanitizers are told
// of each switch.
#ifndef KVQ_DAEMON_RUNTIME_FIBER_H
#define KVQ_DAEMON_RUNTIME_FIBER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <ucontext.h>

enum {
    KVQ__FIBER_STACK = 256 << 10, // bytes; memory is taken for what is used of them
    KVQ__FIBER_STACKS_KEPT = 32,  // of fibers that have ended, for the next ones
};

enum kvq__fiber_state {
    KVQ__FIBER_NONE,
    KVQ__FIBER_MADE,
    KVQ__FIBER_RUNNING,
    KVQ__FIBER_WAITING,
};

struct kvq__fiber_stack;

// Embed it in what the fiber works on; zeros at first.
struct kvq__fiber {
    TAILQ_ENTRY(kvq__fiber) link; // of those that were woken
    enum kvq__fiber_state state;
    bool woken;
    struct kvq__fiber_stack *stack;
    void (*run)(void *context);
    void (*ended)(void *context);
    void *context;
};
TAILQ_HEAD(kvq__fiber_list, kvq__fiber);

// The fibers of one thread.
struct kvq__fibers {
    struct kvq__fiber *now;       // that runs; NULL: the thread is on its own stack
    struct kvq__fiber_list woken; // in the order in which they go on
    bool going;                   // the thread is resuming fibers
    ucontext_t thread;            // where it goes on once a fiber waits or ends
    struct kvq__fiber_stack *own; // the thread's stack, as sanitizers want to know it
    pthread_mutex_t lock;         // of what follows
    struct kvq__fiber_stack *kept;
    uint32_t n_kept, n_stacks; // n_stacks: kept ones and others
};

// 0 or KVQ_E_NO_MEMORY.
int kvq__fibers_open(struct kvq__fibers *fibers);
// No fiber is made, runs or waits.
void kvq__fibers_close(struct kvq__fibers *fibers);

// Gets a stack. 0 or KVQ_E_NO_MEMORY. Any thread.
int kvq__fiber_make(struct kvq__fibers *fibers, struct kvq__fiber *fiber);
// Gives the stack back unused; fine if it has none. Any thread.
void kvq__fiber_unmake(struct kvq__fibers *fibers, struct kvq__fiber *fiber);

// All that follow: the fibers' thread.

// Runs run(context) on the fiber's stack until it waits for the first time, at once, or behind the
// fiber that calls this. When it returns, ended(context) is called on the thread's own stack; the
// fiber may be freed or made anew there.
void kvq__fiber_run(struct kvq__fibers *fibers, struct kvq__fiber *fiber,
                    void (*run)(void *context), void (*ended)(void *context), void *context);
// By the fiber that runs: returns once somebody has woken it.
void kvq__fiber_wait(struct kvq__fibers *fibers);
// Goes on with a fiber that waits, at once, or behind the fiber that calls this.
void kvq__fiber_wake(struct kvq__fibers *fibers, struct kvq__fiber *fiber);

#endif
