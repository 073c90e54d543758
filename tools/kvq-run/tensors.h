// SPDX-License-Identifier: Apache-2.0
//
// Hugging Face checkpoints: *.safetensors, one file or shards, mapped read-only in their dtype.
//
// The files are foreign: every length, offset, shape and name is checked before it is used, and a
// file that breaks a rule is refused with a sentence that names the file, the tensor and the rule.
#ifndef KVQ_RUN_TENSORS_H
#define KVQ_RUN_TENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "tools/kvq-run/problem.h"

enum {
    TENSORS_MAX_DIMS = 4,
    TENSORS_MAX_COUNT = 100000, // tensors in all shards
    TENSORS_MAX_SHARDS = 512,
    TENSORS_MAX_HEADER = 100 << 20, // bytes of one file's JSON header, as the format says
    TENSORS_NAME_BYTES = 256,
};

enum tensor_dtype { TENSOR_F32, TENSOR_F16, TENSOR_BF16 };

struct tensor {
    char name[TENSORS_NAME_BYTES];
    const void *data; // little-endian, within the mapping; aligned to its element
    uint64_t shape[TENSORS_MAX_DIMS];
    uint8_t dims;
    uint8_t dtype; // enum tensor_dtype
};

struct tensors; // owns the mappings

// Opens model.safetensors, or the shards that model.safetensors.index.json names, in `dir`.
// Release with tensors_close. Not thread-safe; the mapped data may be read by any thread.
int tensors_open(const char *dir, struct tensors **out, struct problem *p);
void tensors_close(struct tensors **t);

// NULL if there is none of that name.
const struct tensor *tensors_find(const struct tensors *t, const char *name);
uint64_t tensors_bytes(const struct tensors *t);

// Parses one file's bytes into `t` (for files in memory: tests and the fuzzer). `data` must
// outlive t.
int tensors_parse(struct tensors *t, const char *file, const uint8_t *data, uint64_t bytes,
                  struct problem *p);
struct tensors *tensors_new(void);

#endif
