// SPDX-License-Identifier: Apache-2.0
//
// daemon.h: the connection of one backend to kvqd, what the environment asks of it, and what a user
// of llama.cpp is told.
#ifndef KVQ_GGML_DAEMON_H
#define KVQ_GGML_DAEMON_H

#include "client/kvq.h"

#include <stdbool.h>
#include <stdint.h>

enum { KVQ_GGML_NAME = 100 }; // bytes of KVQ_LLAMA_SESSION, at most

// What a backend's caches share.
struct kvq_ggml_daemon {
    kvq_client *client;
    kvq_queue *queue;
    int threads;     // that attend, the caller's included
    uint32_t remade; // how often the connection was: sessions of before are gone
};

// What the environment asks for.
struct kvq_ggml_asked {
    const char *format, *name; // name: NULL if none
    uint8_t attention, dtype;  // dtype: of windows, and of what is read back
    uint32_t rollback;
};

// Connects, and has kvqd judge what the environment asks for. False: refused, with a line on stderr
// and nothing open.
bool kvq_ggml_daemon_open(struct kvq_ggml_daemon *daemon);
void kvq_ggml_daemon_close(struct kvq_ggml_daemon *daemon);

// Connects again if the connection is lost; `remade` is one more then. False: no daemon answers,
// with a line on stderr.
bool kvq_ggml_daemon_again(struct kvq_ggml_daemon *daemon);

// Reads the environment. False: a value is none, with a line on stderr.
bool kvq_ggml_ask(struct kvq_ggml_asked *asked);

// "kvq: " and a sentence on stderr; always false.
bool kvq_ggml_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same, of a call of libkvq that failed with this code: what it was for, and why.
bool kvq_ggml_failed(const char *what, int code);
// Why the thread's last call of libkvq failed, with this code, in words for who uses llama.cpp.
const char *kvq_ggml_why(int code);

#endif
