// SPDX-License-Identifier: Apache-2.0
//
// The backend of ggml over a real kvqd, with graphs as llama.cpp makes them: which nodes it takes,
// attention against a plain loop, and what it refuses.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/limits.h"
#include "tests/client/ggml_rig.h"

// ---- Which nodes are taken ---------------------------------------------------------------------

static void test_rows_are_taken_with_their_attention(void **state)
{
    (void)state;
    end_backend();
    rig.backend = rig.device->iface.init_backend(rig.device, NULL);
    make_caches();
    for (int i = 0; i < LAYERS; i++) // seen by nobody yet
        rig.layers[i].k_cache.buffer = rig.layers[i].v_cache.buffer = (void *)&rig;
    make_graph(1, 1, 0);
    struct layer *l = &rig.layers[0];
    assert_false(takes(&l->set_k));
    assert_true(takes(&l->attention));
    assert_true(takes(&l->set_k));
    assert_true(takes(&l->set_v));
    // Without flash attention, a product reads the cache.
    struct ggml_tensor product = {.op = GGML_OP_MUL_MAT, .src = {&l->k, &l->q}};
    assert_false(takes(&product));
    assert_false(takes(&l->set_k));
    assert_false(takes(&l->set_v));
    assert_false(takes(&l->attention));
    // That a product reads other tensors says nothing.
    struct ggml_tensor other = {.op = GGML_OP_MUL_MAT, .src = {&l->q, &l->q}};
    l = &rig.layers[1];
    assert_true(takes(&l->attention));
    assert_false(takes(&other));
    assert_true(takes(&l->set_k));
}

// Once a context, and not of K alone, which llama.cpp also reads to turn its positions.
static void test_attention_that_is_no_flash_attention_is_told(void **state)
{
    (void)state;
    struct layer *l = &rig.layers[0];
    struct ggml_tensor turn = {.op = GGML_OP_ROPE, .src = {&l->k}};
    struct ggml_tensor scores = {.op = GGML_OP_MUL_MAT, .src = {&l->k, &l->q}};
    struct ggml_tensor out = {.op = GGML_OP_MUL_MAT, .src = {&l->v, &scores}};
    listen_to_words();
    assert_false(takes(&turn));
    assert_false(takes(&scores));
    assert_int_equal(heard("flash"), 0);
    listen_to_words();
    for (int i = 0; i < 3; i++)
        assert_false(takes(&out));
    assert_int_equal(heard("-fa on; llama-cpp-python: flash_attn=True"), 1);
    end_backend();
    rig.backend = rig.device->iface.init_backend(rig.device, NULL);
    listen_to_words();
    assert_false(takes(&out)); // whose layers no flash attention has shown
    assert_false(takes(&out));
    assert_int_equal(heard("flash attention is off"), 1);
}

static void test_types_without_effect_are_told(void **state)
{
    (void)state;
    rig.layers[0].k_cache.type = rig.layers[0].v_cache.type = GGML_TYPE_Q8_0;
    listen_to_words();
    forward(0, 0, 3);
    forward(0, 3, 1);
    assert_int_equal(heard("(-ctk q8_0, -ctv q8_0; type_k, type_v) have no effect: kvqd holds K "
                           "and V in f16"),
                     1);
}

static void test_attention_of_other_kinds_is_left(void **state)
{
    (void)state;
    struct layer *l = &rig.layers[1];
    const struct ggml_tensor plain = l->attention;
    float *params = (float *)(void *)l->attention.op_params;
    for (int i = 0; i < 7; i++) {
        l->attention = plain;
        l->q.type = GGML_TYPE_F32;
        l->q.ne[2] = Q_HEADS;
        assert_true(takes(&l->attention));
        assert_true(takes(&l->set_k));
        if (i == 0)
            params[1] = 8; // ALiBi
        else if (i == 1)
            l->attention.src[4] = &l->q; // sinks
        else if (i == 2)
            l->attention.src[3] = NULL; // no mask
        else if (i == 3)
            l->q.type = GGML_TYPE_F16;
        else if (i == 4)
            l->q.ne[2] = 258; // heads
        else if (i == 5)
            l->q.ne[2] = 65 * KV_HEADS;
        else
            l->k.ne[0] = l->v.ne[0] = 96;
        assert_false(takes(&l->attention));
        assert_false(takes(&l->set_k));
    }
    // The other layers would go without this one.
    make_tokens(0, 0, 1, 0);
    assert_int_equal(compute(), GGML_STATUS_FAILED);
}

