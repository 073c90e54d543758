// SPDX-License-Identifier: Apache-2.0
//
// The simulation with sessions on two emulated GPUs besides those on the host. Kernels run when
// they are enqueued; when the core gets to know of it, chance decides.
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/gpu.h"
#include "kernels/emu/driver.h"
#include "tests/core/sim.h"

enum { MIB = 1 << 20 };

static struct kvq_gpu_driver table;

// Host memory that kernels may touch is memory of the emulated device.
static int host_alloc(void **at, size_t bytes, unsigned flags)
{
    kvq_gpu_ptr memory = 0;
    (void)flags;
    int result = table.memory_alloc(&memory, bytes);
    *at = (void *)(uintptr_t)memory;
    return result;
}

static int host_free(void *at)
{
    return table.memory_free((uintptr_t)at);
}

static int host_device(kvq_gpu_ptr *device, void *at, unsigned flags)
{
    (void)flags;
    *device = (uintptr_t)at;
    return KVQ_GPU_OK;
}

static int device_count(int *count)
{
    *count = 2;
    return KVQ_GPU_OK;
}

static int device_get(int *device, int ordinal)
{
    *device = ordinal;
    return KVQ_GPU_OK;
}

static int device_uuid(struct kvq_gpu_uuid *uuid, int device)
{
    memset(uuid->bytes, 0x10 + device, sizeof uuid->bytes);
    return KVQ_GPU_OK;
}

static const struct kvq_gpu_driver *emulator;

// The second has no memory operations, so that events tell how far it has come.
static int device_attribute(int *value, int attribute, int device)
{
    *value = attribute == KVQ_GPU_HAS_MEMORY_OPS && device == 0;
    if (attribute == KVQ_GPU_HAS_MEMORY_OPS || attribute == KVQ_GPU_HAS_MAPPING)
        return KVQ_GPU_OK;
    return emulator->device_attribute(value, attribute, device);
}

static void *memory_new(size_t bytes)
{
    void *memory = NULL;
    MUST(host_alloc(&memory, bytes, 0) == KVQ_GPU_OK);
    return memory;
}

static void memory_free(void *memory)
{
    host_free(memory);
}

const struct kit_gpus *sim_gpus(void)
{
    static struct kvq__gpus *gpus;
    static struct kit_gpus own;
    char text[KVQ_TEXT_BYTES] = "";
    if (gpus)
        return &own;
    emulator = kvq_emu_driver();
    table = *emulator;
    table.device_attribute = device_attribute;
    table.host_alloc = host_alloc;
    table.host_free = host_free;
    table.host_device = host_device;
    table.device_count = device_count;
    table.device_get = device_get;
    table.device_uuid = device_uuid;
    struct kvq__gpus_config config = {.table = &table, .bytes = 24 * MIB, .extent_bytes = 2 * MIB};
    int rc = kvq__gpus_open(&config, &gpus, text);
    if (rc)
        kit_die(__FILE__, __LINE__, text);
    own = (struct kit_gpus){.gpus = kvq__gpus_list(gpus),
                            .n = kvq__gpus_count(gpus),
                            .memory_new = memory_new,
                            .memory_free = memory_free};
    return &own;
}

uint32_t sim_seeds(void)
{
    return 14; // of which two park what is idle
}

bool sim_runs_late(void)
{
    return false;
}

void sim_begin(uint64_t seed)
{
    (void)seed;
}

void sim_in_steps(uint64_t seed)
{
    (void)seed;
}

void sim_reserves(uint64_t seed)
{
    (void)seed;
}
