// SPDX-License-Identifier: Apache-2.0
//
// Files that get their name when they are whole. Until then one is FILE-NUMBER.kvq.tmp beside FILE,
// locked by who writes it, so that what a killed process has left can be told from what is written.
#ifndef KVQ_STORAGE_UNFINISHED_H
#define KVQ_STORAGE_UNFINISHED_H

#include <stdbool.h>

#include "storage/store_internal.h"

enum { KVQ__FILE_PATH = 4096 };

// A new file for what is to stand at `path`, locked until it is closed, and its name; or a negative
// errno. Removes what killed processes have left for the same path.
int kvq__make_unfinished(struct kvq_io *io, const char *path, char name[KVQ__FILE_PATH]);

// Gives it the name `path`: with `replace` over what is there, else KVQ_E_EXISTS if something is.
// If this fails without `replace`, nothing new stands there. With it the new file may, in place of
// the old one, if only the sync of the folder failed: a loss of power then leaves either of them.
int kvq__place_finished(struct kvq_io *io, const char *from, const char *path, bool replace,
                        const struct kvq__complaint *c);

#endif
