// SPDX-License-Identifier: Apache-2.0
//
// How storage/ tells what is wrong: a code, and a sentence in memory of the caller's.
#ifndef KVQ_STORAGE_COMPLAIN_H
#define KVQ_STORAGE_COMPLAIN_H

#include <stddef.h>

// Where complaints go; `name` is of the file or folder that they are about.
struct kvq__complaint {
    const char *name;
    char *text;
    size_t size;
};

// Writes "NAME: sentence" and returns code.
int kvq__complain(const struct kvq__complaint *c, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
