// SPDX-License-Identifier: Apache-2.0
//
// Reading capture files (layout: proto/capture.h): K, V and Q as an engine handed them over.
//
// The file is foreign: everything is checked before it is used, and a file that breaks a rule is
// refused with a sentence that names the place, the value and the limit. An opened file is
// read-only and may be read from several threads, each call with its own output.
#ifndef KVQ_STORAGE_CAPTURE_H
#define KVQ_STORAGE_CAPTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/capture.h"

struct kvq_capture_file;

enum kvq_capture_part { KVQ_CAPTURE_K, KVQ_CAPTURE_V, KVQ_CAPTURE_Q };

struct kvq_capture_info {
    char model[KVQ_FINGERPRINT_BYTES];
    uint32_t layers, sequences;
    uint64_t tokens;     // of all sequences
    uint64_t torn_bytes; // behind the last whole chunk of a file that was not closed, not read
    bool has_queries, closed;
};

// 0 or a negative KVQ_E code (E_SYSTEM, E_INVALID, E_LIMIT, E_NO_MEMORY) with a sentence in text.
// Reads and checks the whole file once. *file is released with kvq_capture_file_close.
int kvq_capture_file_open(const char *path, struct kvq_capture_file **file, char *text, size_t n);
// The same from a descriptor, which is taken over also when it fails; `name` is for texts.
int kvq_capture_file_open_fd(int fd, const char *name, struct kvq_capture_file **file, char *text,
                             size_t n);
// Accepts NULL and pointers to NULL.
void kvq_capture_file_close(struct kvq_capture_file **file);

const struct kvq_capture_info *kvq_capture_file_info(const struct kvq_capture_file *file);
// layer is below info->layers.
const struct kvq_capture_row *kvq_capture_file_row(const struct kvq_capture_file *file,
                                                   uint32_t layer);
// Tokens that every layer of the sequence has; sequence is below info->sequences. May be 0.
uint64_t kvq_capture_file_tokens(const struct kvq_capture_file *file, uint32_t sequence);

// Tokens [from, from + tokens) of a sequence, counted from its first, of one head of one layer,
// as fp32 [tokens][dim]. head is a KV head for K and V, a query head for Q (head h of Q belongs
// to KV head h / (q_heads / kv_heads)). KVQ_E_BOUNDS if any of them is not there.
int kvq_capture_file_read(const struct kvq_capture_file *file, uint32_t sequence, uint32_t layer,
                          enum kvq_capture_part part, uint32_t head, uint64_t from, uint64_t tokens,
                          float *out, char *text, size_t n);

#endif
