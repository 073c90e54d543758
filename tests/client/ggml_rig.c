// SPDX-License-Identifier: Apache-2.0
//
// See ggml_rig.h.
#include "tests/client/ggml_rig.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

struct rig rig = {.near = 2e-3f};

void make_caches(void)
{
    static char buffer;
    const size_t bytes = (size_t)2 * KV * CELLS * STREAMS;
    for (int i = 0; i < LAYERS; i++) {
        struct layer *l = &rig.layers[i];
        struct ggml_tensor *both[2] = {&l->k_cache, &l->v_cache};
        for (int j = 0; j < 2; j++) {
            void *data = both[j]->data;
            if (!data)
                data =
                    mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memset(data, 1, bytes);
            *both[j] = kit_tensor(GGML_TYPE_F16, data, KV, CELLS, STREAMS, 1);
            both[j]->buffer = (void *)&buffer;
            snprintf(both[j]->name, sizeof both[j]->name, "cache_%c_l%d", "kv"[j], i + 2);
        }
    }
}

void make_graph(int64_t each, int64_t n, int64_t stream)
{
    const int64_t rows = each * n;
    const float params[3] = {KIT_SCALE, 0, KIT_CAP};
    rig.cells = kit_tensor(GGML_TYPE_I64, rig.cell, rows, 1, 1, 1);
    rig.mask = kit_tensor(GGML_TYPE_F16, rig.visible, CELLS, each, 1, n);
    rig.graph.n = 0;
    for (int i = 0; i < LAYERS; i++) {
        struct layer *l = &rig.layers[i];
        l->k_rows = kit_tensor(GGML_TYPE_F32, l->given_k, KV, rows, 1, 1);
        l->v_rows = kit_tensor(GGML_TYPE_F32, l->given_v, KV, rows, 1, 1);
        l->set_k = kit_view(&l->k_cache, GGML_OP_SET_ROWS);
        l->set_v = kit_view(&l->v_cache, GGML_OP_SET_ROWS);
        l->set_k.src[0] = &l->k_rows;
        l->set_v.src[0] = &l->v_rows;
        l->set_k.src[1] = l->set_v.src[1] = &rig.cells;
        l->q = kit_tensor(GGML_TYPE_F32, l->queries, DIM, Q_HEADS, each, n); // then permuted
        l->q = (struct ggml_tensor){.type = GGML_TYPE_F32,
                                    .data = l->queries,
                                    .ne = {DIM, each, Q_HEADS, n},
                                    .nb = {4, l->q.nb[2], l->q.nb[1], l->q.nb[3]}};
        l->k = kit_view(&l->k_cache, GGML_OP_PERMUTE);
        l->v = kit_view(&l->v_cache, GGML_OP_PERMUTE);
        struct ggml_tensor *both[2] = {&l->k, &l->v};
        for (int j = 0; j < 2; j++) {
            const int64_t ne[4] = {DIM, CELLS, KV_HEADS, n};
            memcpy(both[j]->ne, ne, sizeof ne);
            both[j]->data = (char *)both[j]->data + stream * 2 * KV * CELLS;
        }
        l->attention = kit_tensor(GGML_TYPE_F32, l->out, DIM, Q_HEADS, each, n);
        l->attention.op = GGML_OP_FLASH_ATTN_EXT;
        memcpy(l->attention.op_params, params, sizeof params);
        struct ggml_tensor *from[4] = {&l->q, &l->k, &l->v, &rig.mask};
        memcpy(l->attention.src, from, sizeof from);
        struct ggml_tensor *nodes[PER_LAYER] = {&l->set_v, &l->set_k, &l->attention};
        memcpy(&rig.graph.nodes[rig.graph.n], nodes, sizeof nodes);
        rig.graph.n += PER_LAYER;
    }
}

bool takes(const struct ggml_tensor *node)
{
    return rig.device->iface.supports_op(rig.device, node);
}

int ask(void)
{
    int taken = 0;
    for (int i = 0; i < rig.graph.n; i++)
        taken += takes(rig.graph.nodes[i]);
    return taken;
}

void make_tokens(int64_t stream, int64_t first, int64_t each, int64_t row)
{
    for (int64_t t = 0; t < each; t++) {
        rig.cell[row + t] = stream * CELLS + first + t;
        for (int64_t c = 0; c < CELLS; c++)
            rig.visible[(row + t) * CELLS + c] = c <= first + t ? ZERO : HIDDEN;
        for (int i = 0; i < LAYERS; i++) {
            struct layer *l = &rig.layers[i];
            for (int64_t j = 0; j < KV; j++) {
                l->given_k[(row + t) * KV + j] = l->all_k[stream][first + t][j] = kit_value();
                l->given_v[(row + t) * KV + j] = l->all_v[stream][first + t][j] = kit_value();
            }
            for (int64_t j = 0; j < Q; j++)
                l->queries[(row + t) * Q + j] = kit_value();
        }
    }
}

