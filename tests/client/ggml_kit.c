// SPDX-License-Identifier: Apache-2.0
//
// See ggml_kit.h.
#include "tests/client/ggml_kit.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "client/kvq.h"

struct ggml_kit ggml_kit = {.buffer_size = 1, .opens_before_one_fails = -1};

int ggml_graph_n_nodes(struct ggml_cgraph *graph)
{
    return graph->n;
}

struct ggml_tensor *ggml_graph_node(struct ggml_cgraph *graph, int i)
{
    return graph->nodes[i];
}

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void)
{
    return NULL;
}

void *ggml_backend_buffer_get_base(struct ggml_backend_buffer *buffer)
{
    return buffer;
}

size_t ggml_backend_buffer_get_size(struct ggml_backend_buffer *buffer)
{
    (void)buffer;
    return ggml_kit.buffer_size;
}

const char *ggml_op_name(enum ggml_op op)
{
    return op == GGML_OP_SET_ROWS         ? ggml_kit.other_version ? "GET_ROWS" : "SET_ROWS"
           : op == GGML_OP_FLASH_ATTN_EXT ? "FLASH_ATTN_EXT"
                                          : "OTHER";
}

const char *ggml_type_name(enum ggml_type type)
{
    return type == GGML_TYPE_F16 ? "f16" : type == GGML_TYPE_Q8_0 ? "q8_0" : "other";
}

bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type)
{
    return type == NULL;
}

float kit_value(void)
{
    ggml_kit.seed = ggml_kit.seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(ggml_kit.seed >> 33) % 256 - 128) / 64;
}

struct ggml_tensor kit_tensor(enum ggml_type type, void *data, int64_t a, int64_t b, int64_t c,
                              int64_t d)
{
    const size_t one = type == GGML_TYPE_F32 ? 4 : type == GGML_TYPE_F16 ? 2 : 8;
    struct ggml_tensor t = {.type = type, .data = data, .ne = {a, b, c, d}};
    t.nb[0] = one;
    for (int i = 1; i < 4; i++)
        t.nb[i] = t.nb[i - 1] * (size_t)t.ne[i - 1];
    t.flags = GGML_TENSOR_FLAG_COMPUTE;
    return t;
}

struct ggml_tensor kit_view(struct ggml_tensor *of, enum ggml_op op)
{
    struct ggml_tensor t = *of;
    t.view_src = of;
    t.op = op;
    return t;
}

void kit_attend(const float *keys, const float *values, int64_t seen, const float *q, double *out)
{
    double sum = 0, weights[KIT_CELLS];
    assert_true(seen <= KIT_CELLS);
    for (int64_t t = 0; t < seen; t++) {
        double dot = 0;
        for (int i = 0; i < KIT_DIM; i++)
            dot += (double)q[i] * keys[t * KIT_STRIDE + i];
        const double cap = (double)KIT_CAP;
        sum += weights[t] = exp(cap * tanh(dot * (double)KIT_SCALE / cap));
    }
    for (int i = 0; i < KIT_DIM; i++) {
        out[i] = 0;
        for (int64_t t = 0; t < seen; t++)
            out[i] += weights[t] / sum * values[t * KIT_STRIDE + i];
    }
}

// Page tables that this process has mapped.
static int count_tables(void)
{
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "kvq-table") != NULL;
    fclose(maps);
    return n;
}

// In the library's stead, for the backend alone, which is in this program.
int kvq_session_open(kvq_client *client, const struct kvq_session_options *options,
                     kvq_session *session, struct kvq_session_info *info)
{
    int (*open)(kvq_client *, const struct kvq_session_options *, kvq_session *,
                struct kvq_session_info *);
    *(void **)&open = dlsym(RTLD_NEXT, "kvq_session_open");
    assert_non_null(open);
    assert_non_null(options->place); // else a daemon with GPUs would choose one of them
    assert_string_equal(options->place, "host");
    ggml_kit.names += options->name != NULL;
    if (ggml_kit.opens_before_one_fails-- == 0) {
        ggml_kit.tables = count_tables();
        return KVQ_E_NO_MEMORY;
    }
    return open(client, options, session, info);
}

int kvq_step_begin_ids(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                       const struct kvq_ids *ids, uint64_t *step)
{
    int (*begin)(kvq_queue *, struct kvq_entry *, uint32_t, const struct kvq_ids *, uint64_t *);
    *(void **)&begin = dlsym(RTLD_NEXT, "kvq_step_begin_ids");
    assert_non_null(begin);
    for (uint32_t i = 0; i < n && ggml_kit.without_room; i++)
        entries[i].status = KVQ_E_NO_MEMORY;
    return ggml_kit.without_room ? 0 : begin(queue, entries, n, ids, step);
}

int kvq_step_abort(kvq_queue *queue, uint64_t step, struct kvq_entry *entries, uint32_t n)
{
    int (*leave)(kvq_queue *, uint64_t, struct kvq_entry *, uint32_t);
    *(void **)&leave = dlsym(RTLD_NEXT, "kvq_step_abort");
    assert_non_null(leave);
    ggml_kit.aborts++;
    return leave(queue, step, entries, n);
}
