// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes kvq-run's model files. The first byte chooses: safetensors, whose tensors are then read
// from end to end, or config.json.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-run/config.h"
#include "tools/kvq-run/linear.h"
#include "tools/kvq-run/rope.h"
#include "tools/kvq-run/tensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_tensors(const uint8_t *data, size_t size)
{
    struct problem p = {0};
    struct tensors *t = tensors_new();
    // Data of a file starts at a page; here at least at a cache line.
    uint8_t *copy = aligned_alloc(64, (size + 64) / 64 * 64);
    if (t && copy) {
        memcpy(copy, data, size);
        if (!tensors_parse(t, "fuzz", copy, size, &p)) {
            const struct tensor *w = tensors_find(t, "w");
            uint64_t n = w ? 1 : 0;
            for (int i = 0; w && i < w->dims; i++)
                n *= w->shape[i];
            for (uint64_t i = 0; i < n; i++) {
                float f;
                tensor_widen(w, i, 1, &f);
            }
        }
    }
    tensors_close(&t);
    free(copy);
}

static void try_config(const uint8_t *data, size_t size)
{
    struct problem p = {0};
    struct config c;
    if (config_parse((const char *)data, size, &c, &p) || c.head_dim > 512)
        return;
    float freq[256];
    rope_frequencies(&c.rope, c.head_dim, freq);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    if (data[0] & 1)
        try_config(data + 1, size - 1);
    else
        try_tensors(data + 1, size - 1);
    return 0;
}
