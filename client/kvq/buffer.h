/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/buffer.h: memory that holds tensors, and tensors. For everybody; gpu.h has the buffers in a
 * GPU's memory.
 */
#ifndef KVQ_PUBLIC_BUFFER_H
#define KVQ_PUBLIC_BUFFER_H

#include "client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory that both the engine and the daemon read and write. */
typedef struct kvq_buffer kvq_buffer;

/* The daemon makes zeroed shared memory of `bytes` bytes (> 0), and the library maps that memory
 * read-write. Release with kvq_buffer_close. KVQ_E_NO_MEMORY, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_buffer_create(kvq_client *client, size_t bytes, kvq_buffer **buffer);

/* Registers the engine's own memfd; the engine keeps its descriptor and its mapping. offset is a
 * multiple of the page size. The memfd must be writable, made without MFD_HUGETLB, and sealed
 * against shrinking (the call adds F_SEAL_SHRINK if the memfd allows seals), else KVQ_E_BUFFER.
 * kvq_buffer_data is NULL. Release with kvq_buffer_close. */
KVQ_API KVQ_CHECK int kvq_buffer_import_memfd(kvq_client *client, int memfd, uint64_t offset,
                                              size_t bytes, kvq_buffer **buffer);

/* The first byte in the engine's address space; NULL for imported buffers and those on GPUs. */
KVQ_API void *kvq_buffer_data(const kvq_buffer *buffer);
/* Bytes, as the engine asked for them. */
KVQ_API size_t kvq_buffer_size(const kvq_buffer *buffer);

/* Waits until no request in flight uses the buffer, then frees it. The call takes as long as these
 * requests do, kvq_connect_options.timeout_ms or not: it returns when the daemon has answered or
 * the connection has ended. Before memory of kvq_buffer_create_on is unmapped, or memory on the
 * host unpinned that a kvq_local has used on a stream, the call waits, too, for all work of this
 * process in the buffer's CUDA context; so do not call it while a stream there is being captured.
 * Memory of kvq_buffer_import stays as it is. Nothing else is waited for: no other thread may be in
 * a call with the buffer, nor may the buffer hold K and V of a kvq_local's step that has not ended.
 * Accepts NULL and pointers to NULL. */
KVQ_API void kvq_buffer_close(kvq_buffer **buffer);

enum { KVQ_DTYPE_F16 = 1, KVQ_DTYPE_BF16 = 2, KVQ_DTYPE_F32 = 3 };

/* A tensor [rows][heads][head_dim] in a buffer. Strides in bytes; head_dim is contiguous. */
struct kvq_tensor {
    const kvq_buffer *buffer; /* NULL: no tensor */
    uint64_t offset, token_stride, head_stride;
    uint8_t dtype; /* KVQ_DTYPE; 0 is refused */
};

/* Describes a contiguous tensor [rows][heads][dim] at `offset` bytes. */
KVQ_API struct kvq_tensor kvq_tensor_make(const kvq_buffer *buffer, uint64_t offset, uint32_t heads,
                                          uint32_t dim, uint8_t dtype);

#ifdef __cplusplus
}
#endif

#endif
