// SPDX-License-Identifier: Apache-2.0
//
// The GPU's driver, which is loaded when a call first needs it, and GPUs by name. Programs that
// never touch a GPU never load it.
#include "client/internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of the process: once it works it stays.
static struct {
    pthread_mutex_t lock;
    bool open;
    char library[KVQ__PATH_BYTES];
    struct kvq_gpu_driver driver;
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int load_driver(void)
{
    char text[KVQ__TEXT_BYTES / 2];
    const char *named = secure_getenv("KVQ_GPU_DRIVER");
    bool given = named && *named;
    if (given && strlen(named) >= sizeof gpu.library)
        return kvq__set_error(KVQ_E_INVALID, "KVQ_GPU_DRIVER has %zu bytes, at most %zu fit",
                              strlen(named), sizeof gpu.library - 1);
    if (given)
        memcpy(gpu.library, named, strlen(named) + 1);
    if (kvq_gpu_driver_open(&gpu.driver, given ? gpu.library : NULL, text, sizeof text) != 0)
        return kvq__set_error(KVQ_E_UNSUPPORTED, "the GPU's driver: %s", text);
    int result = gpu.driver.init(0);
    if (result == KVQ_GPU_OK)
        return KVQ_OK;
    kvq_gpu_fault(&gpu.driver, result, "starting the GPU's driver", text, sizeof text);
    kvq_gpu_driver_close(&gpu.driver);
    return kvq__set_error(kvq__gpu_code(result), "%s", text);
}

int kvq__driver_load(const struct kvq_gpu_driver **driver)
{
    pthread_mutex_lock(&gpu.lock);
    int rc = gpu.open ? KVQ_OK : load_driver();
    gpu.open = rc == KVQ_OK;
    pthread_mutex_unlock(&gpu.lock);
    *driver = rc ? NULL : &gpu.driver;
    return rc;
}

int kvq__gpu_code(int result)
{
    assert(result != KVQ_GPU_OK);
    switch (result) {
    case KVQ_GPU_INVALID_VALUE:
        return KVQ_E_BUFFER;
    case KVQ_GPU_OUT_OF_MEMORY:
        return KVQ_E_NO_MEMORY;
    case KVQ_GPU_NO_DEVICE:
    case KVQ_GPU_NOT_SUPPORTED:
        return KVQ_E_UNSUPPORTED;
    default:
        return KVQ_E_SYSTEM;
    }
}

int kvq__driver_fault(const struct kvq__gpu_context *here, int result, const char *what)
{
    char text[KVQ__TEXT_BYTES / 2];
    kvq_gpu_fault(here->driver, result, what, text, sizeof text);
    return kvq__set_error(kvq__gpu_code(result), "%s", text);
}

void kvq__gpu_place(const kvq_client *client, const uint8_t *uuid, char *place)
{
    struct kvq_gpu_uuid of;
    const char *name = ""; // of one that is none of the daemon's
    static_assert((int)KVQ__PLACE_BYTES == KVQ_GPU_PLACE_BYTES, "both hold a place");
    memcpy(of.bytes, uuid, sizeof of.bytes);
    for (uint32_t i = 0; i < client->n_gpus; i++)
        if (memcmp(client->gpus[i].uuid, uuid, KVQ__UUID_BYTES) == 0)
            name = client->gpus[i].name;
    kvq_gpu_place(&of, name, place);
}

int kvq__gpus_learn(kvq_client *client, const Kvq__HelloReply *hello)
{
    client->n_gpus = 0;
    if (hello->n_gpus > KVQ_MAX_GPUS)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon says it has %zu GPUs, at most %d are agreed",
                              hello->n_gpus, KVQ_MAX_GPUS);
    for (size_t i = 0; i < hello->n_gpus; i++) {
        struct kvq__daemon_gpu *g = &client->gpus[i];
        if (hello->gpus[i]->uuid.len != KVQ__UUID_BYTES)
            return kvq__set_error(KVQ_E_PROTOCOL,
                                  "the daemon names a GPU by %zu bytes, a UUID has %d",
                                  hello->gpus[i]->uuid.len, KVQ__UUID_BYTES);
        memcpy(g->uuid, hello->gpus[i]->uuid.data, KVQ__UUID_BYTES);
        snprintf(g->name, sizeof g->name, "%s", hello->gpus[i]->name);
        g->orders = hello->gpus[i]->orders;
    }
    client->n_gpus = (uint32_t)hello->n_gpus;
    return KVQ_OK;
}

// ---- Where a thread is ----

static int no_such_gpu(const kvq_client *client, const char *what, const uint8_t *uuid)
{
    char place[KVQ__PLACE_BYTES], list[4 * KVQ__PLACE_BYTES + 4] = "";
    kvq__gpu_place(client, uuid, place);
    for (uint32_t i = 0; i < client->n_gpus && i < 4; i++) {
        char one[KVQ__PLACE_BYTES];
        kvq__gpu_place(client, client->gpus[i].uuid, one);
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? " " : "", one);
    }
    return kvq__set_error(
        KVQ_E_UNSUPPORTED,
        "%s: the current context's GPU, %s, is none of the daemon's (%s%s); give it "
        "to kvqd, or make a context of one of those current",
        what, place, list, client->n_gpus > 4 ? " .." : "");
}

static int ask_here(struct kvq__gpu_context *here, const char *what)
{
    char text[KVQ__TEXT_BYTES / 2];
    struct kvq_gpu_uuid uuid;
    assert(here->driver);
    int result = here->driver->context_get(&here->context);
    if (result == KVQ_GPU_OK && !here->context)
        return kvq__set_error(
            KVQ_E_INVALID,
            "%s: this thread has no current CUDA context; make one current first "
            "(cudaSetDevice and cudaFree(0), or torch.cuda.init() and any tensor)",
            what);
    if (result == KVQ_GPU_OK)
        result = here->driver->context_device(&here->device);
    if (result == KVQ_GPU_OK)
        result = here->driver->device_uuid(&uuid, here->device);
    if (result != KVQ_GPU_OK) {
        kvq_gpu_fault(here->driver, result, "asking for the current context's GPU", text,
                      sizeof text);
        return kvq__set_error(kvq__gpu_code(result), "%s: %s", what, text);
    }
    memcpy(here->uuid, uuid.bytes, sizeof here->uuid);
    return KVQ_OK;
}

int kvq__gpu_here(kvq_client *client, const char *what, struct kvq__gpu_context *here)
{
    *here = (struct kvq__gpu_context){0};
    if (client->n_gpus == 0)
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "%s: the daemon (%s, backend %s) has no GPU; kvqctl doctor says why",
                              what, client->info.version, client->info.backend);
    int rc = kvq__driver_load(&here->driver);
    if (rc == KVQ_OK)
        rc = ask_here(here, what);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < client->n_gpus; i++)
        if (memcmp(client->gpus[i].uuid, here->uuid, KVQ__UUID_BYTES) == 0)
            return KVQ_OK;
    return no_such_gpu(client, what, here->uuid);
}

struct kvq_gpu_context *kvq__context_enter(const struct kvq__gpu_context *here)
{
    struct kvq_gpu_context *before = NULL;
    assert(here->driver && here->context);
    here->driver->context_get(&before);
    if (before != here->context)
        here->driver->context_set(here->context);
    return before;
}

void kvq__context_leave(const struct kvq__gpu_context *here, struct kvq_gpu_context *before)
{
    assert(here->driver);
    if (before != here->context)
        here->driver->context_set(before);
}
