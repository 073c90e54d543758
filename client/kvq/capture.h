/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/capture.h: writing K, V and Q of an engine to a file. For engines whose users make codebooks
 * or measure formats.
 */
#ifndef KVQ_PUBLIC_CAPTURE_H
#define KVQ_PUBLIC_CAPTURE_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A capture file under way: tools make codebooks of such files and measure formats with them. The
 * project's proto/capture.h has the layout of the file. A capture needs no connection of its own,
 * and belongs to one thread at a time. */
typedef struct kvq_capture kvq_capture;

struct kvq_capture_options {
    uint32_t size;                  /* sizeof(struct kvq_capture_options) */
    uint32_t n_layers;              /* rows */
    const struct kvq_layer *layers; /* as for kvq_session_open */
    uint8_t queries;                /* 1: Q as well */
    const char *model;              /* a name that tools show; may be NULL */
    uint64_t max_tokens; /* of all sessions together; later tokens are skipped; 0: no limit */
};

/* Creates or truncates the file. Release with kvq_capture_close. KVQ_E_SYSTEM, KVQ_E_SHAPE,
 * KVQ_E_LIMIT, KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_capture_open(const char *path, const struct kvq_capture_options *options,
                                       kvq_capture **capture);

/* Writes one layer of a step. Call this function with the work and entries of kvq_append or
 * kvq_append_attend, after that call and before the tensors change. The function skips entries
 * whose status is not 0. If the capture has queries, each entry must have as many query tokens as
 * tokens. A call whose arguments cannot be is refused before it begins, and may be repeated with
 * better ones. After any other failure (KVQ_E_SYSTEM, when the disk is full; KVQ_E_BOUNDS, when a
 * tensor reaches behind its buffer) the file keeps what was written before, and every further call
 * returns the same code. */
KVQ_API KVQ_CHECK int kvq_capture_append(kvq_capture *capture, const struct kvq_work *work,
                                         const struct kvq_entry *entries, uint32_t n);

/* Tokens that the capture holds or has begun to write, counted once for all layers. */
KVQ_API uint64_t kvq_capture_tokens(const kvq_capture *capture);

/* Writes the counts and closes the file. Accepts NULL and pointers to NULL. */
KVQ_API int kvq_capture_close(kvq_capture **capture);

#ifdef __cplusplus
}
#endif

#endif
