// SPDX-License-Identifier: Apache-2.0
//
// Saves and restores of the core against a store in memory: a restored session goes on to the bit
// as its twin that never stopped, blocks are written once, layers answer as they come, damage cuts
// and is told, and what makes no sense is refused.
#include "tests/core/save_kit.h"

// More may be packed than would be due at the count that it was truncated to.
TEST(test_after_a_truncate)
{
    uint64_t a = fed("it", 800, 150), b = fed("", 800, 150);
    kit_pack(&kit);
    truncate_by(a, 150);
    truncate_by(b, 150);
    save("it");
    drop(a);
    a = restore("it");
    go_on_alike(a, b, 0);
}

// A page that was full, and saved, may yet be written anew.
TEST(test_written_anew)
{
    set_rows("f16");
    uint64_t a = fed("it", 384, 100), b = fed("", 384, 100);
    save("it");
    truncate_by(a, 50);
    truncate_by(b, 50);
    for (uint32_t i = 340 * HEADS * DIM; i < 384 * HEADS * DIM; i++)
        ((float *)(void *)m.memory)[i] += 1;
    feed(a, 384);
    feed(b, 384);
    save("it");
    drop(a);
    same_bits(restore("it"), b);
}

// A fork's first tokens are only there packed.
TEST(test_forks)
{
    uint64_t a = open_as("it", LAYERS, 5), fork, twin;
    rows[1].window = 0;
    drop(a);
    a = fed("it", 900, 5);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = a, .position = 384};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &twin), 0);
    assert_int_equal(kit_of(&m, fork)->layers[0].base, 384);
    kit_name(kit_of(&m, fork), "fork");
    save("it");
    uint64_t put = vault.put;
    save("fork"); // what it shares with its source is there already
    assert_true(vault.put - put <= OWNED * 2 && vault.kept >= OWNED * 2);
    drop(fork);
    fork = restore("fork");
    assert_int_equal(kit_of(&m, fork)->layers[0].base, 384);
    go_on_alike(fork, twin, 0);
}

TEST(test_incremental)
{
    bool stored;
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    rows[1].window = 0;
    uint64_t a = fed("it", 1000, 0);
    save("it");
    uint64_t put = vault.put;
    assert_int_equal(vault_save(&vault, kit.core, &spec, &stored), 0);
    assert_false(stored); // nothing has changed
    assert_true(kit_of(&m, a)->saving.saved == kit_of(&m, a)->saving.commits);
    feed(a, 1001);
    save("it");
    // Of each layer: the block that is being filled, raw ones of the window.
    if (vault.put - put > OWNED * 4 || vault.kept < 6 * OWNED)
        fail_msg("%llu blocks written, %llu kept", (unsigned long long)(vault.put - put),
                 (unsigned long long)vault.kept);
    spec.again = true;
    assert_int_equal(vault_save(&vault, kit.core, &spec, &stored), 0);
    assert_true(stored);
    drop(a);
    a = restore("it"); // and what was restored is not written again either
    put = vault.put;
    feed(a, 1002);
    save("it");
    assert_true(vault.put - put <= OWNED * 4);
}

// A step is open, and goes on while the save is written.
TEST(test_beside_a_step)
{
    struct kvq__save *save;
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    uint64_t a = fed("it", 700, 20), b = fed("", 700, 20);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = a, .position = 700, .row = 700, .append = 90};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), 0);
    assert_non_null(save);
    core_check(kit.core);
    assert_null(kvq__background_start(kit.core));
    assert_int_equal(kvq__save_copy(save), 0);
    kvq__save_copied(save);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
    truncate_by(a, 20); // what was copied stays
    feed(a, 1200);
    kit_pack(&kit);
    core_check(kit.core);
    vault_write(&vault, &save);
    assert_true(kvq__is_unsaved(kit_of(&m, a)));
    drop(a);
    a = restore("it");
    go_on_alike(a, b, 20);
}

// The session ends while it is saved: what is written is whole.
TEST(test_dropped_meanwhile)
{
    struct kvq__save *save;
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    uint64_t a = fed("it", 700, 0), b = fed("", 700, 0);
    kit_pack(&kit);
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), 0);
    drop(a);
    core_check(kit.core);
    assert_int_equal(kvq__save_copy(save), 0);
    kvq__save_copied(save);
    core_check(kit.core);
    vault_write(&vault, &save);
    a = restore("it");
    go_on_alike(a, b, 0);
}

