// SPDX-License-Identifier: Apache-2.0
//
// The attention kernels for list.h. The host counts on their order: sources in the order of enum
// kvq_gpu_source_kind (attend.c), for each head_dim and number of query rows.
#ifndef KVQ_KERNELS_CUDA_ATTEND_LIST_H
#define KVQ_KERNELS_CUDA_ATTEND_LIST_H

#define KVQ_GPU_ATTEND_KERNEL(X, ID, NAME)                                                         \
    X(ATTEND_##ID, kvq_gpu_attend_##NAME, struct kvq_gpu_attend_args)
#define KVQ_GPU_ATTEND_SOURCES(X, DIM, N)                                                          \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_B2_N##N, d##DIM##_b2_n##N)                                   \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_B3_N##N, d##DIM##_b3_n##N)                                   \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_B4_N##N, d##DIM##_b4_n##N)                                   \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_S2_N##N, d##DIM##_s2_n##N)                                   \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_S3_N##N, d##DIM##_s3_n##N)                                   \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_IQ2_N##N, d##DIM##_iq2_n##N)                                 \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_IQ3_N##N, d##DIM##_iq3_n##N)                                 \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_BOOK_N##N, d##DIM##_book_n##N)                               \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_ANY_N##N, d##DIM##_any_n##N)                                 \
    KVQ_GPU_ATTEND_KERNEL(X, D##DIM##_RAW_N##N, d##DIM##_raw_n##N)
#define KVQ_GPU_ATTEND_KERNELS(X)                                                                  \
    KVQ_GPU_ATTEND_SOURCES(X, 64, 1)                                                               \
    KVQ_GPU_ATTEND_SOURCES(X, 64, 2)                                                               \
    KVQ_GPU_ATTEND_SOURCES(X, 128, 1)                                                              \
    KVQ_GPU_ATTEND_SOURCES(X, 128, 2)                                                              \
    KVQ_GPU_ATTEND_SOURCES(X, 256, 1)                                                              \
    KVQ_GPU_ATTEND_KERNEL(X, WIDE_D64, wide_d64)                                                   \
    KVQ_GPU_ATTEND_KERNEL(X, WIDE_D128, wide_d128)                                                 \
    KVQ_GPU_ATTEND_KERNEL(X, WIDE_D256, wide_d256)

#endif
