// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels for head_dim 256.
#include "kernels/cuda/attend_kernel.h"

KVQ_GPU_ATTEND_KINDS(256, 1)
