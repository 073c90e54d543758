// SPDX-License-Identifier: Apache-2.0
//
// Checksums, and the parts that an object is uploaded in.
#include "storage/remote_parts.h"

#include <assert.h>
#include <openssl/evp.h>
#include <stdlib.h>

#include "proto/status.h"
#include "storage/remote.h"

int kvq__sha256(const void *data, size_t n, uint8_t out[KVQ__SHA_BYTES])
{
    unsigned length = 0;
    return EVP_Digest(data, n, out, &length, EVP_sha256(), NULL) == 1 && length == KVQ__SHA_BYTES
               ? 0
               : KVQ_E_SYSTEM;
}

void kvq__sha_hex(const uint8_t sha[KVQ__SHA_BYTES], char out[KVQ__SHA_HEX])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < KVQ__SHA_BYTES; i++) {
        out[2 * i] = digits[sha[i] >> 4];
        out[2 * i + 1] = digits[sha[i] & 15];
    }
    out[2 * KVQ__SHA_BYTES] = '\0';
}

static uint64_t count_parts(uint64_t bytes, uint64_t part_bytes)
{
    return bytes / part_bytes + (bytes % part_bytes != 0);
}

int kvq__parts_make(struct kvq__parts *parts, uint64_t bytes, uint64_t part_bytes)
{
    assert(part_bytes > 0);
    while (count_parts(bytes, part_bytes) > KVQ_REMOTE_MAX_PARTS)
        part_bytes *= 2;
    parts->bytes = bytes;
    parts->part_bytes = part_bytes;
    parts->count = (uint32_t)count_parts(bytes, part_bytes);
    parts->sha = calloc(parts->count ? parts->count : 1, sizeof *parts->sha);
    return parts->sha ? 0 : KVQ_E_NO_MEMORY;
}

void kvq__parts_free(struct kvq__parts *parts)
{
    free(parts->sha);
    parts->sha = NULL;
}

size_t kvq__part_size(const struct kvq__parts *parts, uint32_t i)
{
    assert(i < parts->count);
    uint64_t left = parts->bytes - i * parts->part_bytes;
    return (size_t)(left < parts->part_bytes ? left : parts->part_bytes);
}