// All layers, or the first two alone, in a cache of half as many cells.
static void make_small_cache(int layers, void *buffer)
{
    for (int i = 0; i < layers; i++) {
        struct ggml_tensor *both[2] = {&rig.layers[i].k_cache, &rig.layers[i].v_cache};
        for (int j = 0; j < 2; j++) {
            both[j]->buffer = buffer;
            both[j]->ne[1] = CELLS / 2;
        }
    }
    make_graph(1, 1, 0);
}

static void test_more_layers_than_a_session_has(void **state)
{
    (void)state;
    struct layer *l = &rig.layers[1];
    assert_true(takes(&rig.layers[0].set_k));
    for (int i = 0; i <= KVQ_MAX_LAYERS - LAYERS; i++) { // behind the three that are known
        assert_true(takes(&rig.layers[0].attention));
        snprintf(l->k_cache.name, sizeof l->k_cache.name, "cache_k_l%d", i + 10);
        snprintf(l->v_cache.name, sizeof l->v_cache.name, "cache_v_l%d", i + 10);
        takes(&l->attention);
    }
    assert_false(takes(&rig.layers[0].attention));
    assert_false(takes(&rig.layers[0].set_k));
}

// A cache that only was planned with, and another one where it lay.
static void test_a_cache_where_another_was(void **state)
{
    (void)state;
    static char place;
    make_small_cache(2, (void *)&place);
    ask();
    ask();
    make_caches();
    for (int i = 0; i < LAYERS; i++)
        rig.layers[i].k_cache.buffer = rig.layers[i].v_cache.buffer = (void *)&place;
    make_graph(1, 1, 0);
    rig.graph.nodes[0] = rig.graph.nodes[3 * PER_LAYER - 3]; // the third layer's alone
    rig.graph.nodes[1] = rig.graph.nodes[3 * PER_LAYER - 2];
    rig.graph.nodes[2] = rig.graph.nodes[3 * PER_LAYER - 1];
    rig.graph.n = PER_LAYER;
    ggml_kit.buffer_size = 2;
    ask();
    assert_int_equal(ask(), PER_LAYER);
    make_tokens(0, 0, 1, 0);
    assert_int_equal(compute(), GGML_STATUS_SUCCESS);
    ggml_kit.buffer_size = 1;
}

static void test_layers_with_windows_are_left(void **state)
{
    (void)state;
    static char windows, whole, draft;
    rig.layers[2].k_cache.buffer = rig.layers[2].v_cache.buffer = (void *)&whole;
    make_small_cache(2, (void *)&windows);
    struct ggml_tensor turn = {.op = GGML_OP_ROPE, .src = {&rig.layers[0].k}};
    listen_to_words();
    takes(&turn);
    ask();
    ask();
    assert_int_equal(ask(), PER_LAYER); // of the third layer
    make_tokens(0, 0, 1, 0);
    for (int i = 0; i < 2 * PER_LAYER; i++)
        rig.graph.nodes[i]->flags = 0; // ggml's own CPU backend has these
    assert_int_equal(compute(), GGML_STATUS_SUCCESS);
    assert_int_equal(heard("flash attention is off"), 0);
    make_caches();
    make_small_cache(LAYERS, (void *)&draft); // another model, with fewer cells
    ask();
    ask();
    assert_int_equal(ask(), rig.graph.n);
}

