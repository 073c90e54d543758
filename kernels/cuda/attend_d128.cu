// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels for head_dim 128.
#include "kernels/cuda/attend_kernel.h"

KVQ_GPU_ATTEND_KINDS(128, 1)
KVQ_GPU_ATTEND_KINDS(128, 2)