TEST(test_layers_answer_as_they_come)
{
    static uint8_t out[OUT_BYTES];
    struct kvq__restore *r;
    uint64_t a = fed("it", 700, 0), b = fed("", 700, 0);
    save("it");
    drop(a);
    const struct vault_session *from = vault_find(&vault, "it", 0);
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    a = open_as("it", LAYERS, 0);
    assert_true(a);
    assert_int_equal(kit_of(&m, a)->n_loading, OWNED);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    core_check(kit.core);
    assert_int_equal(attend(a, 0, out), 0);
    assert_int_equal(attend(a, 3, out), 0); // reads layer 0
    struct kvq_entry_wire e = {.handle = a, .position = 700, .row = 700, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 4, e, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 4, e, NULL), 0);
    struct kvq_entry_wire q = {.handle = a, .position = 700, .queries = QUERIES};
    struct kvq_request ask = attend_of(2);
    assert_int_equal(kit_request(&m, &ask, &q), 1); // waits
    assert_int_equal(vault_layer(&vault, r, from, 1), 0);
    assert_int_equal(kvq__request_continue(m.queue), KVQ__WAIT);
    assert_int_equal(vault_layer(&vault, r, from, 2), 0);
    kvq__restore_end(&r, 0);
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
    go_on_alike(a, b, 0);
}

// "it" is stored, and what its session had is with the system again: new extents are needed.
static const struct vault_session *stored_alone(uint64_t tokens)
{
    set_rows("f16");
    const struct vault_session *from = stored(tokens, 0);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    assert_int_equal(kit.extents_out, 0);
    return from;
}

// All memory is counted when the session is opened. Its pages come with its layers, and those of
// the rest of an extent when a step wants some of it.
TEST(test_pages_come_with_layers)
{
    struct kvq__restore *r;
    const struct vault_session *from = stored_alone(1900);
    const struct kvq__pool *pool = &kit.core->pools[0];
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    assert_int_equal(kit.backed, 0);
    uint64_t a = open_as("it", 0, 0), blocks = pool->used_bytes, end = 0;
    assert_true(blocks > pool->extent_bytes); // it has blocks in more than one
    for (uint32_t i = 0; i < OWNED; i++) {
        uint64_t before = kit.backed;
        assert_int_equal(vault_layer(&vault, r, from, i), 0);
        assert_true(kit.backed > before && kit.backed - before < blocks / 2);
    }
    assert_int_equal(kit.backed, blocks);
    kvq__restore_end(&r, 0);
    for (end = 1900; kit.backed == blocks; end += 100)
        feed(a, end);
    assert_int_equal((kit.backed - blocks) % pool->extent_bytes, 0);
    go_on_alike(a, fed("", end - 100, 0), 0);
}

static struct {
    uint32_t n;
    uint64_t before, most; // of kit.backed, and what one turn has added to it
} turns;

static void note_turn(void)
{
    turns.n++;
    turns.most = kvq__max(turns.most, kit.backed - turns.before);
    turns.before = kit.backed;
}

// Nothing is read into blocks for tokens that are yet to be packed. The poller takes the pages of
// these, and not of the extents that they lie in; and some in a turn.
TEST(test_pages_of_what_does_not_come)
{
    struct kvq__restore *r;
    const struct vault_session *from = stored(1900, 300);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    assert_int_equal(kit.extents_out, 0);
    kit.core->config.restore_work = 6;
    vault.turn = note_turn;
    turns.before = kit.backed;
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    uint64_t backed = kit.backed;
    const struct kvq__session *s = r->session;
    const struct kvq__layer *l = &s->layers[0];
    uint64_t block = kvq__packed_block_bytes(l, 1), come = 0;
    uint32_t pages = kvq__packed_pages(s, l, s->tokens) - kvq__pages_of(l->packed);
    assert_true(block > 6 * 1024 && pages > 6);
    assert_int_equal(turns.most, block);
    assert_in_range(backed, 2 * pages * block, OWNED * pages * block); // of one layer fewer pages
    uint64_t a = open_as("it", 0, 300);
    assert_int_equal(vault_rest(&vault, &r, from), 0);
    come = kit.backed - backed;
    assert_int_equal(backed + come, kit.core->pools[0].used_bytes);
    same_bits(a, fed("", 1900, 300));
}

