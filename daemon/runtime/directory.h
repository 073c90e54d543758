// SPDX-License-Identifier: Apache-2.0
//
// Directories of the daemon. One that exists already is taken only if it is of no use to anybody
// else; it is not changed before that is known.
#ifndef KVQ_DAEMON_RUNTIME_DIRECTORY_H
#define KVQ_DAEMON_RUNTIME_DIRECTORY_H

#include "daemon/config/config.h"

// Makes the runtime directory or takes the one that is there: the daemon's user's, not for all to
// write to, and empty or with kvqd.lock in it. Sets its group and mode. 0, KVQ_E_INVALID,
// KVQ_E_PERMISSION or KVQ_E_SYSTEM with a text.
int kvq__directory_open(const struct kvq_config *config, char *text);

// KVQ_E_PERMISSION or KVQ_E_SYSTEM by errno, with a text: what could not be done to which path.
int kvq__directory_fail(const char *what, const char *path, char *text);

// Opens kvqd.lock in the directory. Only the daemon's user may open that file: whoever can open it
// can lock it, and keep the daemon from starting. *fd is the caller's.
int kvq__directory_lock_file(const char *directory, int *fd, char *text);

// Checks that only the daemon's user can write to the directory, or that it does not exist yet. 0
// or KVQ_E_PERMISSION with a text.
int kvq__directory_check(const char *option, const char *path, char *text);

#endif
