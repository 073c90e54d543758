// SPDX-License-Identifier: Apache-2.0
//
// How the daemon refuses a connection to its control socket: it sends a greeting of ZMTP 3.0 with a
// security mechanism that no peer has, so that ZeroMQ gives up, and a text behind the greeting. On
// a connection that it accepts, the daemon sends nothing before the client has sent something. So a
// client that connects, shuts down its own side and reads to the end learns which of the two holds.
#ifndef KVQ_PROTO_REFUSAL_H
#define KVQ_PROTO_REFUSAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "proto/limits.h"

enum {
    KVQ_REFUSAL_GREETING = 64,
    KVQ_REFUSAL_MECHANISM = 12, // where its name stands in the greeting
    KVQ_REFUSAL_BYTES = KVQ_REFUSAL_GREETING + KVQ_TEXT_BYTES, // the longest
};

#define KVQ_REFUSAL_NAME "KVQ-REFUSED"

// Writes the refusal; returns its length.
static inline size_t kvq_refusal_put(uint8_t out[KVQ_REFUSAL_BYTES], const char *text)
{
    size_t length = strnlen(text, KVQ_TEXT_BYTES - 1);
    memset(out, 0, KVQ_REFUSAL_GREETING);
    out[0] = 0xff;
    out[9] = 0x7f;
    out[10] = 3;
    memcpy(out + KVQ_REFUSAL_MECHANISM, KVQ_REFUSAL_NAME, sizeof KVQ_REFUSAL_NAME);
    memcpy(out + KVQ_REFUSAL_GREETING, text, length);
    return KVQ_REFUSAL_GREETING + length;
}

// The text of a refusal, from n bytes that were read from a connection; NULL if they are no
// refusal. Writes a NUL to bytes[n].
static inline const char *kvq_refusal_text(uint8_t *bytes, size_t n)
{
    if (n < KVQ_REFUSAL_GREETING ||
        memcmp(bytes + KVQ_REFUSAL_MECHANISM, KVQ_REFUSAL_NAME, sizeof KVQ_REFUSAL_NAME) != 0)
        return NULL;
    bytes[n] = 0;
    return (const char *)bytes + KVQ_REFUSAL_GREETING;
}

#endif