// The poller takes blocks for some pages in a turn.
TEST(test_blocks_of_a_turn)
{
    struct kvq__restore *r;
    const struct vault_session *from = stored_alone(1900);
    kit.core->config.restore_work = 5;
    vault.turn = note_turn;
    turns.n = 0;
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    uint32_t pages = 0;
    for (uint32_t i = 0; i < OWNED; i++)
        pages += r->session->n_pages - r->session->layers[i].first_page;
    assert_in_range(turns.n, (pages - 1) / 5, pages / 5 + 4); // or one that took an extent
    assert_int_equal(vault_rest(&vault, &r, from), 0);
}

// There are no pages for a block into which nothing is read: as if there were no room.
TEST(test_no_pages_for_what_does_not_come)
{
    struct kvq__restore *r;
    stored(1900, 300);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    kit.no_pages = true;
    int rc = vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text);
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    assert_non_null(strstr(text, "the system has no memory for session \"it\""));
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    core_check(kit.core);
    kit.no_pages = false;
    same_bits(restore("it"), fed("", 1900, 300));
}

// From the first turn on all pages that the system had are those of an empty extent.
static void empty_extent_has_all(void)
{
    struct kvq__pool *pool = &kit.core->pools[0];
    struct kvq__ref ref = {0};
    if (turns.n++ > 0)
        return;
    assert_int_equal(
        kvq__block_new(kit.core, kit_namespace(&kit, 1000), pool, pool->extent_bytes, NULL, &ref),
        0);
    kvq__block_drop_idle(kit.core, &ref, true);
    assert_false(TAILQ_EMPTY(&pool->empty));
    kit.no_pages = kit.frees_pages = true;
}

// Where the system has no more pages, extents that nobody uses give theirs back.
TEST(test_pages_of_empty_extents)
{
    struct kvq__restore *r;
    const struct vault_session *from = stored(1900, 300);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    kit.core->config.restore_work = 6;
    turns.n = 0;
    vault.turn = empty_extent_has_all;
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    assert_true(turns.n > 1 && !kit.no_pages);
    uint64_t a = open_as("it", 0, 300);
    assert_int_equal(vault_rest(&vault, &r, from), 0);
    same_bits(a, fed("", 1900, 300));
}

// There are none when a layer's bytes are to come: as if it could not be read.
TEST(test_no_pages)
{
    static uint8_t out[OUT_BYTES];
    struct kvq__restore *r;
    const struct vault_session *from = stored_alone(1900);
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    uint64_t a = open_as("it", 0, 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    assert_int_equal(attend(a, 0, out), 0);
    kit.no_pages = true;
    assert_int_equal(vault_layer(&vault, r, from, 1), KVQ_E_NO_MEMORY);
    kvq__restore_end(&r, KVQ_E_NO_MEMORY);
    core_check(kit.core);
    struct kvq_entry_wire e = {.handle = a, .position = 1900, .queries = QUERIES};
    struct kvq_request ask = attend_of(0);
    assert_int_equal(kit_ask(&m, &ask, &e), KVQ_E_NO_MEMORY);
    kit_tick(&kit, 1);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    kit.no_pages = false;
    same_bits(restore("it"), fed("", 1900, 0));
}

// Steps want some of a bare extent, which has no more pages: they get fresh extents.
TEST(test_no_pages_for_a_step)
{
    uint64_t tokens = 1900;
    stored_alone(tokens);
    uint64_t a = restore("it"), backed = kit.backed, extents = kit.core->pools[0].extents_taken;
    kit.no_pages = true;
    for (; tokens < ROWS; tokens++)
        assert_int_equal(kit_step(&m, a, 1, HEADS, DIM), 0);
    assert_int_equal(kit.backed, backed);
    assert_true(kit.core->pools[0].extents_taken > extents);
    core_check(kit.core);
    kit.no_pages = false;
    go_on_alike(a, fed("", tokens, 0), 0);
}

TEST(test_dropped_while_it_loads)
{
    struct kvq__restore *r;
    const struct vault_session *from = stored(700, 0);
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    assert_false(kvq__restore_lost(r));
    uint64_t a = open_as("it", 0, 0);
    drop(a);
    core_check(kit.core);
    assert_true(kvq__restore_lost(r));
    assert_int_equal(vault_rest(&vault, &r, from), 0);
    core_check(kit.core);
    assert_int_equal(kit.core->disk.n_loading, 0);
}

// What is good of it is what a fork there would be.
static void check_cut(const char *format, uint64_t good, uint64_t expect)
{
    set_rows(format);
    rows[1].window = 0;
    uint64_t a = fed("it", 1000, 5);
    save("it");
    uint64_t fork = kit_fork(&m, a, expect);
    drop(a);
    a = restore_up_to("it", good);
    assert_int_equal(kit_of(&m, a)->tokens, expect);
    assert_true(kvq__is_unsaved(kit_of(&m, a)));
    if (expect)
        go_on_alike(a, fork, 0);
    drop(a);
    drop(fork);
}

TEST(test_cut)
{
    check_cut("oscar2", 640, 640);
    check_cut("oscar2", 0, 0);
    check_cut("f16", 128, 128);
    check_cut("kivi2", 896, 896);
    check_cut("ott2", 256, 256);
    check_cut("ott2", 64, 0); // in what it has learned from
    set_rows("oscar2");       // with a window whose first pages are gone
    stored(1000, 0);
    uint64_t a = restore_up_to("it", 128);
    assert_int_equal(kit_of(&m, a)->tokens, 0);
    feed(a, 300);
}

TEST(test_damage_is_told)
{
    struct kvq__restore *r;
    struct kvq__session_info info;
    const struct vault_session *from = stored(700, 0);
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), 0);
    uint64_t a = open_as("it", 0, 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    struct kvq_entry_wire e = {.handle = a, .position = 700, .row = 700, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 4, e, NULL), 0);
    kvq__restore_end(&r, KVQ_E_DAMAGED);
    core_check(kit.core);
    assert_int_equal(kit.core->n_sessions, 0);
    struct kvq_request ask = attend_of(0);
    e = (struct kvq_entry_wire){.handle = a, .position = 700, .queries = 1};
    assert_int_equal(kit_request(&m, &ask, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_DAMAGED);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), KVQ_E_DAMAGED);
    assert_says(text, "open the session again");
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    a = restore_up_to("it", 512);
    assert_true(a && kit_of(&m, a)->tokens <= 512);
}

