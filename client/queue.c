// SPDX-License-Identifier: Apache-2.0
//
// Queues: opening and closing a ring pair.
#include "client/internal.h"

#include <assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FD_REQUESTS, FD_COMPLETIONS, FD_WAKE_DAEMON, FD_WAKE_CLIENT, QUEUE_FDS };

static int check_page(const char *what, const uint32_t *page, uint32_t magic, uint32_t slots)
{
    // The three words that start every ring's page.
    if (page[0] == magic && page[1] >= KVQ_PROTOCOL_MIN && page[1] <= KVQ_PROTOCOL_MAX &&
        page[2] == slots)
        return KVQ_OK;
    return kvq__set_error(
        KVQ_E_PROTOCOL,
        "the daemon's %s ring has mark %#x, version %u and %u slots; %#x and %u slots "
        "are expected",
        what, page[0], page[1], page[2], magic, slots);
}

static int map_rings(kvq_queue *queue, const int *fds)
{
    void *req, *cq;
    assert(!queue->req && !queue->cq);
    int rc = kvq__map(fds[FD_REQUESTS], KVQ_REQ_RING_BYTES, PROT_READ | PROT_WRITE,
                      "the request ring", &req);
    if (rc)
        return rc;
    queue->req = req;
    rc = kvq__map(fds[FD_COMPLETIONS], KVQ_CQ_RING_BYTES, PROT_READ, "the completion ring", &cq);
    if (rc)
        return rc;
    queue->cq = cq;
    rc = check_page("request", &queue->req->magic, KVQ_SHM_MAGIC_REQUEST, KVQ_REQ_SLOTS);
    if (rc == KVQ_OK)
        rc = check_page("completion", &queue->cq->magic, KVQ_SHM_MAGIC_REPLY, KVQ_CQ_SLOTS);
    kvq_ring_client_side(queue->req, queue->cq, &queue->tx, &queue->rx);
    return rc;
}

static int take_wakers(kvq_queue *queue, int *fds)
{
    assert(queue->wake_daemon < 0 && queue->wake_client < 0);
    // Reading and writing these must never block, whatever they are.
    for (int i = FD_WAKE_DAEMON; i <= FD_WAKE_CLIENT; i++) {
        int flags = fcntl(fds[i], F_GETFL);
        if (flags < 0 || fcntl(fds[i], F_SETFL, flags | O_NONBLOCK) < 0)
            return kvq__set_error_errno("what wakes a queue cannot be made non-blocking");
    }
    queue->wake_daemon = fds[FD_WAKE_DAEMON];
    queue->wake_client = fds[FD_WAKE_CLIENT];
    fds[FD_WAKE_DAEMON] = fds[FD_WAKE_CLIENT] = -1;
    return KVQ_OK;
}

static int take_queue(void *to, struct kvq__call *call)
{
    kvq_queue *queue = to;
    queue->id = call->reply->open_queue->queue;
    int rc = map_rings(queue, call->fds);
    return rc ? rc : take_wakers(queue, call->fds);
}

int kvq__queue_attach(kvq_queue *queue)
{
    Kvq__OpenQueue message = KVQ__OPEN_QUEUE__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = QUEUE_FDS,
                             .want = KVQ__REPLY__RESULT_OPEN_QUEUE,
                             .what = "opening a queue",
                             .take = take_queue,
                             .to = queue};
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_QUEUE;
    call.request.open_queue = &message;
    int rc = kvq__ask(queue->client, &call);
    queue->dead = rc ? KVQ_E_DISCONNECTED : KVQ_OK;
    return rc;
}

static void unmap_rings(kvq_queue *queue)
{
    if (queue->req)
        munmap(queue->req, KVQ_REQ_RING_BYTES);
    if (queue->cq)
        munmap((void *)(uintptr_t)queue->cq, KVQ_CQ_RING_BYTES);
    if (queue->wake_daemon >= 0)
        close(queue->wake_daemon);
    if (queue->wake_client >= 0)
        close(queue->wake_client);
    queue->req = NULL;
    queue->cq = NULL;
    queue->wake_daemon = queue->wake_client = -1;
}

void kvq__queue_detach(kvq_queue *queue, int code)
{
    kvq__queue_kill(queue, code);
    queue->dead = KVQ_E_DISCONNECTED;
    unmap_rings(queue);
}

void kvq__queue_free(kvq_queue *queue)
{
    kvq_client *client = queue->client;
    assert(queue->timeline.order == KVQ_ORDER_NONE); // else the watch still looks at it
    pthread_mutex_lock(&client->table);
    TAILQ_REMOVE(&client->queues, queue, entry);
    pthread_mutex_unlock(&client->table);
    unmap_rings(queue);
    free(queue);
}

int kvq_queue_open(kvq_client *client, kvq_queue **queue)
{
    if (!client || !queue)
        return kvq__set_error(KVQ_E_INVALID, "kvq_queue_open: an argument is NULL");
    *queue = NULL;
    kvq_queue *made = calloc(1, sizeof *made);
    if (!made)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    made->client = client;
    made->wake_daemon = made->wake_client = -1;
    pthread_mutex_lock(&client->table);
    TAILQ_INSERT_TAIL(&client->queues, made, entry);
    pthread_mutex_unlock(&client->table);
    int rc = kvq__queue_attach(made);
    if (rc)
        kvq__queue_free(made);
    else
        *queue = made;
    return rc;
}

void kvq_queue_close(kvq_queue **queue)
{
    kvq_queue *q = queue ? *queue : NULL;
    if (!q)
        return;
    Kvq__CloseQueue message = KVQ__CLOSE_QUEUE__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "closing a queue"};
    message.queue = q->id;
    call.request.command_case = KVQ__REQUEST__COMMAND_CLOSE_QUEUE;
    call.request.close_queue = &message;
    kvq__timeline_close(q);
    if (!q->dead)
        kvq__ask_in_any_case(q->client, &call);
    kvq__queue_free(q);
    *queue = NULL;
}
