// SPDX-License-Identifier: Apache-2.0
//
// See keys.h; RFC 27 of ZeroMQ is ZAP. Each socket has a domain of its own, its serial, so a
// question says which connection it is about.
#include "daemon/control/keys.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "proto/key_file.h"
#include "proto/status.h"

// Frames of a question, and the longest that any of them may be.
enum { VERSION, QUESTION, DOMAIN, ADDRESS, IDENTITY, MECHANISM, KEY, N_FRAMES, FRAME_BYTES = 256 };

struct kvq__keys {
    struct kvq_key_file own;
    kvq__keys_ask *ask;
    void *context, *socket;
    uv_poll_t poll;
    bool open;
};

struct question {
    uint8_t frames[N_FRAMES][FRAME_BYTES];
    size_t bytes[N_FRAMES];
    bool whole; // all frames, no more, none too long
};

static bool receive_question(void *socket, struct question *q)
{
    int more = 1, n = 0;
    size_t size = sizeof more;
    q->whole = true;
    for (; more; n++) {
        uint8_t extra[FRAME_BYTES];
        int got = zmq_recv(socket, n < N_FRAMES ? q->frames[n] : extra, FRAME_BYTES, ZMQ_DONTWAIT);
        if (got < 0)
            return false;
        q->whole = q->whole && n < N_FRAMES && got <= FRAME_BYTES;
        if (n < N_FRAMES)
            q->bytes[n] = (size_t)got;
        if (zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &size) != 0)
            return false;
    }
    q->whole = q->whole && n == N_FRAMES;
    return true;
}

static bool frame_is(const struct question *q, int frame, const char *text)
{
    return q->bytes[frame] == strlen(text) && memcmp(q->frames[frame], text, strlen(text)) == 0;
}

// Whether the peer may come in.
static bool judge(const struct kvq__keys *k, const struct question *q)
{
    char domain[32] = "";
    if (!q->whole || !frame_is(q, VERSION, "1.0") || !frame_is(q, MECHANISM, "CURVE") ||
        q->bytes[KEY] != KVQ_KEY_BYTES || q->bytes[DOMAIN] >= sizeof domain)
        return false;
    memcpy(domain, q->frames[DOMAIN], q->bytes[DOMAIN]);
    char *end = domain;
    uint64_t serial = strtoull(domain, &end, 10);
    return *domain && !*end && k->ask(k->context, serial, q->frames[KEY]);
}

static void answer_question(void *socket, const struct question *q, bool good)
{
    const char *const words[] = {good ? "200" : "400", good ? "" : "no such key", "", ""};
    zmq_send(socket, "1.0", 3, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(socket, q->frames[QUESTION], q->whole ? q->bytes[QUESTION] : 0,
             ZMQ_SNDMORE | ZMQ_DONTWAIT);
    for (int i = 0; i < 4; i++) // status, its text, user, metadata
        zmq_send(socket, words[i], strlen(words[i]), (i < 3 ? ZMQ_SNDMORE : 0) | ZMQ_DONTWAIT);
}

void kvq__keys_look(struct kvq__keys *k)
{
    struct question q;
    int events = 0;
    size_t size = sizeof events;
    while (k && k->open && zmq_getsockopt(k->socket, ZMQ_EVENTS, &events, &size) == 0 &&
           (events & ZMQ_POLLIN)) {
        memset(&q, 0, sizeof q);
        if (!receive_question(k->socket, &q))
            return;
        answer_question(k->socket, &q, judge(k, &q));
    }
}

static void on_question(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    kvq__keys_look(handle->data);
}

bool kvq__keys_secure(const struct kvq__keys *k, void *socket, uint64_t serial)
{
    const int yes = 1;
    char domain[32];
    int n = snprintf(domain, sizeof domain, "%" PRIu64, serial);
    assert(k && k->open);
    return zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &yes, sizeof yes) == 0 &&
           zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, k->own.secret, KVQ_KEY_BYTES) == 0 &&
           zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, domain, (size_t)n) == 0;
}

int kvq__keys_open(uv_loop_t *loop, void *zmq_context, const char *key_file, kvq__keys_ask *ask,
                   void *context, struct kvq__keys **out, char *text)
{
    struct kvq__keys *k = calloc(1, sizeof *k);
    uv_os_sock_t fd;
    size_t size = sizeof fd;
    *out = k;
    if (!k) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for keys");
        return KVQ_E_NO_MEMORY;
    }
    if (!zmq_has("curve")) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "control_address needs a libzmq with CURVE (libsodium), and this one has none");
        return KVQ_E_UNSUPPORTED;
    }
    int error = kvq_key_read(key_file, &k->own, text);
    if (error)
        return error;
    k->ask = ask;
    k->context = context;
    k->socket = zmq_socket(zmq_context, ZMQ_REP);
    if (!k->socket || zmq_bind(k->socket, "inproc://zeromq.zap.01") != 0 ||
        zmq_getsockopt(k->socket, ZMQ_FD, &fd, &size) != 0 ||
        uv_poll_init(loop, &k->poll, fd) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot check keys: %s", zmq_strerror(zmq_errno()));
        return KVQ_E_SYSTEM;
    }
    k->open = true;
    k->poll.data = k;
    uv_poll_start(&k->poll, UV_READABLE, on_question);
    return 0;
}

void kvq__keys_end(struct kvq__keys *k)
{
    if (!k || !k->open)
        return;
    k->open = false;
    uv_close((uv_handle_t *)&k->poll, NULL);
}

void kvq__keys_free(struct kvq__keys **keys)
{
    struct kvq__keys *k = *keys;
    if (!k)
        return;
    assert(!k->open);
    if (k->socket)
        zmq_close(k->socket);
    kvq_key_forget(&k->own);
    free(k);
    *keys = NULL;
}
