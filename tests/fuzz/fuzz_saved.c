// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes what a store keeps of a session besides its blocks: foreign bytes are taken apart, packed
// and taken apart again, which must give the same; and a core makes the session that they describe,
// cut at some token, with blocks of any bytes. Whatever they say, nothing but a refusal may come of
// it, and the core's books are right, which are counted anew.
//
// An input is one byte that says where the session is cut (255: nowhere), then the message.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/saved_internal.h"
#include "daemon/store/saved_wire.h"
#include "tests/core/core_kit.h"

enum { MIB = 1 << 20, POOL = 24 * MIB, PAGES = 20000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t scratch[KVQ__SAVED_BYTES + KVQ_WIRE_ARENA];
static char text[KVQ_TEXT_BYTES];

static void must(bool holds)
{
    if (!holds)
        abort();
}

static int unpack(const void *bytes, size_t n, struct kvq__saved *saved)
{
    struct kvq_arena arena;
    memset(saved, 0, sizeof *saved);
    text[0] = '\0';
    kvq_arena_init(&arena, scratch + KVQ__SAVED_BYTES, KVQ_WIRE_ARENA);
    int rc = kvq__saved_unpack(bytes, n, &arena, saved, text);
    must(rc == 0 ? saved->layers != NULL : saved->layers == NULL && text[0]);
    return rc;
}

static bool pack(const struct kvq__saved *saved, uint8_t *out, size_t *n)
{
    struct kvq_arena arena;
    kvq_arena_init(&arena, scratch + KVQ__SAVED_BYTES, KVQ_WIRE_ARENA);
    return kvq__saved_pack(saved, &arena, out, n, text) == 0;
}

// A message may say the same in many ways, but packed by us in one.
static void pack_again(const struct kvq__saved *saved)
{
    static uint8_t once[KVQ__SAVED_BYTES], twice[KVQ__SAVED_BYTES];
    struct kvq__saved again;
    size_t n, m = 0;
    if (!pack(saved, once, &n))
        return;
    must(unpack(once, n, &again) == 0 && pack(&again, twice, &m));
    must(n == m && memcmp(once, twice, n) == 0);
    free(again.layers);
}

// ---- In a core ----

struct list {
    struct kvq__part *parts;
    uint32_t n, room;
};

static int collect(void *context, const struct kvq__part_of *p)
{
    struct list *l = context;
    if (l->n == l->room) {
        l->room = l->room ? 2 * l->room : 64;
        l->parts = realloc(l->parts, l->room * sizeof *l->parts);
        must(l->parts != NULL);
    }
    l->parts[l->n] = p->part;
    l->parts[l->n].id = l->n + 1;
    l->n++;
    return 0;
}

// 0, or what a part was refused with. All that a layer needs is there when the core is told so.
static int fill(struct kvq__restore *r, const struct kvq__saved *saved, const uint8_t *data,
                size_t size)
{
    struct kvq__wanted w;
    uint32_t i = 0;
    int rc = 0;
    for (uint32_t layer = 0; layer < saved->n_layers && rc == 0; layer++) {
        if (saved->layers[layer].row.kv_from >= 0)
            continue;
        for (; rc == 0 && kvq__restore_wanted(r, i, &w) && w.layer == layer; i++) {
            void *room;
            must(kvq__restore_rooms(r, &i, 1, &room) == 1);
            for (uint64_t at = 0; at < w.bytes; at += size)
                memcpy((uint8_t *)room + at, data, w.bytes - at < size ? w.bytes - at : size);
            rc = kvq__restore_fill(r, i);
        }
        if (rc == 0)
            kvq__restore_layer(r, layer);
    }
    return rc;
}

static void restore(struct kit *kit, const struct kvq__saved *saved, uint64_t good,
                    const uint8_t *data, size_t size)
{
    static const struct kvq__peer admin = {.admin = true};
    struct list list = {0};
    struct kvq__restore *r = NULL;
    const struct kvq__restore_spec spec = {.ns = "uid-0", .saved = saved, .good_tokens = good};
    text[0] = '\0';
    int rc = kvq__restore_begin(kit->core, &admin, &spec, &r, text);
    while (rc == 0 && (rc = kvq__restore_take(r, text)) == KVQ__MORE)
        rc = 0;
    if (rc == 0) {
        (void)kvq__parts_walk(r->session, collect, &list); // what a store that is whole would have
        r->spec.parts = list.parts;
        r->spec.n_parts = list.n;
        rc = kvq__restore_reserve(r, text);
        must(rc <= 0);
    }
    if (rc == 0)
        rc = fill(r, saved, data, size);
    else
        must(rc == 2 || text[0]);
    kvq__restore_end(&r, rc == 2 ? KVQ_E_NO_MEMORY : rc);
    core_check(kit->core);
    free(list.parts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvq__saved saved;
    struct kit kit;
    if (size < 2 || unpack(data + 1, size - 1, &saved))
        return 0;
    pack_again(&saved);
    uint64_t good = data[0] == 255 ? UINT64_MAX : saved.tokens / 255 * data[0];
    if (saved.n_layers * (saved.tokens / KVQ_BLOCK_TOKENS) < PAGES) { // else it only takes long
        kit_open(&kit, 1, POOL, 0);
        restore(&kit, &saved, good, data, size);
        kit_close(&kit);
    }
    free(saved.layers);
    return 0;
}