// Plans a forward of a token at `at` through n layers as ggml's scheduler does, which asks about
// all rows before it asks about attention. How many nodes are taken; ggml itself has the others.
static int plan(int first, int n, int64_t at)
{
    int taken = 0;
    make_graph(1, 1, 0);
    make_tokens(0, at, 1, 0);
    rig.graph.n = n * PER_LAYER;
    memmove(rig.graph.nodes, rig.graph.nodes + first * PER_LAYER,
            (size_t)rig.graph.n * sizeof *rig.graph.nodes);
    for (int i = 0; i < 2 * rig.graph.n; i++) {
        struct ggml_tensor *node = rig.graph.nodes[i % rig.graph.n];
        if ((node->op == GGML_OP_SET_ROWS) == (i < rig.graph.n)) {
            node->flags = takes(node) ? GGML_TENSOR_FLAG_COMPUTE : 0;
            taken += node->flags != 0;
        }
    }
    return taken;
}

// A model, and a head of it that predicts more tokens in a context of its own, with other layers in
// as many cells: these are no sliding windows. The head's context ends before it computes.
static void test_two_contexts(void **state)
{
    (void)state;
    static char model, head;
    for (int i = 0; i < LAYERS; i++)
        rig.layers[i].k_cache.buffer = rig.layers[i].v_cache.buffer =
            (void *)(i < 2 ? &model : &head);
    for (int i = 0; i < 3; i++)
        plan(0, 2, 0);
    ggml_backend_t second = rig.device->iface.init_backend(rig.device, NULL);
    plan(2, 1, 0);
    assert_int_equal(plan(2, 1, 0), PER_LAYER);
    for (int at = 0; at < 3; at++) {
        if (at == 2) {
            struct ggml_tensor product = {.op = GGML_OP_MUL_MAT, .src = {&rig.layers[2].k}};
            assert_false(takes(&product)); // nothing of that is left behind
            second->iface.free(second);
        }
        assert_int_equal(plan(0, 2, at), 2 * PER_LAYER);
        assert_int_equal(compute(), GGML_STATUS_SUCCESS);
    }
    second = rig.device->iface.init_backend(rig.device, NULL);
    plan(2, 1, 0);
    assert_int_equal(plan(2, 1, 0), PER_LAYER);
    second->iface.free(second);
}

// ---- Attention ---------------------------------------------------------------------------------

static void test_prompt_and_decoding(void **state)
{
    (void)state;
    int64_t at = 0;
    const int64_t pieces[] = {150, 40, 1, 1, 64, 65, 1, 300, 1};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; at += pieces[i++])
        forward(0, at, pieces[i]);
    const struct ggml_tensor *own[2] = {&rig.layers[1].k_cache, &rig.layers[1].v_cache};
    for (size_t i = 0; i < own[0]->nb[2]; i++) // llama.cpp's own memory was given back
        assert_int_equal(((char *)own[0]->data)[i] | ((char *)own[1]->data)[i], 0);
}

static void test_streams(void **state)
{
    (void)state;
    forward(1, 0, 100);
    forward(0, 0, 30);
    for (int i = 0; i < 40; i++) {
        make_graph(2, 2, 0);
        make_tokens(0, 30 + 2 * i, 2, 0);
        make_tokens(1, 100 + 2 * i, 2, 2);
        assert_int_equal(ask(), rig.graph.n);
        assert_int_equal(compute(), GGML_STATUS_SUCCESS);
        check(0, 30 + 2 * i, 2, 0);
        check(1, 100 + 2 * i, 2, 2);
    }
    forward(1, 180, 1);
}

static void test_going_back(void **state)
{
    (void)state;
    forward(0, 0, 200);
    forward(0, 200, 10);
    forward(0, 195, 4);
    forward(0, 100, 3); // deeper than what kvqd can take back
    forward(0, 103, 300);
    forward(0, 403, 1);
    forward(0, 256, 2); // where pages end
    forward(0, 258, 150);
    forward(0, 300, 1);
    forward(0, 1, 1);
    forward(0, 2, 1);
    forward(0, 0, 20); // another sequence
    forward(0, 20, 1);
    refused_forward(0, 40, 1);
    forward(0, 21, 1);
}

