// SPDX-License-Identifier: Apache-2.0
//
// The simulation on a machine without a GPU.
#include "tests/core/sim.h"

const struct kit_gpus *sim_gpus(void)
{
    return NULL;
}

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define SEEDS 100 // which take as long
#endif
#endif
#ifndef SEEDS
#define SEEDS 200
#endif

uint32_t sim_seeds(void)
{
    return SEEDS;
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
