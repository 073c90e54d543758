// SPDX-License-Identifier: Apache-2.0
//
// The simulation over the software driver. Its streams have no threads: the seed decides when each
// goes on, in any order that is allowed, and clients' signals come late.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/extents.h"
#include "kernels/emu/soft.h"
#include "tests/core/sim.h"

enum { MIB = 1 << 20 };

static struct kvq__gpus *gpus;
static struct kit_gpus own;
static void (*set_seed)(uint64_t seed), (*set_steps)(uint64_t seed);
static bool (*take_step)(void);
static uint64_t draws; // when extents are made and freed, of the seed

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

static void find(const char *name, void *function, size_t bytes)
{
    void *symbol = dlsym(kvq__gpu_driver(kvq__gpus_get(gpus, 0))->library, name);
    MUST(symbol);
    memcpy(function, &symbol, bytes);
}

static void open_gpus(void)
{
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq__gpus_config config = {
        .driver = KVQ_EMU_LIBRARY, .bytes = 24 * MIB, .extent_bytes = 2 * MIB};
    setenv("KVQ_EMU_DEVICES", "2", 1);
    if (kvq__gpus_open(&config, &gpus, text))
        kit_die(__FILE__, __LINE__, text);
    own = (struct kit_gpus){.gpus = kvq__gpus_list(gpus),
                            .n = kvq__gpus_count(gpus),
                            .memory_new = memory_new,
                            .memory_free = memory_free};
}

static uint64_t draw(void)
{
    draws ^= draws << 13;
    draws ^= draws >> 7;
    return draws ^= draws << 17;
}

// What streams do, and now and then what the thread does that makes extents and frees them.
static bool step(void)
{
    if (draw() % 4 == 0)
        kvq__reserve_work(kvq__gpus_get(gpus, draw() % kvq__gpus_count(gpus)));
    return take_step();
}

const struct kit_gpus *sim_gpus(void)
{
    if (gpus)
        return &own;
    open_gpus();
    find("kvq_soft_seed", &set_seed, sizeof set_seed);
    find("kvq_soft_steps", &set_steps, sizeof set_steps);
    find("kvq_soft_step", &take_step, sizeof take_step);
    return &own;
}

bool sim_runs_late(void)
{
    return true;
}

uint32_t sim_seeds(void)
{
    return 16;
}

void sim_begin(uint64_t seed)
{
    set_seed(seed);
}

// Each seed begins with GPUs that nobody has used, and so makes the same calls whatever was before.
void sim_in_steps(uint64_t seed)
{
    for (uint32_t i = 0; i < KEPT && kept[i].at; i++) {
        MUST(!kept[i].used && driver()->host_free(kept[i].at) == KVQ_GPU_OK);
        kept[i].at = NULL;
    }
    kvq__gpus_close(&gpus);
    open_gpus();
    set_steps(seed);
    own.step = take_step;
}

void sim_reserves(uint64_t seed)
{
    draws = seed + 1;
    for (uint32_t i = 0; i < kvq__gpus_count(gpus); i++) {
        const struct kvq__reserve_config config = {.extent_bytes = 2 * MIB, .mark = seed % 3};
        MUST(kvq__reserve_open(kvq__gpus_get(gpus, i), &config) == 0);
    }
    own.step = step;
}
