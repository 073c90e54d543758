// SPDX-License-Identifier: Apache-2.0
//
// Chunks of a session's file, the packs that they lie in, and the text that names both.
#include "storage/remote_index.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/remote.h"
#include "storage/remote_reply.h"

#define FIRST_LINE "kvq-session "

// Larger chunks than this have no place in memory.
#define MAX_CHUNK_BYTES (256ull << 20)

void kvq__index_free(struct kvq__index *index)
{
    free(index->chunks);
    *index = (struct kvq__index){0};
}

// ---- Cutting ----

uint64_t kvq__chunk_about(uint64_t bytes, uint64_t part_bytes)
{
    enum { IN_PART = 16, MOST = KVQ__INDEX_CHUNKS / 8 };
    uint64_t about = 1024;
    while (about * 2 <= part_bytes / IN_PART || bytes / about >= MOST)
        about *= 2;
    return about;
}

size_t kvq__chunk_most(uint64_t about)
{
    return (size_t)(about * 4 < MAX_CHUNK_BYTES ? about * 4 : MAX_CHUNK_BYTES);
}

// A number for each byte, as good as random.
static uint64_t gear(uint8_t byte)
{
    uint64_t x = (byte + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// A chunk ends behind the byte at which a sum over the last 64 bytes has so many zeros in front.
size_t kvq__chunk_end(const uint8_t *data, size_t n, uint64_t about)
{
    assert(n > 0 && about >= 4 && (about & (about - 1)) == 0);
    uint64_t table[256], sum = 0, mask = ~(UINT64_MAX / about); // about is a power of two
    size_t most = kvq__chunk_most(about), least = about / 4 < most ? (size_t)(about / 4) : most;
    if (n <= least)
        return n;
    for (int i = 0; i < 256; i++)
        table[i] = gear((uint8_t)i);
    most = n < most ? n : most;
    for (size_t i = least; i < most; i++) {
        sum = (sum << 1) + table[data[i]];
        if ((sum & mask) == 0)
            return i + 1;
    }
    return most;
}

static struct kvq__chunk *next_chunk(struct kvq__index *index)
{
    if (index->n_chunks == index->room) {
        uint32_t room = index->room ? 2 * index->room : 64;
        void *more = realloc(index->chunks, room * sizeof *index->chunks);
        if (!more)
            return NULL;
        index->chunks = more;
        index->room = room;
    }
    return &index->chunks[index->n_chunks++];
}

int kvq__index_add(struct kvq__index *index, const void *data, size_t n)
{
    assert(n > 0);
    struct kvq__chunk *chunk = next_chunk(index);
    if (!chunk)
        return KVQ_E_NO_MEMORY;
    *chunk = (struct kvq__chunk){.size = n};
    index->bytes += n;
    return kvq__sha256(data, n, chunk->sha);
}

// ---- Placing ----

static int by_sha(const void *a, const void *b)
{
    const struct kvq__chunk *x = *(const struct kvq__chunk *const *)a;
    const struct kvq__chunk *y = *(const struct kvq__chunk *const *)b;
    int order = memcmp(x->sha, y->sha, sizeof x->sha);
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

// All of it in one new pack.
static void place_fresh(struct kvq__index *to, uint64_t *fresh)
{
    uint64_t at = 0;
    to->n_packs = 1;
    to->packs[0] = (struct kvq__pack){.bytes = to->bytes};
    for (uint32_t i = 0; i < to->n_chunks; i++) {
        to->chunks[i].pack = 0;
        to->chunks[i].at = at;
        at += to->chunks[i].size;
    }
    assert(at == to->bytes);
    *fresh = at;
}

// Where the packs of `had` that are needed come in the list of `to`, -1: they do not; then the new
// one, which `fresh` bytes go to. False: it would be a waste.
static bool number_packs(struct kvq__index *to, const struct kvq__index *had, const bool *needed,
                         int *number, uint64_t fresh)
{
    uint64_t kept = 0;
    to->n_packs = 0;
    for (uint32_t i = 0; i < had->n_packs; i++) {
        number[i] = needed[i] ? (int)to->n_packs : -1;
        if (!needed[i])
            continue;
        to->packs[to->n_packs++] = had->packs[i];
        kept += had->packs[i].bytes;
    }
    if (to->n_packs == KVQ__INDEX_PACKS || kept + fresh > 2 * to->bytes)
        return false;
    assert(to->n_packs < KVQ__INDEX_PACKS);
    if (fresh)
        to->packs[to->n_packs++] = (struct kvq__pack){.bytes = fresh};
    return true;
}

int kvq__index_place(struct kvq__index *to, const struct kvq__index *had, uint64_t *fresh)
{
    uint32_t n = had ? had->n_chunks : 0;
    const struct kvq__chunk **sorted = malloc((n + 1) * sizeof *sorted);
    const struct kvq__chunk **found = calloc(to->n_chunks + 1, sizeof *found);
    bool needed[KVQ__INDEX_PACKS] = {false};
    int number[KVQ__INDEX_PACKS];
    uint64_t at = 0;
    int rc = sorted && found ? 0 : KVQ_E_NO_MEMORY;
    for (uint32_t i = 0; i < n && rc == 0; i++)
        sorted[i] = &had->chunks[i];
    if (n > 1 && rc == 0)
        qsort(sorted, n, sizeof *sorted, by_sha);
    for (uint32_t i = 0; i < to->n_chunks && rc == 0; i++) {
        const struct kvq__chunk *key = &to->chunks[i];
        const struct kvq__chunk **same =
            n ? bsearch(&key, sorted, n, sizeof *sorted, by_sha) : NULL;
        found[i] = same ? *same : NULL;
        assert(!same || (*same)->pack < had->n_packs);
        if (same)
            needed[(*same)->pack] = true;
        at += same ? 0 : key->size;
    }
    *fresh = at;
    if (rc == 0 && (!had || !number_packs(to, had, needed, number, at))) {
        place_fresh(to, fresh);
    } else if (rc == 0) {
        at = 0;
        for (uint32_t i = 0; i < to->n_chunks; i++) {
            struct kvq__chunk *c = &to->chunks[i];
            c->pack = found[i] ? (uint32_t)number[found[i]->pack] : to->n_packs - 1;
            c->at = found[i] ? found[i]->at : at;
            at += found[i] ? 0 : c->size;
            assert(c->pack < to->n_packs && c->at + c->size <= to->packs[c->pack].bytes);
        }
    }
    free(sorted);
    free(found);
    return rc;
}

// ---- Writing ----

int kvq__index_write(const struct kvq__index *index, char **text, size_t *n)
{
    char hex[KVQ__SHA_HEX];
    *text = NULL;
    FILE *out = open_memstream(text, n);
    if (!out)
        return KVQ_E_NO_MEMORY;
    fprintf(out, FIRST_LINE "2\nbytes %" PRIu64 "\npacks %" PRIu32 "\n", index->bytes,
            index->n_packs);
    for (uint32_t i = 0; i < index->n_packs; i++)
        fprintf(out, "%s %" PRIu64 "\n", index->packs[i].digest, index->packs[i].bytes);
    fprintf(out, "chunks %" PRIu32 "\n", index->n_chunks);
    for (uint32_t i = 0; i < index->n_chunks; i++) {
        const struct kvq__chunk *c = &index->chunks[i];
        assert(c->pack < index->n_packs);
        kvq__sha_hex(c->sha, hex);
        fprintf(out, "%" PRIu64 " %" PRIu32 " %" PRIu64 " %s\n", c->size, c->pack, c->at, hex);
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
    char line[160];
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

static bool is_end(struct lines *r)
{
    return next_line(r) && strcmp(r->line, "end") == 0 && r->at == r->end;
}

static bool read_sha(const char *hex, uint8_t out[KVQ__SHA_BYTES])
{
    char again[KVQ__SHA_HEX];
    if (strlen(hex) != KVQ__SHA_HEX - 1)
        return false;
    for (int i = 0; i < KVQ__SHA_BYTES; i++) {
        const char pair[3] = {hex[2 * i], hex[2 * i + 1], '\0'};
        out[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    kvq__sha_hex(out, again); // what is no digit comes out different, and so do capitals
    return strcmp(again, hex) == 0;
}

// Up to `most` fields of the line, in place. How many there are.
static int split_fields(char *line, char **fields, int most)
{
    int n = 0;
    for (char *at = line; at && n < most; n++) {
        fields[n] = at;
        at = strchr(at, ' ');
        if (at)
            *at++ = '\0';
    }
    return n;
}

static int read_parts(struct lines *r, const char *text, size_t n, struct kvq__index *x)
{
    uint64_t part_bytes;
    uint8_t sha[KVQ__SHA_BYTES];
    int rc;
    if (!next_number(r, "bytes ", INT64_MAX, &x->bytes) ||
        !next_number(r, "part ", MAX_CHUNK_BYTES, &part_bytes) || x->bytes == 0 ||
        part_bytes == 0 || (x->bytes - 1) / part_bytes >= KVQ_REMOTE_MAX_PARTS)
        return KVQ_E_DAMAGED;
    if ((rc = kvq__sha256(text, n, sha)) != 0)
        return rc;
    x->n_packs = 1;
    x->packs[0].bytes = x->bytes;
    kvq__sha_hex(sha, x->packs[0].digest);
    for (uint64_t at = 0; at < x->bytes; at += part_bytes) {
        struct kvq__chunk *c = next_chunk(x);
        if (!c)
            return KVQ_E_NO_MEMORY;
        if (!next_line(r) || !read_sha(r->line, c->sha))
            return KVQ_E_DAMAGED;
        c->pack = 0;
        c->at = at;
        c->size = x->bytes - at < part_bytes ? x->bytes - at : part_bytes;
    }
    return 0;
}

static bool read_pack_line(struct lines *r, struct kvq__pack *pack)
{
    char *field[2];
    uint8_t sha[KVQ__SHA_BYTES];
    if (!next_line(r) || split_fields(r->line, field, 2) != 2 || !read_sha(field[0], sha) ||
        !kvq__reply_number(field[1], INT64_MAX, &pack->bytes))
        return false;
    memcpy(pack->digest, field[0], sizeof pack->digest);
    return true;
}

static bool read_chunk_line(struct lines *r, const struct kvq__index *x, struct kvq__chunk *c)
{
    char *field[4];
    uint64_t pack;
    if (!next_line(r) || split_fields(r->line, field, 4) != 4 || x->n_packs == 0 ||
        !kvq__reply_number(field[0], MAX_CHUNK_BYTES, &c->size) ||
        !kvq__reply_number(field[1], x->n_packs - 1, &pack) ||
        !kvq__reply_number(field[2], INT64_MAX, &c->at) || !read_sha(field[3], c->sha))
        return false;
    c->pack = (uint32_t)pack;
    uint64_t all = x->packs[pack].bytes;
    return c->size > 0 && c->at <= all && c->size <= all - c->at;
}

static int read_packs(struct lines *r, struct kvq__index *x)
{
    uint64_t packs, chunks, sum = 0;
    if (!next_number(r, "bytes ", INT64_MAX, &x->bytes) || x->bytes == 0 ||
        !next_number(r, "packs ", KVQ__INDEX_PACKS, &packs))
        return KVQ_E_DAMAGED;
    for (; x->n_packs < packs; x->n_packs++)
        if (!read_pack_line(r, &x->packs[x->n_packs]))
            return KVQ_E_DAMAGED;
    if (!next_number(r, "chunks ", KVQ__INDEX_CHUNKS, &chunks))
        return KVQ_E_DAMAGED;
    for (uint64_t i = 0; i < chunks; i++) {
        struct kvq__chunk *c = next_chunk(x);
        if (!c)
            return KVQ_E_NO_MEMORY;
        if (!read_chunk_line(r, x, c))
            return KVQ_E_DAMAGED;
        sum += c->size; // at most 2^15 times 2^28
    }
    return sum == x->bytes ? 0 : KVQ_E_DAMAGED;
}

int kvq__index_read(const char *text, size_t n, struct kvq__index *index, const char **why)
{
    struct lines r = {.at = text, .end = text + n};
    uint64_t version;
    *index = (struct kvq__index){0};
    *why = "it is not the head of a session";
    if (!next_number(&r, FIRST_LINE, UINT32_MAX, &version))
        return KVQ_E_DAMAGED;
    if (version != 1 && version != 2) {
        *why = "it was pushed by a newer version of kvq; pull it with that version";
        return KVQ_E_VERSION;
    }
    int rc = version == 1 ? read_parts(&r, text, n, index) : read_packs(&r, index);
    if (rc == 0 && !is_end(&r))
        rc = KVQ_E_DAMAGED;
    if (rc == KVQ_E_NO_MEMORY)
        *why = "no memory";
    else if (rc == KVQ_E_SYSTEM)
        *why = "its SHA-256 cannot be computed";
    if (rc)
        kvq__index_free(index);
    return rc;
}
