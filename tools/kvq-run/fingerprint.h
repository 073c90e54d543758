// SPDX-License-Identifier: Apache-2.0
//
// What tells one checkpoint from another, for caches and results that must not be mixed up.
#ifndef KVQ_RUN_FINGERPRINT_H
#define KVQ_RUN_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

#include "tools/kvq-run/model.h"

// XXH3 over n bytes, on from h, which is 0 at first. It is no protection against somebody who
// forges what is hashed.
uint64_t fingerprint_bytes(uint64_t h, const void *data, size_t n);

// Writes the model's fingerprint: shapes in words, and a hash of all of RoPE, norms and windows and
// of every tensor that is bound, with its name, shape and dtype. Weights as they are in the file,
// not yet folded.
void fingerprint_model(const struct model *m, char *out, size_t n);

#endif
