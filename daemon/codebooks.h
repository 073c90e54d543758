// SPDX-License-Identifier: Apache-2.0
//
// The codebooks that sessions have asked for by name, read once and kept until the daemon ends.
#ifndef KVQ_DAEMON_CODEBOOKS_H
#define KVQ_DAEMON_CODEBOOKS_H

#include "kernels/kernels.h"

struct kvq__codebooks;

// `folder` holds files NAME.kvqbook and may be empty: then there are none. NULL without memory.
struct kvq__codebooks *kvq__codebooks_new(const char *folder);
void kvq__codebooks_free(struct kvq__codebooks **books); // accepts pointers to NULL

// As the core's callback. Reads the file the first time a name is asked for, which blocks the
// caller: codebooks are a few megabytes at most.
int kvq__codebooks_get(struct kvq__codebooks *books, const char *name, uint32_t layer,
                       const struct kvq_format *format, const struct kvq_shape *shape,
                       struct kvq_book *book, char *text);

#endif
