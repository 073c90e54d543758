// SPDX-License-Identifier: Apache-2.0
//
// What the two files that read captures share, and reading for codebooks, too.
#ifndef KVQ_STORAGE_CAPTURE_INTERNAL_H
#define KVQ_STORAGE_CAPTURE_INTERNAL_H

#include "storage/capture.h"
#include "storage/complain.h"

// A chunk that passed its checks, and where its K starts in the file.
struct kvq__chunk_at {
    uint64_t data, position;
    uint32_t sequence, tokens;
    uint16_t layer;
    uint8_t dtype[3]; // by enum kvq_capture_part
};

// One sequence in one layer: its chunks are chunks[first], ... [first + count).
struct kvq__run {
    uint32_t first, count;
    uint64_t start, tokens;
};

struct kvq_capture_file {
    int fd;
    uint64_t bytes;
    struct kvq_capture_info info;
    struct kvq_capture_row rows[KVQ_MAX_LAYERS];
    struct kvq__chunk_at *chunks; // by sequence, layer, position once all are read
    uint32_t n_chunks, room;
    struct kvq__run *runs; // [sequences][layers]
};

// All of n bytes at `at`, or a complaint.
int kvq__read_at(int fd, uint64_t at, void *data, uint64_t n, const struct kvq__complaint *c);

// ---- capture_check.c: reading the file once, from front to back ----

// Header and rows.
int kvq__capture_header(struct kvq_capture_file *f, struct kvq_capture_header *h,
                        const struct kvq__complaint *c);
// All chunks into f->chunks, in the order of the file.
int kvq__capture_chunks(struct kvq_capture_file *f, const struct kvq_capture_header *h,
                        const struct kvq__complaint *c);

#endif
