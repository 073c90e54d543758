// SPDX-License-Identifier: Apache-2.0
//
// Reading manifests, which are foreign bytes in a file that was exported elsewhere.
#include "storage/manifest.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "proto/wire.h"

uint64_t kvq_manifest_bytes(const struct kvq_manifest_head *head)
{
    return sizeof *head + (uint64_t)head->entries * sizeof(struct kvq_manifest_entry) +
           (uint64_t)head->prefixes * KVQ_PREFIX_BYTES + head->opaque_bytes;
}

int kvq_manifest_order(const struct kvq_manifest_entry *a, const struct kvq_manifest_entry *b)
{
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    if (a->page != b->page)
        return a->page < b->page ? -1 : 1;
    return (a->kind > b->kind) - (a->kind < b->kind);
}

static int check_text(const char *what, const char *bytes, size_t n, bool needed,
                      const struct kvq__complaint *c)
{
    size_t used = strnlen(bytes, n);
    if (used == n)
        return kvq__complain(c, KVQ_E_INVALID, "its %s does not end within %zu bytes", what, n);
    if (needed && used == 0)
        return kvq__complain(c, KVQ_E_INVALID, "its %s is empty", what);
    // No message could name it, not even to have it deleted.
    if (!kvq_text_valid(bytes, used))
        return kvq__complain(c, KVQ_E_INVALID, "its %s holds control characters or is not UTF-8",
                             what);
    return KVQ_OK;
}

static int check_manifest_head(const struct kvq_manifest_head *h, uint64_t n,
                               const struct kvq__complaint *c)
{
    if (h->version != KVQ_MANIFEST_VERSION)
        return kvq__complain(c, KVQ_E_VERSION, "a session is of version %u; this program knows %d",
                             h->version, KVQ_MANIFEST_VERSION);
    if (kvq_manifest_bytes(h) != n)
        return kvq__complain(c, KVQ_E_INVALID, "a session's parts need %llu bytes; it has %llu",
                             (unsigned long long)kvq_manifest_bytes(h), (unsigned long long)n);
    if (h->shards == 0 || h->shards > KVQ_MAX_SHARDS || h->shard >= h->shards)
        return kvq__complain(c, KVQ_E_INVALID, "it is shard %u of %u; at most %d are allowed",
                             h->shard, h->shards, KVQ_MAX_SHARDS);
    if (h->tokens > KVQ_MAX_SESSION_TOKENS)
        return kvq__complain(c, KVQ_E_INVALID, "it has %llu tokens; at most %d are allowed",
                             (unsigned long long)h->tokens, KVQ_MAX_SESSION_TOKENS);
    if (h->opaque_bytes > KVQ_MAX_STORE_META)
        return kvq__complain(c, KVQ_E_INVALID, "it has %u opaque bytes; at most %d are allowed",
                             h->opaque_bytes, KVQ_MAX_STORE_META);
    int rc = check_text("namespace", h->space, sizeof h->space, true, c);
    if (rc == KVQ_OK)
        rc = check_text("name", h->name, sizeof h->name, true, c);
    if (rc == KVQ_OK)
        rc = check_text("model", h->model, sizeof h->model, false, c);
    if (rc == KVQ_OK)
        rc = check_text("list of formats", h->formats, sizeof h->formats, false, c);
    return rc;
}

int kvq_manifest_read(const void *data, uint64_t n, struct kvq_manifest *m,
                      const struct kvq__complaint *c)
{
    const struct kvq_manifest_head *h = data;
    if (n < sizeof *h)
        return kvq__complain(c, KVQ_E_INVALID, "a session has %llu bytes; its front alone has %zu",
                             (unsigned long long)n, sizeof *h);
    int rc = check_manifest_head(h, n, c);
    if (rc)
        return rc;
    m->head = h;
    m->entries = (const void *)(h + 1);
    m->prefixes = (const void *)(m->entries + h->entries);
    m->opaque = (const uint8_t *)(m->prefixes + h->prefixes);
    for (uint32_t i = 0; i < h->entries; i++) {
        const struct kvq_manifest_entry *e = &m->entries[i];
        if (e->block == 0 || e->block >= KVQ_MAX_STORE_NUMBER || e->from >= KVQ_MAX_STORE_NUMBER)
            return kvq__complain(
                c, KVQ_E_INVALID,
                "entry %u names block %llu, token %llu; fewer than 2^62 are allowed", i,
                (unsigned long long)e->block, (unsigned long long)e->from);
        if (i > 0 && kvq_manifest_order(e - 1, e) >= 0)
            return kvq__complain(c, KVQ_E_INVALID, "entry %u is not behind the one before it", i);
    }
    return KVQ_OK;
}

static uint8_t *append_bytes(uint8_t *to, const void *from, size_t n)
{
    if (n)
        memcpy(to, from, n);
    return to + n;
}

void *kvq_manifest_make(const struct kvq_manifest *m)
{
    const struct kvq_manifest_head *h = m->head;
    uint8_t *bytes = malloc(kvq_manifest_bytes(h)), *at = bytes;
    if (!bytes)
        return NULL;
    at = append_bytes(at, h, sizeof *h);
    at = append_bytes(at, m->entries, h->entries * sizeof *m->entries);
    at = append_bytes(at, m->prefixes, (size_t)h->prefixes * KVQ_PREFIX_BYTES);
    at = append_bytes(at, m->opaque, h->opaque_bytes);
    assert((uint64_t)(at - bytes) == kvq_manifest_bytes(h));
    return bytes;
}
