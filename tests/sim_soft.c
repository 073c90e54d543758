// SPDX-License-Identifier: Apache-2.0
//
// The simulation over the software driver, whose streams run by themselves and delay and reorder
// all that they may, differently for every seed; clients' signals come late.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/gpu.h"
#include "kernels/emu/soft.h"
#include "tests/sim.h"

enum { MIB = 1 << 20 };

static struct kvq__gpus *gpus;
static void (*set_seed)(uint64_t seed);

static const struct kvq_gpu_driver *driver(void)
{
    struct kvq__gpu *gpu = kvq__gpus_get(gpus, 0);
    MUST(kvq__gpu_enter(gpu) == KVQ_GPU_OK);
    return kvq__gpu_driver(gpu);
}

// Memory is kept for the next who asks: to free it is to wait for every stream, and so for clients
// whose signals are late.
enum { KEPT = 256 };
static struct {
    void *at;
    size_t bytes;
    bool used;
} kept[KEPT];

static void *memory_new(size_t bytes)
{
    const unsigned flags = KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED;
    uint32_t i = 0;
    while (i < KEPT && kept[i].at && (kept[i].used || kept[i].bytes != bytes))
        i++;
    MUST(i < KEPT);
    if (!kept[i].at)
        MUST(driver()->host_alloc(&kept[i].at, bytes, flags) == KVQ_GPU_OK);
    kept[i].bytes = bytes;
    kept[i].used = true;
    return kept[i].at;
}

static void memory_free(void *memory)
{
    uint32_t i = 0;
    while (i < KEPT && kept[i].at != memory)
        i++;
    MUST(i < KEPT && kept[i].used);
    kept[i].used = false;
}

const struct kit_gpus *sim_gpus(void)
{
    static struct kit_gpus own;
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq__gpus_config config = {
        .driver = KVQ_EMU_LIBRARY, .bytes = 24 * MIB, .extent_bytes = 2 * MIB};
    if (gpus)
        return &own;
    setenv("KVQ_EMU_DEVICES", "2", 1);
    if (kvq__gpus_open(&config, &gpus, text))
        kit_die(__FILE__, __LINE__, text);
    void *symbol = dlsym(kvq__gpu_driver(kvq__gpus_get(gpus, 0))->library, "kvq_soft_seed");
    memcpy(&set_seed, &symbol, sizeof set_seed);
    MUST(set_seed);
    own = (struct kit_gpus){kvq__gpus_list(gpus), kvq__gpus_count(gpus), memory_new, memory_free};
    return &own;
}

bool sim_runs_late(void)
{
    return true;
}

uint32_t sim_seeds(void)
{
    return 4;
}

void sim_begin(uint64_t seed)
{
    set_seed(seed);
}