// A session is not given up before what its replacement begins with is there, nor in a step that
// kvqd has no room for.
static void test_going_on_without_room(void **state)
{
    (void)state;
    forward(0, 0, 400);
    forward(0, 400, 1);
    ggml_kit.opens_before_one_fails = 0;
    refused_forward(0, 300, 1);
    assert_int_equal(ggml_kit.opens_before_one_fails, -1);
    forward(0, 401, 1);
    forward(0, 300, 1);
    forward(0, 301, 1);
    ggml_kit.opens_before_one_fails = 1; // behind that, it is
    refused_forward(0, 200, 1);
    assert_int_equal(ggml_kit.tables, 0);
    refused_forward(0, 200, 1);
    forward(0, 0, 20);
    ggml_kit.without_room = true;
    ggml_kit.aborts = 0;
    refused_forward(0, 20, 100);
    assert_int_equal(ggml_kit.aborts, 0); // no step is open
    ggml_kit.without_room = false;
    forward(0, 20, 100);
}

static void test_a_forward_that_ends_early(void **state)
{
    (void)state;
    for (int64_t each = 5; each < MOST; each += 200) {
        forward(0, 0, each);
        const int n = rig.graph.n;
        for (int left = 1; left < n; left++) {
            make_graph(each, 1, 0);
            make_tokens(0, each, each, 0);
            rig.graph.n -= left;
            assert_int_equal(compute(), GGML_STATUS_SUCCESS);
        }
        forward(0, each, 3);
    }
}

static void test_a_session_with_a_name(void **state)
{
    (void)state;
    end_backend();
    setenv("KVQ_LLAMA_SESSION", "chat", 1);
    begin_backend();
    forward(0, 0, 2); // llama.cpp warms up
    forward(0, 0, 130);
    forward(0, 130, 1);
    end_backend();
    begin_backend();
    forward(0, 131, 1);
    end_backend();
    begin_backend();
    static float kept[LAYERS][2][CELLS][KV];
    for (int i = 0; i < LAYERS; i++) {
        memcpy(kept[i][0], rig.layers[i].all_k[0], sizeof kept[i][0]);
        memcpy(kept[i][1], rig.layers[i].all_v[0], sizeof kept[i][1]);
    }
    forward(0, 0, 2); // warms up: what was kept stays
    refused_forward(0, 131, 1);
    forward(0, 0, 3);
    forward(0, 3, 1);
    for (int i = 0; i < LAYERS; i++) {
        memcpy(rig.layers[i].all_k[0], kept[i][0], sizeof kept[i][0]);
        memcpy(rig.layers[i].all_v[0], kept[i][1], sizeof kept[i][1]);
    }
    memset(rig.layers[0].k_cache.data, 0, 64); // llama.cpp restores its cells
    forward(0, 132, 1);
    forward(0, 133, 100);
    end_backend();
    begin_backend();
    refused_forward(0, 10, 1); // which tokens these were is forgotten
    forward(0, 233, 1);
}

// A deep cut in a step that fails for another stream leaves nothing that is taken on trust.
static void test_a_cut_in_a_step_that_fails(void **state)
{
    (void)state;
    char *cells = rig.layers[0].k_cache.data, old[2 * KV];
    forward(0, 0, 200);
    memcpy(old, cells, sizeof old);
    forward(0, 200, 100);
    forward(1, 0, 30);
    cells[2 * KV * CELLS] ^= 1; // the second stream's were restored
    make_graph(2, 2, 0);
    make_tokens(0, 150, 2, 0);
    make_tokens(1, 30, 2, 2);
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    memcpy(cells, old, sizeof old);
    refused_forward(0, 150, 1);
    forward(0, 0, 3);
}

