// SPDX-License-Identifier: Apache-2.0
//
// What in-context mode has in a GPU's memory: the daemon's pool, mapped read-only at addresses that
// are kept for it, page tables, codebooks, and the daemon's own kernels.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cuda/bundle.h"

int kvq__local_fault(const struct kvq_local *local, int result, const char *what)
{
    return kvq__driver_fault(&local->here, result, what);
}

// ---- Pools ----

// The daemon's kernels, which must take what this library gives them.
static int open_kernels(struct kvq__pool *pool, const Kvq__OpenPoolReply *r, int fd)
{
    char ours[KVQ_GPU_KERNELS_TEXT], text[KVQ_GPU_TEXT];
    size_t bytes = r->kernels_bytes;
    void *bundle = NULL;
    kvq_gpu_kernels_text(ours);
    if (strcmp(ours, r->kernels) != 0)
        return kvq__set_error(
            KVQ_E_VERSION,
            "the daemon's kernels take other arguments than this library gives (%s; "
            "%s): install matching versions",
            r->kernels, ours);
    if ((fd < 0) != (bytes == 0))
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon's kernels have %zu bytes and %s descriptor", bytes,
                              fd < 0 ? "no" : "a");
    int rc = fd < 0 ? KVQ_OK : kvq__map(fd, bytes, PROT_READ, "the kernels", &bundle);
    if (rc)
        return rc;
    if (kvq_gpu_open_bundle(&pool->kernels, pool->here.driver, bundle, bytes, text, sizeof text))
        rc = kvq__set_error(KVQ_E_UNSUPPORTED, "the daemon's kernels cannot be loaded here: %.600s",
                            text);
    if (bundle)
        munmap(bundle, bytes);
    return rc;
}

int kvq__pool_gpu_open(struct kvq__pool *pool, const Kvq__OpenPoolReply *r, int fd)
{
    const struct kvq_gpu_driver *driver = pool->here.driver;
    kvq_gpu_ptr at = 0;
    assert(!pool->mapped && pool->extent_bytes > 0 && pool->span % pool->extent_bytes == 0);
    pool->mapped = calloc(pool->span / pool->extent_bytes, sizeof *pool->mapped);
    if (!pool->mapped)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    int result = driver->address_reserve(&at, pool->span, 0, 0, 0);
    int rc =
        result ? kvq__driver_fault(&pool->here, result, "reserving addresses for the daemon's pool")
               : open_kernels(pool, r, fd);
    if (rc && result == KVQ_GPU_OK)
        driver->address_free(at, pool->span);
    if (rc) {
        free(pool->mapped);
        return rc == KVQ_E_NO_MEMORY ? KVQ_E_UNSUPPORTED : rc;
    }
    pool->at = (uint8_t *)(uintptr_t)at;
    return KVQ_OK;
}

int kvq__pool_gpu_extent(struct kvq__pool *pool, uint32_t number, int fd)
{
    char text[KVQ__TEXT_BYTES / 2];
    uint64_t at = (uint64_t)number * pool->extent_bytes;
    assert(pool->mapped && pool->at && fd >= 0);
    if (number >= pool->span / pool->extent_bytes)
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon gave extent %u of a pool with %llu",
                              number, (unsigned long long)(pool->span / pool->extent_bytes));
    struct kvq_gpu_context *before = kvq__context_enter(&pool->here);
    const struct kvq_gpu_driver *driver = pool->here.driver;
    kvq_gpu_ptr there = (uintptr_t)pool->at + at;
    kvq_gpu_memory memory;
    int result = kvq_gpu_memory_import(driver, fd, &memory, text, sizeof text);
    if (result == KVQ_GPU_OK) {
        // Other memory may have the number by now: what was there is nobody's any more. That is so
        // only if what came is memory of a GPU, and kernels may be reading there if not.
        if (pool->mapped[number])
            driver->memory_unmap(there, pool->extent_bytes);
        result = kvq_gpu_memory_map_at(driver, pool->here.device, memory, there, pool->extent_bytes,
                                       text, sizeof text);
        pool->mapped[number] = result == KVQ_GPU_OK;
    }
    kvq__context_leave(&pool->here, before);
    return result
               ? kvq__set_error(kvq__gpu_code(result), "an extent of the daemon's pool: %s", text)
               : KVQ_OK;
}

void kvq__pool_gpu_close(struct kvq__pool *pool)
{
    assert(pool->mapped && pool->at);
    const struct kvq_gpu_driver *driver = pool->here.driver;
    kvq_gpu_ptr at = (uintptr_t)pool->at;
    kvq_gpu_close(&pool->kernels);
    for (uint64_t i = 0; i < pool->span / pool->extent_bytes; i++)
        if (pool->mapped[i])
            driver->memory_unmap(at + i * pool->extent_bytes, pool->extent_bytes);
    driver->address_free(at, pool->span);
    free(pool->mapped);
}

int kvq__pool_gpu_book(const struct kvq__pool *pool, struct kvq__book *book)
{
    assert(book->values && !book->there);
    const struct kvq_gpu_driver *driver = pool->here.driver;
    struct kvq_gpu_context *before = kvq__context_enter(&pool->here);
    int result = driver->memory_alloc(&book->there, book->bytes);
    if (result == KVQ_GPU_OK) {
        result = driver->copy_in(book->there, book->values, book->bytes, NULL);
        result = result ? result : driver->stream_sync(NULL);
        if (result)
            driver->memory_free(book->there);
    }
    kvq__context_leave(&pool->here, before);
    return result ? kvq__driver_fault(&pool->here, result, "copying a codebook to the GPU")
                  : KVQ_OK;
}

// ---- Tables ----

static uint64_t layer_at(const struct kvq_local *local, uint32_t layer)
{
    uint64_t pages = (local->max_tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
    return sizeof(struct kvq_table_page) + layer * kvq_table_layer_bytes(pages);
}

int kvq__page_table_gpu_map(struct kvq_local *local, struct kvq__local_session *s,
                            const Kvq__OpenTableReply *r, int fd)
{
    char text[KVQ__TEXT_BYTES / 2];
    assert(!s->piece.at && s->layers);
    if (r->bytes < layer_at(local, s->n_layers) || r->allocation_bytes < r->bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon's page table has %llu bytes of %llu, %llu are needed",
                              (unsigned long long)r->bytes, (unsigned long long)r->allocation_bytes,
                              (unsigned long long)layer_at(local, s->n_layers));
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    int result = kvq_gpu_piece_map(local->here.driver, local->here.device, fd,
                                   (size_t)r->allocation_bytes, true, &s->piece, text, sizeof text);
    kvq__context_leave(&local->here, before);
    if (result)
        return kvq__set_error(kvq__gpu_code(result), "mapping a page table: %s", text);
    for (uint32_t i = 0; i < s->n_layers; i++)
        s->layers[i].pages_there =
            s->piece.at + layer_at(local, s->layers[i].source) + sizeof(struct kvq_table_layer);
    return KVQ_OK;
}

void kvq__page_table_gpu_unmap(struct kvq_local *local, struct kvq__local_session *s)
{
    assert(s->piece.at && !s->in_step);
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    local->here.driver->context_sync();
    kvq_gpu_piece_release(local->here.driver, &s->piece);
    kvq__context_leave(&local->here, before);
}
