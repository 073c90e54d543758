// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the reader of capture files. A file's checks would keep the fuzzer at the door, so they
// are made right before it is opened; then all that it says it holds is read.
#define XXH_INLINE_ALL
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "storage/capture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void mend_header(uint8_t *bytes, size_t size)
{
    struct kvq_capture_header h;
    memcpy(&h, bytes, sizeof h);
    if (h.layers > KVQ_MAX_LAYERS || size - sizeof h < h.layers * sizeof(struct kvq_capture_row))
        return;
    memcpy(h.magic, KVQ_CAPTURE_MAGIC, sizeof h.magic);
    h.bytes = h.chunks ? size : h.bytes;
    h.check = 0;
    memcpy(bytes, &h, sizeof h);
    h.check = XXH3_64bits(bytes, sizeof h + h.layers * sizeof(struct kvq_capture_row));
    memcpy(bytes, &h, sizeof h);
}

static void mend_chunks(uint8_t *bytes, size_t size)
{
    struct kvq_capture_chunk k;
    for (size_t at = 0; size >= sizeof k && at <= size - sizeof k; at += KVQ_CAPTURE_ALIGN) {
        memcpy(&k, bytes + at, sizeof k);
        if (k.magic != KVQ_CAPTURE_CHUNK_MAGIC)
            continue;
        if (k.bytes <= size - at - sizeof k)
            k.data_check = XXH3_64bits(bytes + at + sizeof k, k.bytes);
        k.check = XXH3_64bits(&k, offsetof(struct kvq_capture_chunk, check));
        memcpy(bytes + at, &k, sizeof k);
    }
}

static void read_all(const struct kvq_capture_file *f)
{
    const struct kvq_capture_info *info = kvq_capture_file_info(f);
    for (uint32_t s = 0; s < info->sequences && s < 8; s++)
        for (uint32_t layer = 0; layer < info->layers; layer++) {
            uint64_t tokens = kvq_capture_file_tokens(f, s);
            for (int part = 0; part < 3 && tokens; part++) {
                const struct kvq_capture_row *r = kvq_capture_file_row(f, layer);
                uint32_t dim = part == KVQ_CAPTURE_V ? r->v_dim : r->k_dim;
                float *out = malloc((tokens * dim + 1) * sizeof *out);
                for (uint32_t h = 0; out && h <= r->kv_heads && h < 4; h++)
                    kvq_capture_file_read(f, s, layer, (enum kvq_capture_part)part, h, 0, tokens,
                                          out, NULL, 0);
                free(out);
            }
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[400];
    struct kvq_capture_file *f = NULL;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    uint8_t *copy = malloc(size + 1);
    if (fd < 0 || !copy)
        abort();
    memcpy(copy, data, size);
    if (size >= sizeof(struct kvq_capture_header)) {
        mend_header(copy, size);
        mend_chunks(copy, size);
    }
    if (write(fd, copy, size) != (ssize_t)size)
        abort();
    if (kvq_capture_file_open_fd(fd, "fuzz", &f, text, sizeof text) == 0)
        read_all(f);
    else if (!*text)
        abort();
    kvq_capture_file_close(&f);
    free(copy);
    return 0;
}