enum ggml_status compute(void)
{
    return rig.backend->iface.graph_compute(rig.backend, &rig.graph);
}

void check(int64_t stream, int64_t first, int64_t each, int64_t row)
{
    for (int i = 0; i < LAYERS; i++) {
        const struct layer *l = &rig.layers[i];
        for (int64_t t = 0; t<each; t += each> 8 ? each / 5 : 1) {
            for (int h = 0; h < Q_HEADS; h++) {
                const int64_t at = ((row + t) * Q_HEADS + h) * DIM;
                const int from = h / (Q_HEADS / KV_HEADS) * DIM;
                double want[DIM];
                kit_attend(&l->all_k[stream][0][from], &l->all_v[stream][0][from], first + t + 1,
                           l->queries + at, want);
                for (int d = 0; d < DIM; d++)
                    assert_true(fabs(want[d] - (double)l->out[at + d]) < (double)rig.near);
            }
        }
    }
}

void forward(int64_t stream, int64_t first, int64_t each)
{
    make_graph(each, 1, stream);
    make_tokens(stream, first, each, 0);
    assert_int_equal(ask(), rig.graph.n);
    assert_int_equal(compute(), GGML_STATUS_SUCCESS);
    check(stream, first, each, 0);
}

void refused_forward(int64_t stream, int64_t first, int64_t each)
{
    static float kept[LAYERS][2][CELLS][KV]; // what was handed over before
    for (int i = 0; i < LAYERS; i++) {
        memcpy(kept[i][0], rig.layers[i].all_k[stream], sizeof kept[i][0]);
        memcpy(kept[i][1], rig.layers[i].all_v[stream], sizeof kept[i][1]);
    }
    make_graph(each, 1, stream);
    make_tokens(stream, first, each, 0);
    assert_int_equal(ask(), rig.graph.n);
    assert_int_equal(compute(), GGML_STATUS_FAILED);
    for (int i = 0; i < LAYERS; i++) {
        memcpy(rig.layers[i].all_k[stream], kept[i][0], sizeof kept[i][0]);
        memcpy(rig.layers[i].all_v[stream], kept[i][1], sizeof kept[i][1]);
    }
}

void begin_backend(void)
{
    void (*set_threads)(ggml_backend_t, int);
    rig.backend = rig.device->iface.init_backend(rig.device, NULL);
    assert_non_null(rig.backend);
    *(void **)&set_threads =
        rig.device->reg->iface.get_proc_address(rig.device->reg, "ggml_backend_set_n_threads");
    set_threads(rig.backend, 2);
    make_caches();
    make_graph(1, 1, 0);
    ask(); // llama.cpp plans before it computes
}

void end_backend(void)
{
    if (rig.backend)
        rig.backend->iface.free(rig.backend);
    rig.backend = NULL;
}

int setup(void **state)
{
    static const char *const flags[] = {"--pool-bytes", "128mb", "--workers", "1", NULL};
    (void)state;
    ggml_kit.seed = 7;
    rig.daemon.flags = flags;
    daemon_start(&rig.daemon);
    setenv("KVQ_RUNTIME_DIR", rig.daemon.directory, 1);
    setenv("KVQ_LLAMA_FORMAT", "f16", 1);
    setenv("KVQ_LLAMA_ROLLBACK", "20", 1);
    begin_backend();
    return 0;
}

int teardown(void **state)
{
    (void)state;
    end_backend();
    unsetenv("KVQ_LLAMA_SESSION");
    daemon_end(&rig.daemon, SIGTERM);
    return 0;
}

// ---- Words -------------------------------------------------------------------------------------

static struct {
    int file, own; // where stderr goes, and where it went
} words;

void listen_to_words(void)
{
    words.file = memfd_create("kvq-test-words", MFD_CLOEXEC);
    words.own = dup(STDERR_FILENO);
    assert_true(words.file >= 0 && words.own >= 0);
    assert_true(dup2(words.file, STDERR_FILENO) >= 0);
}

int heard(const char *what)
{
    static char text[1 << 14];
    assert_true(dup2(words.own, STDERR_FILENO) >= 0);
    const ssize_t n = pread(words.file, text, sizeof text - 1, 0);
    assert_true(n >= 0 && (size_t)n < sizeof text - 1);
    text[n] = 0;
    fputs(text, stderr);
    close(words.own);
    close(words.file);
    int times = 0;
    for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
        times++;
    return times;
}
