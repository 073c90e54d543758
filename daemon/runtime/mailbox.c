// SPDX-License-Identifier: Apache-2.0
//
// A list under a lock, and a word that spares the receiver the lock while the list is empty.
#include "daemon/runtime/mailbox.h"

#include <assert.h>
#include <stddef.h>

#include "proto/ring.h"

void kvq__mailbox_open(struct kvq__mailbox *box, void (*notify)(void *context), void *context)
{
    pthread_mutex_init(&box->lock, NULL);
    box->first = NULL;
    box->last = &box->first;
    box->pending = 0;
    box->notify = notify;
    box->context = context;
}

void kvq__mailbox_close(struct kvq__mailbox *box)
{
    assert(box->last == &box->first && !box->pending);
    assert(!box->first);
    pthread_mutex_destroy(&box->lock);
}

void kvq__mailbox_post(struct kvq__mailbox *box, struct kvq__mail *mail,
                       void (*deliver)(struct kvq__mail *mail))
{
    assert(deliver && box->notify);
    mail->next = NULL;
    mail->deliver = deliver;
    pthread_mutex_lock(&box->lock);
    assert(!*box->last && box->last != &mail->next); // a mail is in one box, once
    *box->last = mail;
    box->last = &mail->next;
    kvq_word_store_release(&box->pending, 1);
    pthread_mutex_unlock(&box->lock);
    box->notify(box->context);
}

bool kvq__mailbox_pending(const struct kvq__mailbox *box)
{
    return kvq_word_load_acquire(&box->pending) != 0;
}

bool kvq__mailbox_deliver_one(struct kvq__mailbox *box)
{
    if (!kvq__mailbox_pending(box))
        return false;
    pthread_mutex_lock(&box->lock);
    struct kvq__mail *mail = box->first;
    assert(mail && mail->deliver);
    box->first = mail->next;
    if (!box->first) {
        box->last = &box->first;
        kvq_word_store_release(&box->pending, 0);
    }
    pthread_mutex_unlock(&box->lock);
    mail->deliver(mail); // which may free or post it
    return true;
}

void kvq__mailbox_deliver(struct kvq__mailbox *box)
{
    if (!kvq__mailbox_pending(box))
        return;
    pthread_mutex_lock(&box->lock);
    struct kvq__mail *mail = box->first;
    assert(mail || box->last == &box->first);
    box->first = NULL;
    box->last = &box->first;
    kvq_word_store_release(&box->pending, 0);
    pthread_mutex_unlock(&box->lock);
    while (mail) {
        struct kvq__mail *next = mail->next; // deliver may free or post it
        assert(mail->deliver);
        mail->deliver(mail);
        mail = next;
    }
}
