// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes what reads a remote store's words: XML replies, heads of sessions, and the header
// Content-Range. The first byte says which.
#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_index.h"
#include "storage/remote_reply.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int on_item(void *context, const struct kvq__reply_item *item)
{
    unsigned *items = context;
    assert(memchr(item->key, 0, sizeof item->key) && memchr(item->etag, 0, sizeof item->etag) &&
           memchr(item->upload, 0, sizeof item->upload) && item->bytes <= INT64_MAX);
    return ++*items == 900 ? 1 : 0;
}

static void read_reply(const uint8_t *data, size_t size)
{
    struct kvq__reply reply;
    const char *why = NULL;
    unsigned items = 0;
    int rc = kvq__reply_parse(data, size, &reply, on_item, &items, &why);
    assert(memchr(reply.code, 0, sizeof reply.code) && memchr(reply.next, 0, sizeof reply.next) &&
           memchr(reply.message, 0, sizeof reply.message) &&
           memchr(reply.root, 0, sizeof reply.root) &&
           memchr(reply.upload, 0, sizeof reply.upload));
    assert(rc == 0 || (rc == 1 && items == 900) || why);
}

// A head that is taken is written again as the same chunks, each of which lies in its pack.
static void read_head(const uint8_t *data, size_t size)
{
    struct kvq__index index, again;
    const char *why = NULL;
    char *text = NULL;
    size_t n = 0;
    if (kvq__index_read((const char *)data, size, &index, &why) != 0) {
        assert(why && !index.chunks);
        return;
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < index.n_chunks; i++) {
        const struct kvq__chunk *c = &index.chunks[i];
        assert(c->pack < index.n_packs && c->at + c->size <= index.packs[c->pack].bytes);
        sum += c->size;
    }
    assert(sum == index.bytes);
    if (kvq__index_write(&index, &text, &n) == 0 && kvq__index_read(text, n, &again, &why) == 0) {
        assert(again.bytes == index.bytes && again.n_chunks == index.n_chunks);
        for (uint32_t i = 0; i < index.n_chunks; i++) {
            const struct kvq__chunk *a = &index.chunks[i], *b = &again.chunks[i];
            assert(a->size == b->size && a->at == b->at && a->pack == b->pack &&
                   memcmp(a->sha, b->sha, sizeof a->sha) == 0);
        }
        kvq__index_free(&again);
    }
    free(text);
    kvq__index_free(&index);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    const uint8_t *rest = data + 1;
    size--;
    if (*data == 'x') {
        read_reply(rest, size);
    } else if (*data == 'h') {
        read_head(rest, size);
    } else {
        char value[128];
        uint64_t from, last, all;
        size_t n = size < sizeof value - 1 ? size : sizeof value - 1;
        memcpy(value, rest, n);
        value[n] = '\0';
        if (kvq__reply_range(value, &from, &last, &all))
            assert(from <= last && last < all);
    }
    return 0;
}