static uint64_t open_shard(uint32_t shard, uint32_t n_layers)
{
    struct kvq__session_spec spec = {
        .name = "group", .layers = rows, .n_layers = n_layers, .shard = shard, .shards = 2};
    return kit_opened(&m, &spec);
}

static void step_both(const uint64_t handles[2], uint32_t n)
{
    const struct kvq__session *s = kit_of(&m, handles[0]);
    struct kvq_entry_wire e[2];
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 2);
    for (int i = 0; i < 2; i++)
        e[i] = (struct kvq_entry_wire){
            .handle = handles[i], .position = s->tokens, .row = (uint32_t)s->tokens, .append = n};
    r.step = 8;
    assert_int_equal(kit_request(&m, &r, e), 0);
    append_both(8, e);
}

TEST(test_groups)
{
    struct kvq__save *save;
    struct kvq__restore *r;
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "group"};
    uint64_t handles[2] = {open_shard(0, LAYERS)};
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), KVQ_E_INCOMPLETE);
    handles[1] = open_shard(1, LAYERS);
    step_both(handles, 600);
    kit_pack(&kit);
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 0);
    assert_int_equal(vault.n_sessions, 2);
    drop(handles[0]);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(vault_restore(&vault, kit.core, "group", i, NULL, UINT64_MAX, &r, text),
                         0);
        assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "group", i)), 0);
        core_check(kit.core);
        handles[i] = open_shard(i, 0);
    }
    step_both(handles, 100);
    assert_int_equal(kit_of(&m, handles[1])->tokens, 700);
    // Shards that stand apart wait for a step, or are refused when none can begin any more.
    kit_of(&m, handles[0])->tokens--;
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), KVQ__SAVE_WAITS);
    kit.core->draining = true;
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), KVQ_E_INCOMPLETE);
    assert_says(text, "shard 0 of session \"group\" stands at 699 tokens and shard 1");
    kit.core->draining = false;
    kit_of(&m, handles[0])->tokens++;
    kit_pack(&kit); // one shard is damaged: both go, for nothing was committed since
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 0);
    drop(handles[1]);
    assert_int_equal(vault_restore(&vault, kit.core, "group", 0, NULL, UINT64_MAX, &r, text), 0);
    assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "group", 0)), 0);
    handles[0] = open_shard(0, 0);
    assert_int_equal(vault_restore(&vault, kit.core, "group", 1, NULL, UINT64_MAX, &r, text), 0);
    kvq__restore_end(&r, KVQ_E_DAMAGED);
    assert_int_equal(kit.core->n_sessions, 0);
    struct kvq_entry_wire e = {.handle = handles[0], .position = 700, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 3, e, NULL), KVQ_E_DAMAGED);
}

