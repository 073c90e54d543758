// SPDX-License-Identifier: Apache-2.0
//
// The layers of a model as a KV cache sees them, from a Hugging Face config.json: how many, with
// how many KV heads of how many channels, and which of them have a sliding window.
#ifndef KVQ_TOOLS_KVQCTL_MODEL_H
#define KVQ_TOOLS_KVQCTL_MODEL_H

#include "proto/limits.h"
#include "tools/kvqctl/kvqctl.h"

struct kvq__ctl_model {
    uint32_t layers, kv_heads, head_dim;
    uint32_t windows[KVQ_MAX_LAYERS]; // tokens that a layer sees; 0: all
};

// Reads a config.json, or the one in a folder. Numbers of `asked` that are given stand in for those
// of the file. Refuses what the file leaves open, and layers that kvqd has no sessions for. -1,
// with what is missing and what to give in its place in `why`.
int kvq__ctl_read_model(const char *path, const struct kvq__ctl_shape *asked,
                        struct kvq__ctl_model *model, char *why, size_t n);
// The same of the file's text.
int kvq__ctl_parse_model(const char *text, size_t bytes, const struct kvq__ctl_shape *asked,
                         struct kvq__ctl_model *model, char *why, size_t n);

#endif
