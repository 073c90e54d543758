// SPDX-License-Identifier: Apache-2.0
//
// Capture files: keys, values and, optionally, queries as an engine hands them over, for tools that
// make codebooks and measure formats. libkvq writes them (kvq_capture_*), storage/ reads them.
//
//     header | one row per layer | zeros to a multiple of 64 | chunk | chunk | ...
//
// A chunk is the tokens of one session's step in one layer: its header, then
//
//     K [kv_heads][tokens][k_dim]   V [kv_heads][tokens][v_dim]   Q [q_heads][tokens][k_dim]
//
// each in its own dtype, one after the other without gaps, then zeros to a multiple of 64. The flag
// of the file says whether it has Q. K and Q are as the engine handed them over: after RoPE and
// norms. All numbers are little-endian; a check (XXH3, 64 bits, seed 0) covers every part.
//
// A sequence is one run of a session: its chunks of every layer begin at one position and follow
// each other without gaps. A session that was truncated, or that repeats a step, goes on as a new
// sequence. If a step was not captured in all layers, the sequence has the tokens that all layers
// have.
//
// Closing the file writes the header again. Readers read a file that was never closed (chunks is 0)
// up to its first incomplete chunk.
#ifndef KVQ_PROTO_CAPTURE_H
#define KVQ_PROTO_CAPTURE_H

#include <assert.h>
#include <stdint.h>

#include "proto/limits.h"

#define KVQ_CAPTURE_MAGIC "KVQCAPT1"

enum {
    KVQ_CAPTURE_CHUNK_MAGIC = 0x6b6e7563, // "cunk"
    KVQ_CAPTURE_HAS_QUERIES = 1,          // header flag
    KVQ_CAPTURE_ALIGN = 64,
};

struct kvq_capture_header {
    char magic[8];
    uint64_t check; // of header and rows, with this field 0
    uint32_t layers, flags;
    uint64_t chunks; // in the whole file; 0: not closed
    uint64_t bytes;  // of the whole file; 0: not closed
    uint64_t tokens; // of all sequences together, counted once for all layers; 0: not closed
    uint8_t zero[16];
    char model[KVQ_FINGERPRINT_BYTES]; // UTF-8, ended by 0
};
static_assert(sizeof(struct kvq_capture_header) == 320, "the header has no gaps");

// All 0 for a layer that reads another layer's cache.
struct kvq_capture_row {
    uint16_t q_heads, kv_heads, k_dim, v_dim;
};
static_assert(sizeof(struct kvq_capture_row) == 8, "a row has no gaps");

struct kvq_capture_chunk {
    uint32_t magic;
    uint16_t layer;
    uint8_t k_dtype, v_dtype;  // enum kvq_dtype: 1 fp16, 2 bf16, 3 fp32
    uint32_t sequence, tokens; // numbers from 0; at least 1 token
    uint64_t position;         // of the first token
    uint64_t bytes;            // of K, V and Q, without the zeros behind them
    uint64_t data_check;       // of these bytes
    uint8_t q_dtype;           // 0 if the file has no queries
    uint8_t zero[15];
    uint64_t check; // of this header up to here
};
static_assert(sizeof(struct kvq_capture_chunk) == KVQ_CAPTURE_ALIGN, "one cache line");

// Bytes of the header and rows, with the zeros behind them.
static inline uint64_t kvq_capture_first_chunk(uint32_t layers)
{
    uint64_t n =
        sizeof(struct kvq_capture_header) + (uint64_t)layers * sizeof(struct kvq_capture_row);
    return (n + KVQ_CAPTURE_ALIGN - 1) / KVQ_CAPTURE_ALIGN * KVQ_CAPTURE_ALIGN;
}

// Bytes of one element of a dtype; 0 for an unknown one.
static inline uint64_t kvq_capture_element(uint8_t dtype)
{
    return dtype == 1 || dtype == 2 ? 2 : dtype == 3 ? 4 : 0;
}

// The value that chunk->bytes must have. Exact for values within proto/limits.h.
static inline uint64_t kvq_capture_data_bytes(const struct kvq_capture_row *row,
                                              const struct kvq_capture_chunk *chunk)
{
    uint64_t token = (uint64_t)row->kv_heads * row->k_dim * kvq_capture_element(chunk->k_dtype) +
                     (uint64_t)row->kv_heads * row->v_dim * kvq_capture_element(chunk->v_dtype) +
                     (uint64_t)row->q_heads * row->k_dim * kvq_capture_element(chunk->q_dtype);
    return token * chunk->tokens;
}

#endif
