// SPDX-License-Identifier: Apache-2.0
//
// The simulation on a machine without a GPU.
#include "tests/sim.h"

const struct kit_gpus *sim_gpus(void)
{
    return NULL;
}

uint32_t sim_seeds(void)
{
    return 500;
}

bool sim_runs_late(void)
{
    return false;
}

void sim_begin(uint64_t seed)
{
    (void)seed;
}
