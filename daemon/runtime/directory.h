// SPDX-License-Identifier: Apache-2.0
//
// Directories that are the daemon's own. One that exists is taken only if nobody else can have a
// use for it; nothing of it is changed before that is known.
#ifndef KVQ_DAEMON_RUNTIME_DIRECTORY_H
#define KVQ_DAEMON_RUNTIME_DIRECTORY_H

#include "daemon/config/config.h"

// Makes the runtime directory or takes the one that is there: the daemon's user's, not for all to
// write to, and empty or with kvqd.lock in it. Sets its group and mode. 0, KVQ_E_INVALID,
// KVQ_E_PERMISSION or KVQ_E_SYSTEM with a text.
int kvq__directory_open(const struct kvq_config *config, char *text);

// Opens kvqd.lock in it, which only the daemon's user may open: who can open it can lock it, and so
// keep the daemon from starting. *fd is the caller's.
int kvq__directory_lock_file(const char *directory, int *fd, char *text);

// Whether what is kept in this directory is safe there: it does not exist yet, or is the daemon's
// user's and nobody else may write to it. 0 or KVQ_E_PERMISSION with a text.
int kvq__directory_check(const char *option, const char *path, char *text);

#endif
