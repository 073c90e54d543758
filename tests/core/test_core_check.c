// SPDX-License-Identifier: Apache-2.0
//
// The check of the core (daemon/core/check.h) finds what is off: single facts of a sound core are
// changed, and it must say which does not hold.
#include "daemon/core/check.h"
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, BUFFER = 2 * MIB, HEADS = 2, DIM = 128 };

static struct kit kit;
static struct member m;
static uint64_t handle;
static struct kvq__session *s;
static struct kvq__check *check;
static jmp_buf found;
static char what_is_off[512];

static void on_broken(const char *file, int line, const char *what)
{
    snprintf(what_is_off, sizeof what_is_off, "%s", what);
    longjmp(found, 1);
}

// What does not hold; NULL: all does.
static const char *look(void)
{
    if (setjmp(found))
        return what_is_off;
    kvq__check_core(check, kit.core);
    return NULL;
}

#define ASSERT_SOUND() assert_null(look())

// Changes a fact, and the check must name a condition that holds `words`; then the fact is as it
// was, and all is sound.
#define ASSERT_FINDS(fact, value, words)                                                           \
    do {                                                                                           \
        __typeof__(fact) before_ = (fact);                                                         \
        (fact) = (value);                                                                          \
        const char *off_ = look();                                                                 \
        if (!off_ || !strstr(off_, words))                                                         \
            fail_msg("%s: found %s", #fact, off_ ? off_ : "nothing");                              \
        (fact) = before_;                                                                          \
        ASSERT_SOUND();                                                                            \
    } while (0)

static int setup(void **state)
{
    static const struct kvq__layer_row row = {
        8, HEADS, DIM, DIM, .format = "oscar2", .repeat = 2, .kv_from = -1};
    kit_open(&kit, 5, 64 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    handle = kit_session(&m, &row, 1, 8);
    assert_int_not_equal(handle, 0);
    s = kit_of(&m, handle);
    kit_name(s, "it");
    assert_int_equal(kit_step(&m, handle, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    check = kvq__check_new(on_broken);
    assert_non_null(check);
    ASSERT_SOUND();
    return 0;
}

static int teardown(void **state)
{
    ASSERT_SOUND();
    kvq__check_free(&check);
    kit_close(&kit);
    return 0;
}

TEST(sums)
{
    struct kvq__core *core = kit.core;
    ASSERT_FINDS(core->n_sessions, 2, "core->n_sessions");
    ASSERT_FINDS(core->disk.n_offloaded, 1, "core->disk.n_offloaded");
    ASSERT_FINDS(core->tokens, 299, "core->tokens");
    ASSERT_FINDS(core->unsaved.n, 7, "core->unsaved.n");
    ASSERT_FINDS(core->n_clients, 0, "core->n_clients");
    ASSERT_FINDS(core->n_steps, 1, "core->n_steps");
    ASSERT_FINDS(core->freeing.n_givers, 1, "core->freeing.n_givers");
    ASSERT_FINDS(core->pools[0].sessions, 0, "core->pools[i].sessions");
    ASSERT_FINDS(core->pools[0].used_bytes, core->pools[0].used_bytes + 64, ".used == 0");
    ASSERT_FINDS(core->pools[0].extents_taken, 0, "extents_taken");
    ASSERT_FINDS(core->pools[0].huge_bytes, 1, "huge_bytes");
    ASSERT_FINDS(core->pools[0].budget, 1, "pool->budget");
    ASSERT_FINDS(core->pools[0].n_ended, 1, "n_ended");
    ASSERT_FINDS(core->pools[0].index_bytes, 64, "pool->index_bytes");
}

TEST(namespaces)
{
    struct kvq__namespace *ns = s->ns;
    ASSERT_FINDS(ns->used[KVQ__HOST_BYTES], ns->used[KVQ__HOST_BYTES] - 64, "ns->used[i]");
    ASSERT_FINDS(ns->used[KVQ__SESSIONS], 3, "ns->used[KVQ__SESSIONS]");
    ASSERT_FINDS(ns->exempt[KVQ__HOST_BYTES], ns->used[KVQ__HOST_BYTES] + 1, "exempt");
    ASSERT_FINDS(ns->arenas[0].n_ended, 1, "n == noted");
    ASSERT_FINDS(ns->prefixes.n_nodes, ns->prefixes.n_nodes + 1, "p->n_nodes");
    ASSERT_FINDS(ns->prefixes.bytes, ns->prefixes.bytes + 64, "p->bytes");
    ASSERT_FINDS(ns->prefixes.alone.bytes, 64, "p->alone.bytes");
    ASSERT_FINDS(ns->arenas[0].index_bytes, 64, "arena->index_bytes");
}

// Above a limit that was lowered, nothing grows.
TEST(limits)
{
    struct kvq__namespace *ns = s->ns;
    ns->quota.limit[KVQ__SESSIONS] = 1;
    ns->quota.limit[KVQ__HOST_BYTES] = 64;
    ASSERT_SOUND();                                                    // it was lowered
    assert_int_equal(kit_step(&m, handle, 300, HEADS, DIM) < 0, true); // the core keeps to it
    ASSERT_SOUND();
    kvq__check_forget(check);
    assert_says(look(), "counted <= limit");
    ns->quota.limit[KVQ__HOST_BYTES] = ns->quota.limit[KVQ__SESSIONS] = 0;
}

TEST(blocks)
{
    struct kvq__layer *l = &s->layers[1];
    struct kvq__block *b = kvq__page(l, 0)->packed.block;
    struct kvq__extent *e = b->extent;
    ASSERT_FINDS(b->refs, b->refs + 1, "references_to");
    ASSERT_FINDS(b->bytes, b->bytes + 64, "b->at");
    ASSERT_FINDS(b->bytes, b->bytes + 1, "b->bytes % 64");
    ASSERT_FINDS(b->free, true, "b->free");
    ASSERT_FINDS(b->exempt, true, "exempt");
    ASSERT_FINDS(e->used_bytes, e->used_bytes + 64, "e->used_bytes");
    ASSERT_FINDS(e->owner, NULL, "e->owner");
    ASSERT_FINDS(e->serial, UINT32_MAX, "last_serial");
    ASSERT_FINDS(s->sheets[0]->refs, 0, "refs > 0");
    ASSERT_FINDS(s->sheets[0]->refs, 2, "owners");
}

TEST(sessions)
{
    struct kvq__layer *l = &s->layers[0];
    ASSERT_FINDS(s->readers, 1, "s->readers");
    ASSERT_FINDS(s->writer, NULL, "s->writer");
    ASSERT_FINDS(s->dropped, true, "s->dropped");
    ASSERT_FINDS(s->floor, s->tokens + 1, "s->floor");
    ASSERT_FINDS(s->max_rollback, 0, "s->max_rollback");
    ASSERT_FINDS(s->n_owned, 1, "s->n_owned");
    ASSERT_FINDS(s->shards, 2, "s->shards");
    ASSERT_FINDS(s->published, false, "s->published");
    ASSERT_FINDS(l->loading, 1, "l->loading");
    ASSERT_FINDS(l->first_page, l->raw_page + 1, "l->first_page");
    ASSERT_FINDS(l->packed, s->tokens + 1, "l->packed");
    ASSERT_FINDS(l->extras.data, kvq__page(l, 0)->packed.data, "l->extras.data");
    ASSERT_FINDS(kvq__page(l, 0)->packed.data, NULL, "packed.data");
    ASSERT_FINDS(kvq__page(l, s->n_pages - 1)->raw.data, NULL, "raw.data");
}

int main(void)
{
    return run_all(NULL, NULL);
}
