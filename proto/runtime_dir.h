// SPDX-License-Identifier: Apache-2.0
//
// Where a client looks for the daemon: libkvq and kvqctl look in the same place. Thread-safe as
// getenv is.
#ifndef KVQ_PROTO_RUNTIME_DIR_H
#define KVQ_PROTO_RUNTIME_DIR_H

#include <stddef.h>

#define KVQ_SYSTEM_RUNTIME_DIR "/run/kvqd" // the service's

// The daemon's runtime directory: `given` unless it is NULL, else $KVQ_RUNTIME_DIR. Else the first
// of $XDG_RUNTIME_DIR/kvqd and `system` (KVQ_SYSTEM_RUNTIME_DIR; tests have another) that has an
// attach socket; if neither has one, or this user may not look into `system`, the first one, which
// is `system` where XDG_RUNTIME_DIR is not set. Writes it to `path` and returns its length as
// snprintf does: `size` or more means that it was cut.
int kvq_runtime_dir(const char *given, const char *system, char *path, size_t size);

#endif
