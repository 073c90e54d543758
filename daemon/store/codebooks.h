// SPDX-License-Identifier: Apache-2.0
//
// The codebooks that sessions have asked for by name, each read once and shared. Those that no
// session uses stay for the next one, until their place is needed for another.
//
// All functions may be called from any thread; only reading a file takes long, and no lock is held
// meanwhile.
#ifndef KVQ_DAEMON_STORE_CODEBOOKS_H
#define KVQ_DAEMON_STORE_CODEBOOKS_H

#include "kernels/kernels.h"
#include "proto/limits.h"

struct kvq__codebooks;

// `folder` holds files NAME.kvqbook and may be empty: then there are none. NULL without memory.
struct kvq__codebooks *kvq__codebooks_new(const char *folder);
// Nobody may hold any. Accepts pointers to NULL.
void kvq__codebooks_free(struct kvq__codebooks **books);

// What is held while a session is opened. Zero-initialize.
struct kvq__book_holds {
    struct kvq__codebooks *books;
    uint32_t n;
    void *hold[KVQ_MAX_CODEBOOKS];
};
// Reads the file unless it is there already, so that kvq__codebooks_get finds it, or finds why it
// could not be read, until kvq__codebooks_let_go. Does nothing if so many are held already. Blocks:
// codebooks are a few megabytes, but may be 1 GiB.
void kvq__codebooks_load(struct kvq__codebooks *books, const char *name,
                         struct kvq__book_holds *holds);
// Nothing is held then. What could not be read is tried anew by the next load.
void kvq__codebooks_let_go(struct kvq__book_holds *holds);

// As the core's callbacks: a layer's tables, which live until *hold has been released as often as
// it was got and shared. Reads no file: KVQ_E_LIMIT if nobody has loaded it, and else what the load
// has met. Text as long as KVQ_TEXT_BYTES / 2.
int kvq__codebooks_get(struct kvq__codebooks *books, const char *name, uint32_t layer,
                       const struct kvq_format *format, const struct kvq_shape *shape,
                       struct kvq_book *book, void **hold, char *text);
void kvq__codebooks_share(struct kvq__codebooks *books, void *hold);
// The memory that a held codebook's tables lie in, to be sent to others: a memfd (the codebook's)
// of *n floats from *values on. *id is the same for the same memory.
int kvq__codebooks_memory(const void *hold, const float **values, size_t *n, uint64_t *id);
// What tells its content from any other's, in whatever run of the daemon.
uint64_t kvq__codebooks_id(const void *hold);
void kvq__codebooks_release(struct kvq__codebooks *books, void *hold);

#endif
