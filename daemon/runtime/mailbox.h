// SPDX-License-Identifier: Apache-2.0
//
// Handing work from one thread to another. Every mail is delivered once, in the order of posting,
// by calling its `deliver` on the receiving thread. The loop's thread and the poller's each have
// a box; a command travels to the poller, changes its `deliver`, and travels back.
#ifndef KVQ_DAEMON_RUNTIME_MAILBOX_H
#define KVQ_DAEMON_RUNTIME_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

// Embed it in what is to be sent. The sender must not touch it until it is delivered; then the
// receiver may free it or post it again.
struct kvq__mail {
    struct kvq__mail *next;
    void (*deliver)(struct kvq__mail *mail);
};

struct kvq__mailbox {
    pthread_mutex_t lock;
    struct kvq__mail *first, **last;
    uint32_t pending; // 0: the box is empty; read without the lock
    // Wakes the receiver if it sleeps; called after each post, on the posting thread.
    void (*notify)(void *context);
    void *context;
};

void kvq__mailbox_open(struct kvq__mailbox *box, void (*notify)(void *context), void *context);
void kvq__mailbox_close(struct kvq__mailbox *box); // empty, and nobody posts any more

// Any thread. Never fails and never allocates.
void kvq__mailbox_post(struct kvq__mailbox *box, struct kvq__mail *mail,
                       void (*deliver)(struct kvq__mail *mail));

// Receiving thread. One load when there is nothing.
bool kvq__mailbox_pending(const struct kvq__mailbox *box);
// Delivers the mails that are in the box now; mails posted meanwhile wait for the next call.
void kvq__mailbox_deliver(struct kvq__mailbox *box);
// Delivers the first one, for a receiver that has other things to do. false: the box was empty.
bool kvq__mailbox_deliver_one(struct kvq__mailbox *box);

#endif
