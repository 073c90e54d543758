// SPDX-License-Identifier: Apache-2.0
//
// Commands of an administrator to the store jobs of attach_kit.h's daemon, without a connection:
// the test goes on while they are under way.
#ifndef KVQ_TESTS_ORDER_H
#define KVQ_TESTS_ORDER_H

#include <semaphore.h>

#include "daemon/store/store.h"
#include "tests/edge/attach_kit.h"

struct order {
    struct kvq__task task; // first: order.c finds the order by it
    Kvq__Request request;  // its command is put in between making and giving
    Kvq__Reply reply;
    struct kvq_arena arena;
    uint8_t memory[KVQ_WIRE_ARENA];
    sem_t done; // posted when the reply is there
};

void order_make(struct order *o);
void order_give(struct order *o);

// The jobs end what is under way, save what is to be saved, and take no imports from then on.
void order_jobs_to_drain(void);
void order_wait_drained(void); // then: until that is done

#endif
