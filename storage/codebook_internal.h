// SPDX-License-Identifier: Apache-2.0
//
// What the files that read and write codebooks share.
#ifndef KVQ_STORAGE_CODEBOOK_INTERNAL_H
#define KVQ_STORAGE_CODEBOOK_INTERNAL_H

#include "storage/capture_internal.h" // complaints and reading
#include "storage/codebook.h"

// Where a layer's parts start, in floats from `values`.
struct kvq__codebook_place {
    size_t smooth, k, v;
};

struct kvq_codebook {
    struct kvq_codebook_header head;
    struct kvq_codebook_row rows[KVQ_MAX_LAYERS];
    struct kvq__codebook_place places[KVQ_MAX_LAYERS];
    uint64_t id;
    float *values;
    size_t n_values;
    size_t mapped; // bytes of values in `memory`; 0: they are on the heap
    int memory;    // a memfd, or -1
};

// Bytes in front of the values: header, rows, zeros.
uint64_t kvq__codebook_front(uint32_t layers);

// Header and rows: everything but the two checks. Fills places and n_values.
int kvq__codebook_check(struct kvq_codebook *book, const struct kvq__complaint *c);

// Every value within its bounds.
int kvq__codebook_check_values(const struct kvq_codebook *book, const struct kvq__complaint *c);

// The two checks as they have to be.
uint64_t kvq__codebook_data_check(const struct kvq_codebook *book);
uint64_t kvq__codebook_head_check(const struct kvq_codebook *book);

// Floats of one table, and how many tables a layer has. 0 for a side without codebook.
size_t kvq__codebook_table(const struct kvq_codebook_header *h, bool v);
size_t kvq__codebook_tables(const struct kvq_codebook_header *h, const struct kvq_codebook_row *row,
                            bool v);

#endif
