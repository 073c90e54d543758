// SPDX-License-Identifier: Apache-2.0
//
// A library with the functions of ggml that kvq-bench --peer looks up, for tests of the loader.
// Its tensors are real and its attention is right, in plain loops, so that a mistake in what is
// handed over shows in the outputs. Types are labels: values are the upper half of an fp32, or all
// of it for q4_0.
//
// Compiled with FAKE_BASE it has everything but the CPU backend, with FAKE_CPU that alone, and with
// FAKE_WITHOUT_FLASH no flash attention. FAKE_GGML in the environment chooses what goes wrong;
// FAKE_GGML_LOG names a file for what was called.
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ggml_backend {
    int threads;
};

#ifndef FAKE_CPU

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = 8, I32 = 26 };
enum { DIMS = 4, MAX_TENSORS = 8192 };
enum op { NONE, ROWS, FLASH };

struct ggml_tensor {
    int type;
    int64_t n[DIMS];
    size_t stride[DIMS];
    char *data;
    enum op op;
    struct ggml_tensor *from[DIMS];
    float scale;
};

struct ggml_cgraph {
    struct ggml_tensor *node[MAX_TENSORS];
    int n;
};

struct ggml_context {
    struct ggml_tensor *tensor[MAX_TENSORS];
    struct ggml_cgraph *graph;
    int n;
};

struct ggml_backend_buffer {
    char *data; // NULL: the caller's
};

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

static int live; // contexts, buffers and backends

static bool wrong(const char *what)
{
    const char *chosen = getenv("FAKE_GGML");
    return chosen && strcmp(chosen, what) == 0;
}

static void note(const char *format, ...)
{
    const char *path = getenv("FAKE_GGML_LOG");
    FILE *f = path ? fopen(path, "a") : NULL;
    va_list args;
    if (!f)
        return;
    va_start(args, format);
    vfprintf(f, format, args);
    va_end(args);
    fclose(f);
}

// ---- Types ----

static size_t value_bytes(int type)
{
    return type == F16 || type == Q8_0 ? 2 : 4;
}

