// SPDX-License-Identifier: Apache-2.0
//
// The rotation of V in the weights (OScaR, Algorithm 1, OScaR-Preprocess), where it costs nothing
// in a step: W_V and its bias give V times H / sqrt(dim) in each KV head, and W_O undoes it in each
// query head. H is Sylvester's matrix, as kvqd's own rotation has it, which is its own inverse:
// with the same W_V and W_O the model's function stays what it is.
#ifndef KVQ_RUN_FOLD_H
#define KVQ_RUN_FOLD_H

#include "tools/kvq-run/tensors.h"

// dim must be a power of two. *out gets rotated values in fp32, so that nothing is rounded to the
// file's dtype again. Released with fold_free.

// Rows [heads][dim] of a matrix, or the values of a bias (dims 1).
int fold_rows(const struct tensor *from, uint32_t dim, struct tensor *out, struct problem *p);
// Columns [heads][dim] of a matrix.
int fold_columns(const struct tensor *from, uint32_t dim, struct tensor *out, struct problem *p);
void fold_free(struct tensor *out);

#endif