TEST(test_refusals)
{
    struct kvq__save *save;
    const struct kvq__peer other = {.uid = 2000};
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "none"};
    uint64_t a = open_as("it", LAYERS, 0);
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), KVQ_E_NO_SESSION);
    spec.name = "it";
    assert_int_equal(kvq__save_begin(kit.core, &other, &spec, &save, text), KVQ_E_PERMISSION);
    feed(a, 300);
    kit_pack(&kit);
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 0);
    restore_refused(KVQ_E_EXISTS, "");
    drop(a);
    struct vault_session *from = vault_find(&vault, "it", 0);
    from->n--;
    restore_refused(KVQ_E_DAMAGED, "page");
    from->n++;
    for (uint32_t l = 0; l < LAYERS; l++)
        from->saved.layers[l].format.v.bits ^= 1; // its parts have other lengths then
    restore_refused(KVQ_E_DAMAGED, "");
    core_check(kit.core);
    struct kvq__session_info info;
    struct kvq__session_spec open = {
        .name = "x", .layers = rows, .n_layers = LAYERS, .on_detach = KVQ__DETACH_SAVE};
    assert_int_equal(kvq__session_open(m.client, &open, &info, text), KVQ_E_UNSUPPORTED);
    assert_says(text, "storage_dir");
}

// Of a layer whose first pages a window has let go: tokens there cannot be packed any more.
TEST(test_unpacked_behind_the_window)
{
    set_rows("oscar2");
    struct kvq__saved_layer *l = &stored(1000, 0)->saved.layers[1];
    assert_true(l->first_page > 0);
    l->raw_page = l->first_page;
    l->packed = 0;
    restore_refused(KVQ_E_DAMAGED, "unpacked tokens");
}

// Whatever stands in a store: refused, or a session that can be read.
TEST(test_hostile)
{
    static uint8_t out[OUT_BYTES];
    struct kvq__restore *r;
    uint32_t refused = 0, taken = 0;
    set_rows("ott2");
    struct vault_session *from = stored(700, 5);
    const struct kvq__saved good = from->saved;
    struct kvq__saved_layer layers[LAYERS];
    memcpy(layers, good.layers, sizeof layers);
    for (uint32_t i = 0; i < 400; i++) {
        uint64_t *numbers[] = {&from->saved.tokens,         &from->saved.floor,
                               &from->saved.layers[0].base, &from->saved.layers[1].packed,
                               &from->saved.exact_tokens,   &from->saved.prompt_tokens};
        uint32_t *smalls[] = {&from->saved.layers[1].first_page,
                              &from->saved.layers[0].raw_page,
                              &from->saved.max_rollback,
                              &from->saved.layers[2].first_page,
                              &from->saved.n_layers,
                              &from->saved.shard};
        static const uint64_t steps[] = {1, 32, 128, 256, 1u << 31, UINT64_MAX - 5};
        uint64_t by = steps[kit_below(&kit, 6)];
        if (kit_chance(&kit, 50))
            *numbers[kit_below(&kit, 6)] += kit_chance(&kit, 50) ? by : -by;
        else if (kit_chance(&kit, 20))
            from->saved.exact_tokens = from->saved.prompt_tokens = by;
        else if (kit_chance(&kit, 80))
            *smalls[kit_below(&kit, 6)] += (uint32_t)(kit_chance(&kit, 50) ? by : -by) % 7;
        else
            from->saved.layers[0].learned ^= 1;
        from->saved.n_layers = from->saved.n_layers > LAYERS ? LAYERS : from->saved.n_layers;
        text[0] = 0;
        int rc = vault_restore(&vault, kit.core, "it", from->saved.shard, NULL,
                               kit_below(&kit, 900), &r, text);
        assert_true(rc == 0 || text[0]);
        core_check(kit.core);
        refused += rc < 0;
        taken += rc == 0;
        if (rc == 0) {
            vault_rest(&vault, &r, from);
            uint64_t a = open_as("it", 0, 0);
            for (uint32_t l = 0; a && l < LAYERS; l++)
                attend(a, l, out);
            kit_pack(&kit);
            core_check(kit.core);
            if (a)
                drop(a);
        }
        from->saved = good;
        memcpy(from->saved.layers, layers, sizeof layers);
    }
    assert_true(refused > 20 && taken > 20);
    from->saved.exact_tokens = 600; // of a prompt of no tokens
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, 0, &r, text), KVQ_E_DAMAGED);
    assert_says(text, "600 tokens of a prompt of 0");
    from->saved = good;
}

