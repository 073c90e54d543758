// SPDX-License-Identifier: Apache-2.0
//
// Filling the table of driver.h from the driver's library. The symbols carry their versions, so a
// newer driver means the same by them.
#include "kernels/cuda/driver.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define LIBRARY "libcuda.so.1"

struct entry {
    const char *symbol;
    size_t offset; // of the table's field
};

static const struct entry entries[] = {
#define ENTRY(field, symbol, args) {#symbol, offsetof(struct kvq_gpu_driver, field)},
    KVQ_GPU_CALLS(ENTRY)
#undef ENTRY
};

int kvq_gpu_driver_open(struct kvq_gpu_driver *driver, const char *library, char *text, size_t n)
{
    const char *name = library ? library : LIBRARY;
    memset(driver, 0, sizeof *driver);
    driver->name = name;
    driver->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!driver->library) {
        snprintf(text, n, "%s cannot be loaded (%s): install NVIDIA's driver to use a GPU", name,
                 dlerror());
        return -1;
    }
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        // POSIX has dlsym return functions as void *, which C copies but does not convert.
        void *symbol = dlsym(driver->library, entries[i].symbol);
        if (!symbol) {
            snprintf(
                text, n,
                "%s has no %s: the driver is too old; 525 or later has it, and kernels compiled "
                "by CUDA 13 need 580 or later",
                name, entries[i].symbol);
            kvq_gpu_driver_close(driver);
            return -1;
        }
        memcpy((char *)driver + entries[i].offset, &symbol, sizeof symbol);
    }
    driver->kernels_inside = dlsym(driver->library, KVQ_GPU_KERNELS_INSIDE) != NULL;
    return 0;
}

void kvq_gpu_driver_close(struct kvq_gpu_driver *driver)
{
    if (driver->library)
        dlclose(driver->library);
    memset(driver, 0, sizeof *driver);
}

// The first driver of a major version of CUDA, which runs what its compiler makes.
static int first_release(int major)
{
    return major >= 13 ? 580 : major == 12 ? 525 : 450;
}

int kvq_gpu_driver_check(const struct kvq_gpu_driver *driver, int compiled_by, char *text, size_t n)
{
    int version = 0, result = driver->version(&version);
    if (result)
        return kvq_gpu_fault(driver, result, "asking the driver for its version", text, n);
    if (version / 1000 >= compiled_by)
        return 0;
    snprintf(
        text, n,
        "%s is a driver for CUDA %d.%d; these GPU kernels were compiled by CUDA %d and need "
        "driver %d or later: update NVIDIA's driver, or build kvq with CUDA %d (-DKVQ_NVCC=..)",
        driver->name, version / 1000, version % 1000 / 10, compiled_by, first_release(compiled_by),
        version / 1000);
    return -1;
}

void kvq_gpu_place(const struct kvq_gpu_uuid *uuid, const char *device_name,
                   char place[KVQ_GPU_PLACE_BYTES])
{
    const uint8_t *u = uuid->bytes;
    snprintf(place, KVQ_GPU_PLACE_BYTES,
             "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             strstr(device_name, " MIG ") ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6],
             u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static bool names_gpu(const char *place)
{
    return strncmp(place, "GPU-", 4) == 0 || strncmp(place, "MIG-", 4) == 0;
}

bool kvq_gpu_place_is(const char *place, const char *other)
{
    return names_gpu(place) && names_gpu(other) && strcasecmp(place + 4, other + 4) == 0;
}

int kvq_gpu_fault(const struct kvq_gpu_driver *driver, int result, const char *what, char *text,
                  size_t n)
{
    const char *name = NULL, *meaning = NULL;
    assert(result != KVQ_GPU_OK);
    if (driver->error_name(result, &name) != KVQ_GPU_OK || !name)
        name = "unknown error";
    if (driver->error_text(result, &meaning) != KVQ_GPU_OK || !meaning)
        meaning = "the driver has no text for it";
    snprintf(text, n, "%s: %s, %d (%s)", what, name, result, meaning);
    return -1;
}