static float read_value(int type, const char *from)
{
    uint32_t bits = 0;
    size_t n = value_bytes(type);
    memcpy((char *)&bits + sizeof bits - n, from, n);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

const char *ggml_version(void)
{
    return "9.8.7-fake";
}

const char *ggml_type_name(int type)
{
    if (type == Q8_0 && wrong("types"))
        return "q7_7";
    return type == F32    ? "f32"
           : type == F16  ? "f16"
           : type == Q4_0 ? "q4_0"
           : type == Q8_0 ? "q8_0"
           : type == I32  ? "i32"
                          : NULL;
}

size_t ggml_row_size(int type, int64_t n)
{
    return wrong("rows") ? (size_t)1 << 40 : (size_t)n * value_bytes(type);
}

size_t ggml_quantize_chunk(int type, const float *from, void *to, int64_t start, int64_t rows,
                           int64_t length, const float *importance)
{
    size_t bytes = value_bytes(type);
    (void)importance;
    for (int64_t i = start; i < start + rows * length; i++)
        memcpy((char *)to + (size_t)i * bytes, (const char *)&from[i] + sizeof *from - bytes,
               bytes);
    return wrong("quantize") ? 0 : (size_t)(rows * length) * bytes;
}

// ---- Contexts and tensors ----

struct ggml_context *ggml_init(struct ggml_init_params params)
{
    if (params.mem_size == 0 || params.mem_buffer || !params.no_alloc)
        abort();
    live++;
    return calloc(1, sizeof(struct ggml_context));
}

void ggml_free(struct ggml_context *ctx)
{
    for (int i = 0; i < ctx->n; i++)
        free(ctx->tensor[i]);
    free(ctx->graph);
    free(ctx);
    live--;
}

size_t ggml_tensor_overhead(void)
{
    return sizeof(struct ggml_tensor);
}

size_t ggml_graph_overhead_custom(size_t size, bool grads)
{
    return grads ? 0 : size * sizeof(void *);
}

static struct ggml_tensor *new_tensor(struct ggml_context *ctx)
{
    if (ctx->n == MAX_TENSORS)
        abort();
    return ctx->tensor[ctx->n++] = calloc(1, sizeof(struct ggml_tensor));
}

struct ggml_tensor *ggml_new_tensor_4d(struct ggml_context *ctx, int type, int64_t n0, int64_t n1,
                                       int64_t n2, int64_t n3)
{
    struct ggml_tensor *t = new_tensor(ctx);
    *t = (struct ggml_tensor){.type = type, .n = {n0, n1, n2, n3}};
    t->stride[0] = value_bytes(type);
    for (int i = 1; i < DIMS; i++)
        t->stride[i] = t->stride[i - 1] * (size_t)t->n[i - 1];
    return t;
}

struct ggml_tensor *ggml_permute(struct ggml_context *ctx, struct ggml_tensor *a, int to0, int to1,
                                 int to2, int to3)
{
    int to[DIMS] = {to0, to1, to2, to3};
    struct ggml_tensor *t = new_tensor(ctx);
    *t = *a;
    for (int i = 0; i < DIMS; i++) {
        t->n[to[i]] = a->n[i];
        t->stride[to[i]] = a->stride[i];
    }
    return t;
}

struct ggml_tensor *ggml_get_rows(struct ggml_context *ctx, struct ggml_tensor *a,
                                  struct ggml_tensor *rows)
{
    struct ggml_tensor *t = ggml_new_tensor_4d(ctx, F32, a->n[0], rows->n[0], 1, 1);
    t->op = ROWS;
    t->from[0] = a;
    t->from[1] = rows;
    return t;
}

#ifndef FAKE_WITHOUT_FLASH
struct ggml_tensor *ggml_flash_attn_ext(struct ggml_context *ctx, struct ggml_tensor *q,
                                        struct ggml_tensor *k, struct ggml_tensor *v,
                                        struct ggml_tensor *mask, float scale, float max_bias,
                                        float softcap)
{
    if (mask->type != F16 || mask->n[0] != k->n[1] || mask->n[1] < 64 || max_bias != 0 ||
        softcap != 0 || v->type != k->type || v->n[1] != k->n[1])
        abort();
    note("flash %s %s\n", ggml_type_name(k->type),
         k->stride[1] == k->stride[0] * (size_t)k->n[0] ? "heads" : "tokens");
    struct ggml_tensor *t = ggml_new_tensor_4d(ctx, F32, v->n[0], q->n[2], q->n[1], 1);
    t->op = FLASH;
    t->from[0] = q;
    t->from[1] = k;
    t->from[2] = v;
    t->from[3] = mask;
    t->scale = scale;
    return t;
}
#endif

// ---- Graphs ----

struct ggml_cgraph *ggml_new_graph_custom(struct ggml_context *ctx, size_t size, bool grads)
{
    if (size > MAX_TENSORS || grads)
        abort();
    return ctx->graph = calloc(1, sizeof(struct ggml_cgraph));
}

void ggml_build_forward_expand(struct ggml_cgraph *graph, struct ggml_tensor *t)
{
    graph->node[graph->n++] = t;
}

static void compute_rows(struct ggml_tensor *t)
{
    const struct ggml_tensor *a = t->from[0];
    const int32_t *rows = (const void *)t->from[1]->data;
    float *out = (void *)t->data;
    for (int64_t i = 0; i < t->n[1]; i++)
        for (int64_t j = 0; j < t->n[0]; j++)
            *out++ = read_value(a->type, a->data + (size_t)rows[i] * a->stride[1] +
                                             (size_t)j * a->stride[0]);
}

static const char *row_of(const struct ggml_tensor *t, int64_t token, int64_t head)
{
    return t->data + (size_t)token * t->stride[1] + (size_t)head * t->stride[2];
}

static void compute_head(struct ggml_tensor *t, int64_t head, int64_t kv_head)
{
    const struct ggml_tensor *k = t->from[1], *v = t->from[2], *mask = t->from[3];
    const float *q = (const void *)row_of(t->from[0], 0, head);
    float *out = (float *)(void *)t->data + head * t->n[0];
    double sum = 0, sums[256] = {0};
    for (int64_t i = 0; i < k->n[1]; i++) {
        double logit = 0;
        if (mask->data[2 * i] || mask->data[2 * i + 1])
            abort();
        for (int64_t j = 0; j < k->n[0]; j++)
            logit += (double)(q[j] * read_value(k->type,
                                                row_of(k, i, kv_head) + (size_t)j * k->stride[0]));
        double p = exp(logit * (double)t->scale);
        sum += p;
        for (int64_t j = 0; j < v->n[0]; j++)
            sums[j] +=
                p * (double)read_value(v->type, row_of(v, i, kv_head) + (size_t)j * v->stride[0]);
    }
    for (int64_t j = 0; j < v->n[0]; j++)
        out[j] = (float)(sums[j] / sum);
}

static void compute_flash(struct ggml_tensor *t)
{
    int64_t heads = t->from[0]->n[2], group = heads / t->from[1]->n[2];
    if (wrong("crash"))
        abort();
    for (int64_t h = 0; h < heads; h++)
        compute_head(t, h, wrong("head") ? 0 : h / group);
    if (wrong("garbage"))
        memset(t->data, 0, (size_t)(t->n[0] * heads) * sizeof(float));
}

int ggml_backend_graph_compute(struct ggml_backend *backend, struct ggml_cgraph *graph)
{
    cpu_set_t cpus;
    sched_getaffinity(0, sizeof cpus, &cpus);
    note("compute %d threads, %d cpus\n", backend->threads, CPU_COUNT(&cpus));
    for (int i = 0; i < graph->n; i++)
        if (graph->node[i]->op == FLASH)
            compute_flash(graph->node[i]);
        else
            compute_rows(graph->node[i]);
    return wrong("compute") ? -1 : 0;
}

// ---- Memory ----

struct ggml_backend_buffer *ggml_backend_cpu_buffer_from_ptr(void *data, size_t bytes)
{
    if ((uintptr_t)data % 64 || bytes == 0)
        abort();
    live++;
    return calloc(1, sizeof(struct ggml_backend_buffer));
}

void ggml_backend_tensor_alloc(struct ggml_backend_buffer *buffer, struct ggml_tensor *t,
                               void *data)
{
    if (buffer->data || t->data)
        abort();
    t->data = data;
}

static size_t bytes_of(const struct ggml_tensor *t)
{
    return t->stride[3] * (size_t)t->n[3];
}

struct ggml_backend_buffer *ggml_backend_alloc_ctx_tensors(struct ggml_context *ctx,
                                                           struct ggml_backend *backend)
{
    size_t bytes = 0;
    (void)backend;
    if (wrong("memory"))
        return NULL;
    for (int i = 0; i < ctx->n; i++)
        bytes += ctx->tensor[i]->data ? 0 : bytes_of(ctx->tensor[i]);
    struct ggml_backend_buffer *b = calloc(1, sizeof *b);
    char *at = b->data = calloc(1, bytes);
    for (int i = 0; i < ctx->n; i++)
        if (!ctx->tensor[i]->data) {
            ctx->tensor[i]->data = at;
            at += bytes_of(ctx->tensor[i]);
        }
    live++;
    return b;
}

void ggml_backend_buffer_free(struct ggml_backend_buffer *buffer)
{
    free(buffer->data);
    free(buffer);
    live--;
}

void ggml_backend_tensor_set(struct ggml_tensor *t, const void *data, size_t offset, size_t bytes)
{
    if (offset + bytes > bytes_of(t))
        abort();
    memcpy(t->data + offset, data, bytes);
}

void ggml_backend_tensor_get(const struct ggml_tensor *t, void *data, size_t offset, size_t bytes)
{
    if (offset + bytes > bytes_of(t))
        abort();
    memcpy(data, t->data + offset, bytes);
}

bool ggml_backend_supports_op(struct ggml_backend *backend, const struct ggml_tensor *op)
{
    (void)backend;
    return op->from[1]->type != Q4_0 || !wrong("unsupported");
}

void ggml_backend_free(struct ggml_backend *backend)
{
    free(backend);
    note("%d live\n", live);
}

#endif

#ifndef FAKE_BASE

struct ggml_backend *ggml_backend_cpu_init(void)
{
    const char *chosen = getenv("FAKE_GGML");
    if (chosen && strcmp(chosen, "null") == 0)
        return NULL;
    return calloc(1, sizeof(struct ggml_backend));
}

void ggml_backend_cpu_set_n_threads(struct ggml_backend *backend, int threads)
{
    backend->threads = threads;
}

#endif
