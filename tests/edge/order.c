// SPDX-License-Identifier: Apache-2.0
//
// See order.h.
#include "tests/edge/order.h"

#include <string.h>

static const struct kvq__peer admin = {.admin = true};

static void order_done(struct kvq__task *task)
{
    struct order *o = (struct order *)task;
    sem_post(&o->done);
}

void order_make(struct order *o)
{
    memset(o, 0, sizeof *o);
    sem_init(&o->done, 0, 0);
    kvq_arena_init(&o->arena, o->memory, sizeof o->memory);
    kvq__request__init(&o->request);
    kvq__reply__init(&o->reply);
    o->task = (struct kvq__task){.request = &o->request,
                                 .arena = &o->arena,
                                 .reply = &o->reply,
                                 .peer = &admin,
                                 .done = order_done};
}

static void start_order(struct kvq__server *server, void *context)
{
    struct order *o = context;
    kvq__jobs_start(server->jobs, &o->task);
}

void order_give(struct order *o)
{
    attach_in_loop(start_order, o);
}

static sem_t drained;

static void jobs_drained(struct kvq__server *server)
{
    (void)server;
    sem_post(&drained);
}

static void drain_jobs(struct kvq__server *server, void *context)
{
    (void)context;
    kvq__jobs_drain(server->jobs, jobs_drained);
}

void order_jobs_to_drain(void)
{
    sem_init(&drained, 0, 0);
    attach_in_loop(drain_jobs, NULL);
}

void order_wait_drained(void)
{
    sem_wait(&drained);
}
