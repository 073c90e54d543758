/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/capture.h: writing K, V and Q of an engine to a file. For those who make codebooks or measure
 * formats.
 */
#ifndef KVQ_PUBLIC_CAPTURE_H
#define KVQ_PUBLIC_CAPTURE_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes what an engine appends to a file, for tools that make codebooks and measure formats. The
 * file's layout is in the project's proto/capture.h. Needs no connection of its own; a capture
 * belongs to one thread at a time. */
typedef struct kvq_capture kvq_capture;

struct kvq_capture_options {
    uint32_t size;                  /* sizeof(struct kvq_capture_options) */
    uint32_t n_layers;              /* rows */
    const struct kvq_layer *layers; /* as for kvq_session_open */
    uint8_t queries;                /* 1: Q as well */
    const char *model;              /* for people and tools; may be NULL */
    uint64_t max_tokens; /* of all sessions together, the rest is passed over; 0: no limit */
};

/* Makes the file, or empties it. KVQ_E_SYSTEM, KVQ_E_SHAPE, KVQ_E_LIMIT, KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_capture_open(const char *path, const struct kvq_capture_options *options,
                                       kvq_capture **capture);

/* To be called with the same work and entries as kvq_append or kvq_append_attend, after it and
 * before the tensors change. Entries with a status other than 0 are passed over. With queries each
 * entry must have as many query tokens as tokens. After a failure (KVQ_E_SYSTEM, when the disk is
 * full) the file holds what was written before, and every further call fails alike. */
KVQ_API KVQ_CHECK int kvq_capture_append(kvq_capture *capture, const struct kvq_work *work,
                                         const struct kvq_entry *entries, uint32_t n);

/* Tokens begun so far, as one layer counts them. */
KVQ_API uint64_t kvq_capture_tokens(const kvq_capture *capture);

/* Writes the counts and closes the file. Accepts NULL and pointers to NULL. */
KVQ_API int kvq_capture_close(kvq_capture **capture);

#ifdef __cplusplus
}
#endif

#endif
