// SPDX-License-Identifier: Apache-2.0
//
// Filling the table of driver.h from the driver's library. The symbols carry their versions, so a
// newer driver means the same by them.
#include "kernels/cuda/driver.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

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
            snprintf(text, n, "%s has no %s: the driver is too old; CUDA 12.0's (525) or newer has",
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
