// SPDX-License-Identifier: Apache-2.0
//
// As much of ggml as client/ggml uses, for tests where llama.cpp is not installed: names as ggml
// has them, values and layouts of these tests' own. Against ggml itself llama_test.py runs.
#ifndef KVQ_TESTS_GGML_H
#define KVQ_TESTS_GGML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GGML_MAX_SRC = 10 };
enum { GGML_TENSOR_FLAG_COMPUTE = 16 };
enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_I64, GGML_TYPE_Q8_0 };
enum ggml_status { GGML_STATUS_FAILED = -1, GGML_STATUS_SUCCESS = 0 };
enum ggml_op {
    GGML_OP_NONE,
    GGML_OP_RESHAPE,
    GGML_OP_VIEW,
    GGML_OP_PERMUTE,
    GGML_OP_TRANSPOSE,
    GGML_OP_MUL_MAT,
    GGML_OP_CPY,
    GGML_OP_ROPE,
    GGML_OP_SET_ROWS,
    GGML_OP_FLASH_ATTN_EXT,
};

struct ggml_backend_buffer;

struct ggml_tensor {
    enum ggml_type type;
    enum ggml_op op;
    struct ggml_backend_buffer *buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op_params[16], flags;
    struct ggml_tensor *src[GGML_MAX_SRC], *view_src;
    void *data;
    char name[64];
};

const char *ggml_op_name(enum ggml_op op);
const char *ggml_type_name(enum ggml_type type);
struct ggml_cgraph;
int ggml_graph_n_nodes(struct ggml_cgraph *graph);
struct ggml_tensor *ggml_graph_node(struct ggml_cgraph *graph, int i);

#endif
