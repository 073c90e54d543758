// SPDX-License-Identifier: Apache-2.0
//
// The key of one end of the control port (docs/protocol.md), in a file as `kvqctl key make` writes
// it:
//
//     public = 64 hexadecimal digits
//     secret = 64 hexadecimal digits
//     server = 64 hexadecimal digits      (of a client: the daemon's public key)
//
// Keys are those of ZeroMQ's CURVE: points and numbers of Curve25519, 32 bytes each. Thread-safe:
// every function touches only its arguments.
#ifndef KVQ_PROTO_KEY_FILE_H
#define KVQ_PROTO_KEY_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/limits.h"

enum { KVQ_KEY_BYTES = 32, KVQ_KEY_HEX = 2 * KVQ_KEY_BYTES + 1 };

struct kvq_key_file {
    uint8_t public_key[KVQ_KEY_BYTES], secret[KVQ_KEY_BYTES];
    uint8_t server[KVQ_KEY_BYTES];
    bool has_server;
};

// A new key, random. KVQ_E_SYSTEM with a text (KVQ_TEXT_BYTES): there is no randomness.
int kvq_key_make(struct kvq_key_file *key, char *text);

// Reads a file that nobody but its owner may read or write, and that the calling user or root owns;
// root reads everybody's.
// KVQ_E_INVALID or KVQ_E_SYSTEM with a text; then `key` is empty.
int kvq_key_read(const char *path, struct kvq_key_file *key, char *text);
// Writes a file that is not there yet, mode 0600. KVQ_E_SYSTEM with a text; then there is none.
int kvq_key_write(const char *path, const struct kvq_key_file *key, char *text);

// Overwrites what is secret.
void kvq_key_forget(struct kvq_key_file *key);

// 64 hexadecimal digits, and back. False: they are not that.
bool kvq_key_from_hex(const char *hex, uint8_t key[KVQ_KEY_BYTES]);
void kvq_key_to_hex(const uint8_t key[KVQ_KEY_BYTES], char hex[KVQ_KEY_HEX]);

#endif
