// SPDX-License-Identifier: Apache-2.0
//
// How the host cuts batches of attention on a GPU, and what their formats take, for gpu_cost.py to
// compare its own with. One JSON object a line:
//
//     gpu_cost_plan TOKENS,TOKENS.. KV_HEADS HEAD_DIM FORMAT..          of each session
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attend.h"

enum { MOST_SESSIONS = 64 };

// Numbers with commas between them; how many.
static uint32_t numbers(const char *text, uint32_t *found, uint32_t most)
{
    uint32_t n = 0;
    char *end = NULL;
    for (; n < most && *text; text = *end ? end + 1 : end)
        found[n++] = (uint32_t)strtoul(text, &end, 10);
    return n;
}

// Bytes of shared memory that a block of threads of the format's own loop has.
static uint32_t shared_of(const struct kvq_format *f, uint32_t dim)
{
    uint32_t bits = f->k.bits, raw = KVQ_GPU_RAW_STAGE(dim), stages;
    if (f->k.group == KVQ_GROUP_TOKENS)
        stages = KVQ_GPU_AFFINE_STAGES(dim, bits);
    else
        stages = KVQ_GPU_SHARED_STAGES(dim, bits);
    return KVQ_GPU_NARROW_BYTES(dim, 8, KVQ_GPU_MOST(stages, raw), KVQ_GPU_APART(dim, 8, bits));
}

static int plan(const uint32_t *tokens, uint32_t n, const struct kvq_shape *shape,
                const struct kvq_format *f)
{
    struct kvq_gpu_layer layer = {.format = f, .shape = shape, .wide_rows = 128};
    struct kvq_gpu_attend_limits limits;
    struct kvq_attend calls[MOST_SESSIONS] = {0};
    char text[256];
    for (uint32_t i = 0; i < n; i++) {
        calls[i].past_tokens = calls[i].q_start = tokens[i];
        calls[i].q_tokens = 1;
    }
    void *batch = NULL;
    int bad = kvq_gpu_attend_needs(&layer, calls, NULL, n, &limits, text, sizeof text);
    if (!bad)
        batch = calloc(1, kvq_gpu_attend_batch_bytes(&limits));
    bad = bad || !batch ||
          kvq_gpu_attend_fill(&layer, calls, NULL, n, &limits, batch, text, sizeof text);
    if (!bad) {
        struct kvq_layout layout = kvq_layout_of(f, shape);
        const uint32_t *header = batch;
        struct kvq_gpu_session first;
        memcpy(&first, (const char *)batch + 64, sizeof first); // behind the header
        printf("{\"format\": \"%s\", \"items\": %u, \"rows\": %u, \"whole\": %u, "
               "\"cost\": %u, \"split_tokens\": %u, \"record_bytes\": %u, "
               "\"shared_bytes\": %u, \"first_tokens\": %u}\n",
               f->name, limits.narrow_items, limits.narrow_rows, header[KVQ_GPU_WHOLE_WORD],
               header[KVQ_GPU_COST_WORD], first.split_tokens, layout.record_bytes,
               shared_of(f, shape->k_dim), f->sink_tokens);
    }
    free(batch);
    return bad;
}

int main(int n, char **arguments)
{
    uint32_t tokens[MOST_SESSIONS], sessions, heads, dim;
    if (n < 5)
        return 2;
    sessions = numbers(arguments[1], tokens, MOST_SESSIONS);
    if (numbers(arguments[2], &heads, 1) != 1 || numbers(arguments[3], &dim, 1) != 1)
        return 2;
    struct kvq_shape shape = {.dtype = KVQ_BF16, .scale = 0.1f};
    shape.kv_heads = (uint16_t)heads;
    shape.q_heads = (uint16_t)(4 * heads);
    shape.k_dim = shape.v_dim = (uint16_t)dim;
    for (int i = 4; i < n; i++) {
        struct kvq_format f;
        char text[256];
        if (kvq_format_parse(arguments[i], &f, text, sizeof text) ||
            plan(tokens, sessions, &shape, &f))
            return 1;
    }
    return 0;
}
