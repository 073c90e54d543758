// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels for head_dim 64.
#include "kernels/cuda/attend_kernel.h"

KVQ_GPU_ATTEND_KINDS(64, 1)
KVQ_GPU_ATTEND_KINDS(64, 2)
