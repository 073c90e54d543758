// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the reader of codebook files. A file's checks would keep the fuzzer at the door, so they
// and the length are made right before it is opened; then every table is read to its last number.
#define XXH_INLINE_ALL
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "storage/codebook.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile float sink; // so that what is read is read

static void mend(uint8_t *bytes, size_t size)
{
    struct kvq_codebook_header h;
    memcpy(&h, bytes, sizeof h);
    size_t rows = h.layers * sizeof(struct kvq_codebook_row);
    if (h.layers > KVQ_MAX_LAYERS || size - sizeof h < rows)
        return;
    memcpy(h.magic, KVQ_CODEBOOK_MAGIC, sizeof h.magic);
    h.bytes = size;
    h.data_check = XXH3_64bits(bytes + sizeof h + rows, size - sizeof h - rows);
    h.check = 0;
    memcpy(bytes, &h, sizeof h);
    h.check = XXH3_64bits(bytes, sizeof h + rows);
    memcpy(bytes, &h, sizeof h);
}

static void read_tables(struct kvq_codebook *book, uint32_t layer)
{
    const struct kvq_codebook_header *h = kvq_codebook_head(book);
    const struct kvq_codebook_row *row = kvq_codebook_row(book, layer);
    struct kvq_codebook_tables t;
    struct kvq_book b;
    kvq_codebook_tables(book, layer, &t);
    if (row->kv_heads == 0)
        return;
    kvq_codebook_layer(book, layer, &b);
    size_t last = row->kv_heads - 1u;
    if (b.smooth)
        sink = b.smooth[(last + 1) * row->dim - 1];
    if (b.k)
        sink = b.k[last * b.k_head + (row->dim / h->k_vector - 1u) * b.k_sub +
                   ((size_t)h->k_vector << h->k_bits) - 1];
    if (b.v)
        sink = b.v[last * b.v_head + (row->dim / h->v_vector - 1u) * b.v_sub +
                   ((size_t)h->v_vector << h->v_bits) - 1];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[400] = "";
    struct kvq_codebook *book = NULL;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    uint8_t *copy = malloc(size + 1);
    if (fd < 0 || !copy)
        abort();
    if (size > 0)
        memcpy(copy, data, size);
    if (size >= sizeof(struct kvq_codebook_header))
        mend(copy, size);
    if (write(fd, copy, size) != (ssize_t)size)
        abort();
    if (kvq_codebook_open_fd(fd, "fuzz", &book, text, sizeof text) == 0) {
        for (uint32_t i = 0; i < kvq_codebook_head(book)->layers; i++)
            read_tables(book, i);
    } else if (!*text) {
        abort();
    }
    kvq_codebook_close(&book);
    free(copy);
    return 0;
}
