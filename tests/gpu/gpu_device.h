// SPDX-License-Identifier: Apache-2.0
//
// The device that tests of GPU kernels run on: the emulator, or, with KVQ_GPU=N in the environment,
// GPU number N of this machine, or of the software driver, where KVQ_GPU_DRIVER names its library.
#ifndef KVQ_TESTS_GPU_DEVICE_H
#define KVQ_TESTS_GPU_DEVICE_H

#include <stdbool.h>

#include "kernels/cuda/driver.h"

// The table of calls, with a context of the device current in this thread, until the program ends.
// Ends the program with 77, having said why, if KVQ_GPU names a GPU and there is none.
const struct kvq_gpu_driver *gpu_device(void);

// Whether it is the emulator: what only that refuses, and its seeds, are for it alone.
bool gpu_device_is_emulated(void);

#endif
