// SPDX-License-Identifier: Apache-2.0
//
// What whoever chooses a format wants to know of it besides its bytes. All of it holds at every
// head_dim.
#ifndef KVQ_KERNELS_CHOICE_H
#define KVQ_KERNELS_CHOICE_H

#include "kernels/kernels.h"

// Names of the table to begin with, the fewest bits first; NULL ends them. docs/quality.md says
// which is for what.
extern const char *const kvq_recommended_formats[];
bool kvq_format_is_recommended(const struct kvq_format *f);

// Whether CPUs have a fast path for it.
bool kvq_has_fast_path(const struct kvq_format *f);
// Whether the GPU's kernels have a loop for its packed tokens; others go through the one for all
// formats, which is slow. With codebooks: of vecinfer-*, whose sub-vectors share a table.
bool kvq_has_gpu_loop(const struct kvq_format *f);
// Whether sessions that begin with the same tokens can share the blocks of these: not with outliers
// or factors of the prompt, which are one session's own.
bool kvq_shares_prefixes(const struct kvq_format *f);

#endif
