// SPDX-License-Identifier: Apache-2.0
//
// Folders of a test's own.
#ifndef KVQ_TESTS_FOLDER_H
#define KVQ_TESTS_FOLDER_H

#include <ftw.h>
#include <stdio.h>

static inline int folder_remove_one(const char *path, const struct stat *status, int kind,
                                    struct FTW *place)
{
    (void)status, (void)kind, (void)place;
    return remove(path);
}

// The folder and all that it holds; 0, or it is not gone.
static inline int remove_folder(const char *path)
{
    return nftw(path, folder_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
