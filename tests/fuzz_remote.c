// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes what reads a remote store's words: XML replies, heads of sessions, and the header
// Content-Range. The first byte says which.
#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_parts.h"
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

// A head that is taken is written again as the same parts.
static void read_head(const uint8_t *data, size_t size)
{
    struct kvq__parts parts, again;
    const char *why = NULL;
    char *text = NULL;
    size_t n = 0;
    if (kvq__parts_read((const char *)data, size, &parts, &why) != 0) {
        assert(why && !parts.sha);
        return;
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < parts.count; i++)
        sum += kvq__part_size(&parts, i);
    assert(sum == parts.bytes);
    if (kvq__parts_write(&parts, &text, &n) == 0 && kvq__parts_read(text, n, &again, &why) == 0) {
        assert(again.bytes == parts.bytes && again.part_bytes == parts.part_bytes &&
               memcmp(again.sha, parts.sha, parts.count * sizeof *parts.sha) == 0);
        kvq__parts_free(&again);
    }
    free(text);
    kvq__parts_free(&parts);
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
