// SPDX-License-Identifier: Apache-2.0
// Of ggml's interface to backends, what client/ggml uses: see ggml.h.
#ifndef KVQ_TESTS_GGML_BACKEND_IMPL_H
#define KVQ_TESTS_GGML_BACKEND_IMPL_H

#include "tests/client/ggml/ggml.h"

#define GGML_BACKEND_API_VERSION 2

typedef struct ggml_backend *ggml_backend_t;
typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef struct ggml_backend_reg *ggml_backend_reg_t;
typedef struct ggml_backend_buffer_type *ggml_backend_buffer_type_t;

enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_ACCEL };

struct ggml_backend_dev_props {
    const char *name, *description;
    size_t memory_free, memory_total;
    enum ggml_backend_dev_type type;
};

struct ggml_backend_i {
    const char *(*get_name)(ggml_backend_t backend);
    void (*free)(ggml_backend_t backend);
    enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph *graph);
};

struct ggml_backend {
    uint8_t (*guid)[16];
    struct ggml_backend_i iface;
    ggml_backend_dev_t device;
    void *context;
};

struct ggml_backend_device_i {
    const char *(*get_name)(ggml_backend_dev_t device);
    const char *(*get_description)(ggml_backend_dev_t device);
    void (*get_memory)(ggml_backend_dev_t device, size_t *free, size_t *total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t device);
    void (*get_props)(ggml_backend_dev_t device, struct ggml_backend_dev_props *props);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t device, const char *params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t device);
    bool (*supports_op)(ggml_backend_dev_t device, const struct ggml_tensor *op);
    bool (*supports_buft)(ggml_backend_dev_t device, ggml_backend_buffer_type_t type);
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t reg;
    void *context;
};

struct ggml_backend_reg_i {
    const char *(*get_name)(ggml_backend_reg_t reg);
    size_t (*get_device_count)(ggml_backend_reg_t reg);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
    void *(*get_proc_address)(ggml_backend_reg_t reg, const char *name);
};

struct ggml_backend_reg {
    int api_version;
    struct ggml_backend_reg_i iface;
    void *context;
};

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
void *ggml_backend_buffer_get_base(struct ggml_backend_buffer *buffer);
size_t ggml_backend_buffer_get_size(struct ggml_backend_buffer *buffer);
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type);

#endif