TEST(test_no_room)
{
    struct kvq__restore *r;
    stored(1500, 5);
    for (uint32_t i = 1; i < 60; i++) {
        kit.fail_one_in = i;
        int rc = vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        if (rc == 0) {
            assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "it", 0)), 0);
            drop(open_as("it", 0, 0));
        }
        core_check(kit.core);
    }
    restore("it");
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it", .again = true};
    for (uint32_t i = 1; i < 30; i++) {
        struct kvq__save *save;
        kit.fail_one_in = i;
        int rc = kvq__save_begin(kit.core, &m.client->peer, &spec, &save, text);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        kvq__save_end(&save, false);
        core_check(kit.core);
    }
}

static uint32_t idle_after(uint64_t seconds)
{
    struct kvq__unsaved list[4];
    kit_pass(&kit, seconds * 1000000000);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_ALL, 0, list, 4), 1);
    return kvq__core_unsaved(kit.core, KVQ__UNSAVED_IDLE, 0, list, 4);
}

// What cannot be saved is tried again after 1, 2, 4, .. 60 seconds, and told of once a minute.
TEST(test_failing)
{
    uint64_t a = open_as("it", LAYERS, 0), waited = 0;
    feed(a, 10);
    assert_int_equal(idle_after(1), 1);
    for (uint64_t wait = 1, told = 0, now = 0; now < 600;
         now += wait, wait = wait < 30 ? 2 * wait : 60) {
        bool tell = kvq__unsaved_failed(kit.core, "uid-1000", "it");
        assert_int_equal(tell, now == 0 || now - told >= 60);
        told = tell ? now : told;
        assert_int_equal(idle_after(wait - 1), 0);
        assert_int_equal(idle_after(1), 1);
        waited = wait;
    }
    assert_int_equal(waited, 60);
    assert_false(kvq__unsaved_failed(kit.core, "uid-1000", "other"));
    assert_false(kvq__unsaved_failed(kit.core, "nobody", "it"));
    (void)kvq__unsaved_failed(kit.core, "uid-1000", "it");
    save("it"); // by whomever: it starts anew
    feed(a, 20);
    assert_int_equal(idle_after(0), 1);
    (void)kvq__unsaved_failed(kit.core, "uid-1000", "it");
    assert_int_equal(idle_after(1), 1);
}

TEST(test_unsaved)
{
    struct kvq__unsaved list[4];
    uint64_t a = open_as("it", LAYERS, 0);
    open_as("", LAYERS, 0);
    feed(a, 10);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_ALL, 0, list, 4), 1);
    assert_string_equal(list[0].name, "it");
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_IDLE, 1000, list, 4), 0);
    kit_pass(&kit, 2000);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_IDLE, 1000, list, 4), 1);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_LEFT, 0, list, 4), 0);
    kit_of(&m, a)->spec.save_on_detach = true;
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_LEFT, 0, list, 4), 1);
    kit.now += 10000000000u; // its keep time is over, but it is not saved
    kvq__core_clock(kit.core, kit.now);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->n_sessions, 2);
    save("it");
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_ALL, 0, list, 4), 0);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->n_sessions, 1);
}

static uint64_t open_salted(const char *name, const char *salt, uint64_t prefix)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .name = name,
        .model = "m",
        .salt = salt,
        .adapter = "lora",
        .layers = rows,
        .n_layers = LAYERS,
        .prefix = {.buffer = m.buffer, .offset = m.ids_at, .tokens = prefix}};
    int rc = kvq__session_open(m.client, &spec, &info, text);
    assert_true(rc == 0 || rc == KVQ_E_EXISTS);
    return rc ? 0 : info.handle;
}

// A session that began with another's tokens is saved like any, and has its salt and adapter again.
TEST(test_prefix)
{
    set_rows("oscar2");
    m.ids_at = 64; // any numbers will do
    uint64_t first = open_salted("", "salt", 0);
    feed(first, 512); // all that a window of 300 still sees there is still there, too
    kit_pack(&kit);
    uint64_t a = open_salted("it", "salt", 600), b = open_salted("", "salt", 600);
    assert_int_equal(kit_of(&m, a)->prefix_tokens, 4 * KVQ_BLOCK_TOKENS);
    save("it"); // though nothing was appended
    drop(a);
    a = restore("it");
    assert_int_equal(kit_of(&m, a)->tokens, 4 * KVQ_BLOCK_TOKENS);
    go_on_alike(a, b, 0);
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    assert_int_equal(open_salted("it", "pepper", 0), 0);
    assert_true(open_salted("it", "salt", 0) != 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