static void test_options_are_checked(void **state)
{
    (void)state;
    static const char *const wrong[][2] = {{"KVQ_LLAMA_ATTENTION", "exat"},
                                           {"KVQ_LLAMA_ROLLBACK", "many"},
                                           {"KVQ_LLAMA_ROLLBACK", "-1"},
                                           {"KVQ_LLAMA_ROLLBACK", "1025"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv(wrong[i][0], wrong[i][1], 1);
        refused_forward(0, 0, 3);
        unsetenv(wrong[i][0]);
    }
    char name[200];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    setenv("KVQ_LLAMA_SESSION", name, 1);
    refused_forward(0, 0, 3);
    unsetenv("KVQ_LLAMA_SESSION");
    forward(0, 0, 3);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        setenv(wrong[i][0], "", 1); // as if not set
    setenv("KVQ_LLAMA_SESSION", "", 1);
    setenv("KVQ_LLAMA_FORMAT", "", 1);
    ggml_kit.names = 0;
    forward(0, 0, 1);
    forward(1, 0, 3);
    assert_int_equal(ggml_kit.names, 0);
}

static void test_another_version_of_ggml(void **state)
{
    (void)state;
    ggml_kit.other_version = true;
    assert_null(ggml_backend_init());
    ggml_kit.other_version = false;
    assert_non_null(ggml_backend_init());
}

// ---- What is refused ---------------------------------------------------------------------------

// llama.cpp saves and restores cells by itself.
static void test_restored_cells(void **state)
{
    (void)state;
    char *cells = rig.layers[0].k_cache.data;
    char saved[2 * KV], copied[2 * KV];
    forward(0, 0, 100);
    memcpy(saved, cells, sizeof saved);
    memcpy(cells, saved, sizeof saved); // nothing has changed since
    forward(0, 100, 1);
    memcpy(copied, cells, sizeof copied);
    forward(0, 0, 150);
    forward(1, 0, 30);
    memcpy(cells, copied, sizeof copied);
    listen_to_words();
    refused_forward(0, 101, 1);
    refused_forward(0, 150, 1);
    assert_int_equal(heard("--cache-ram 0; llama-cpp-python: Llama.reset()"), 2);
    memset(cells, 0, sizeof saved);
    refused_forward(0, 101, 1);
    memcpy(cells + 2 * KV * CELLS, copied, sizeof copied); // into another stream
    refused_forward(1, 30, 1);
    forward(0, 0, 3);
    forward(0, 3, 1);
    forward(1, 0, 2);
}

static void test_masks(void **state)
{
    (void)state;
    forward(0, 0, 10);
    for (int i = 0; i < 3; i++) {
        make_graph(2, 1, 0);
        make_tokens(0, 10, 2, 0);
        rig.visible[CELLS * (i & 1) + (i == 0 ? 3 : i == 1 ? 2 : 11)] = i == 2 ? ZERO : HIDDEN;
        assert_int_equal(compute(), GGML_STATUS_FAILED);
    }
    forward(0, 10, 2);
}

// A layer of its own kind among others.
static void test_one_layer_is_another(void **state)
{
    (void)state;
    static uint16_t window[CELLS];
    struct ggml_tensor *attention = &rig.layers[2].attention, mask;
    forward(0, 0, 10);
    for (int i = 0; i < 3; i++) {
        make_graph(1, 1, 0);
        make_tokens(0, 10, 1, 0);
        memcpy(window, rig.visible, sizeof window);
        window[0] = HIDDEN; // a sliding window
        mask = rig.mask;
        mask.data = window;
        if (i == 0)
            attention->src[3] = &mask;
        else
            rig.layers[2].q.ne[i] += 1;
        assert_int_equal(compute(), GGML_STATUS_FAILED);
    }
    forward(0, 10, 1);
}

static void test_scattered_cells(void **state)
{
    (void)state;
    make_graph(3, 1, 0);
    make_tokens(0, 0, 3, 0);
    rig.cell[2] = 5;
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    make_graph(3, 1, 0);
    make_tokens(0, 0, 3, 0);
    rig.cell[1] = -1;
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    forward(0, 0, 3);
}

static void test_a_context_shift(void **state)
{
    (void)state;
    forward(0, 0, 10);
    rig.shift = kit_view(&rig.layers[0].k_cache, GGML_OP_ROPE);
    assert_true(takes(&rig.shift));
    rig.graph.nodes[0] = &rig.shift;
    rig.graph.n = 1;
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    struct ggml_tensor rope = {.op = GGML_OP_ROPE, .src = {&rig.layers[0].q}};
    assert_false(takes(&rope));
    refused_forward(0, 10, 1); // llama.cpp goes on all the same
    forward(0, 0, 10);
    forward(0, 10, 1);
    // As it shifts keys of few bits: out of the cache, and back.
    struct ggml_tensor out = {.op = GGML_OP_CPY, .src = {&rig.layers[1].k}};
    assert_true(takes(&out));
    out.flags = GGML_TENSOR_FLAG_COMPUTE;
    rig.graph.nodes[0] = &out;
    rig.graph.n = 1;
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    refused_forward(0, 11, 1);
    forward(0, 0, 3);
}

static void test_attention_without_rows(void **state)
{
    (void)state;
    forward(0, 0, 10);
    make_graph(1, 1, 0);
    make_tokens(0, 10, 1, 0);
    rig.graph.nodes[1]->flags = 0;
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    forward(0, 10, 1);
}

// Whose windows are in bf16 as well, and what is read back: a value that f16 has not is kept.
static void test_bf16(void **state)
{
    (void)state;
    struct layer *l = &rig.layers[1];
    const float large = 1 << 17, usual = rig.near;
    setenv("KVQ_LLAMA_FORMAT", "bf16", 1);
    make_graph(200, 1, 0);
    make_tokens(0, 0, 200, 0);
    l->given_v[140 * KV + 3] = l->all_v[0][140][3] = large;
    rig.near = 1; // of outputs of some hundreds
    assert_int_equal(ask(), rig.graph.n);
    assert_int_equal(compute(), GGML_STATUS_SUCCESS);
    check(0, 0, 200, 0);
    forward(0, 200, 1);
    forward(0, 150, 3); // deeper than what kvqd can take back
    forward(0, 153, 1);
    rig.near = usual;
}

// A new context refuses what one that is there refuses at a prompt.
static void test_a_format_that_is_none(void **state)
{
    (void)state;
    setenv("KVQ_LLAMA_FORMAT", "oscar9", 1);
    refused_forward(0, 0, 3);
    listen_to_words();
    assert_null(rig.device->iface.init_backend(rig.device, NULL));
    assert_int_equal(heard("KVQ_LLAMA_FORMAT is \"oscar9\""), 1);
    listen_to_words();
    assert_null(rig.device->iface.init_backend(rig.device, NULL));
    assert_int_equal(heard("did you mean 'oscar2'?"), 1);
    setenv("KVQ_LLAMA_FORMAT", "f16", 1);
    setenv("KVQ_LLAMA_ROLLBACK", "many", 1);
    assert_null(rig.device->iface.init_backend(rig.device, NULL));
    setenv("KVQ_LLAMA_ROLLBACK", "20", 1);
    forward(0, 0, 3);
    setenv("KVQ_LLAMA_FORMAT", "vecinfer-4@book", 1); // whether that is one the model's shape says
    end_backend();
    begin_backend();
    refused_forward(0, 0, 3);
}

static void test_a_daemon_that_goes(void **state)
{
    (void)state;
    forward(0, 0, 100);
    daemon_end(&rig.daemon, SIGKILL);
    refused_forward(0, 100, 1);
    assert_null(rig.device->iface.init_backend(rig.device, NULL));
    end_backend();
    daemon_start(&rig.daemon);
    begin_backend();
    forward(0, 0, 3);
}

// The same context goes on with prompts that begin at their first token.
static void test_a_daemon_that_comes_back(void **state)
{
    (void)state;
    forward(0, 0, 100);
    forward(0, 100, 1);
    forward(1, 0, 30);
    daemon_end(&rig.daemon, SIGKILL);
    listen_to_words();
    refused_forward(0, 0, 3);
    refused_forward(0, 101, 1);
    assert_int_equal(heard("the next prompt that begins at the first token"), 2);
    daemon_start(&rig.daemon);
    listen_to_words();
    refused_forward(0, 3, 1);
    refused_forward(0, 101, 1);
    assert_int_equal(heard("kvq_reattach"), 0);
    listen_to_words();
    forward(0, 0, 200);
    assert_int_equal(heard("connected again: kvqd was restarted"), 1);
    forward(0, 200, 1);
    forward(0, 50, 3); // deeper than what kvqd can take back
    refused_forward(1, 30, 1);
    forward(1, 0, 3);
    forward(0, 53, 1);
    daemon_end(&rig.daemon, SIGTERM);
    daemon_start(&rig.daemon);
    listen_to_words();
    forward(0, 0, 3); // nothing was asked meanwhile
    forward(0, 3, 100);
    refused_forward(1, 3, 1);
    assert_int_equal(heard("the kvqd that had them is gone; begin anew"), 1);
    forward(0, 103, 1);
}

// So it does where the session has a name, which the new daemon does not know.
static void test_a_daemon_that_comes_back_without_a_name(void **state)
{
    (void)state;
    end_backend();
    setenv("KVQ_LLAMA_SESSION", "chat", 1);
    begin_backend();
    forward(0, 0, 100);
    daemon_end(&rig.daemon, SIGKILL);
    daemon_start(&rig.daemon);
    ggml_kit.names = 0;
    forward(0, 0, 70);
    forward(0, 70, 1);
    assert_int_equal(ggml_kit.names, 1);
    refused_forward(0, 80, 1);
    forward(0, 10, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_rows_are_taken_with_their_attention, setup, teardown),
        cmocka_unit_test_setup_teardown(test_attention_that_is_no_flash_attention_is_told, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_types_without_effect_are_told, setup, teardown),
        cmocka_unit_test_setup_teardown(test_attention_of_other_kinds_is_left, setup, teardown),
        cmocka_unit_test_setup_teardown(test_more_layers_than_a_session_has, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_cache_where_another_was, setup, teardown),
        cmocka_unit_test_setup_teardown(test_layers_with_windows_are_left, setup, teardown),
        cmocka_unit_test_setup_teardown(test_two_contexts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_prompt_and_decoding, setup, teardown),
        cmocka_unit_test_setup_teardown(test_streams, setup, teardown),
        cmocka_unit_test_setup_teardown(test_going_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_going_on_without_room, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_forward_that_ends_early, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_session_with_a_name, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_cut_in_a_step_that_fails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_options_are_checked, setup, teardown),
        cmocka_unit_test(test_another_version_of_ggml),
        cmocka_unit_test_setup_teardown(test_restored_cells, setup, teardown),
        cmocka_unit_test_setup_teardown(test_masks, setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_layer_is_another, setup, teardown),
        cmocka_unit_test_setup_teardown(test_scattered_cells, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_context_shift, setup, teardown),
        cmocka_unit_test_setup_teardown(test_attention_without_rows, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bf16, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_format_that_is_none, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_daemon_that_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_daemon_that_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_daemon_that_comes_back_without_a_name, setup,
                                        teardown)};
    daemon_prepare(&rig.daemon);
    rig.device = ggml_backend_init()->iface.get_device(ggml_backend_init(), 0);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return daemon_cleanup(&rig.daemon) || failed ? 1 : 0;
}
