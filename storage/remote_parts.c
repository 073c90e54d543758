// SPDX-License-Identifier: Apache-2.0
//
// Checksums of a session's parts, and the text that names them.
#include "storage/remote_parts.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/remote.h"
#include "storage/remote_reply.h"

#define FIRST_LINE "kvq-session "

// Larger parts than this have no place in memory; 10,000 of them are 2.5 TiB.
#define MAX_PART_BYTES (256ull << 20)

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
    uint64_t left = parts->bytes - i * parts->part_bytes;
    return (size_t)(left < parts->part_bytes ? left : parts->part_bytes);
}

int kvq__parts_write(const struct kvq__parts *parts, char **text, size_t *n)
{
    *text = NULL;
    FILE *out = open_memstream(text, n);
    if (!out)
        return KVQ_E_NO_MEMORY;
    fprintf(out, FIRST_LINE "1\nbytes %" PRIu64 "\npart %" PRIu64 "\n", parts->bytes,
            parts->part_bytes);
    for (uint32_t i = 0; i < parts->count; i++) {
        char hex[KVQ__SHA_HEX];
        kvq__sha_hex(parts->sha[i], hex);
        fprintf(out, "%s\n", hex);
    }
    fprintf(out, "end\n");
    if (fclose(out) == 0)
        return 0;
    free(*text);
    *text = NULL;
    return KVQ_E_NO_MEMORY;
}

// ---- Reading ----

struct lines {
    const char *at, *end;
    char line[96];
};

// The next line without its newline, in r->line. False: there is none, or it is too long.
static bool next_line(struct lines *r)
{
    const char *stop = memchr(r->at, '\n', (size_t)(r->end - r->at));
    if (!stop || (size_t)(stop - r->at) >= sizeof r->line)
        return false;
    size_t n = (size_t)(stop - r->at);
    memcpy(r->line, r->at, n);
    r->line[n] = '\0';
    r->at = stop + 1;
    return strlen(r->line) == n;
}

// A line of a word, a space and a number.
static bool next_number(struct lines *r, const char *word, uint64_t max, uint64_t *out)
{
    size_t n = strlen(word);
    return next_line(r) && strncmp(r->line, word, n) == 0 &&
           kvq__reply_number(r->line + n, max, out);
}

static bool next_sha(struct lines *r, uint8_t out[KVQ__SHA_BYTES])
{
    char again[KVQ__SHA_HEX];
    if (!next_line(r) || strlen(r->line) != KVQ__SHA_HEX - 1)
        return false;
    for (int i = 0; i < KVQ__SHA_BYTES; i++) {
        const char pair[3] = {r->line[2 * i], r->line[2 * i + 1], '\0'};
        out[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    kvq__sha_hex(out, again); // what is no digit comes out different, and so do capitals
    return strcmp(again, r->line) == 0;
}

int kvq__parts_read(const char *text, size_t n, struct kvq__parts *parts, const char **why)
{
    struct lines r = {.at = text, .end = text + n};
    uint64_t version, bytes, part_bytes;
    memset(parts, 0, sizeof *parts);
    *why = "it is not the head of a session";
    if (!next_number(&r, FIRST_LINE, UINT32_MAX, &version))
        return KVQ_E_DAMAGED;
    if (version != 1) {
        *why = "it was pushed by a newer version of kvq; pull it with that version";
        return KVQ_E_VERSION;
    }
    if (!next_number(&r, "bytes ", INT64_MAX, &bytes) ||
        !next_number(&r, "part ", MAX_PART_BYTES, &part_bytes) || bytes == 0 || part_bytes == 0 ||
        count_parts(bytes, part_bytes) > KVQ_REMOTE_MAX_PARTS)
        return KVQ_E_DAMAGED;
    if (kvq__parts_make(parts, bytes, part_bytes) != 0) {
        *why = "there is no memory to read it";
        return KVQ_E_NO_MEMORY;
    }
    bool good = true;
    for (uint32_t i = 0; good && i < parts->count; i++)
        good = next_sha(&r, parts->sha[i]);
    if (good && next_line(&r) && strcmp(r.line, "end") == 0 && r.at == r.end)
        return 0;
    kvq__parts_free(parts);
    return KVQ_E_DAMAGED;
}
