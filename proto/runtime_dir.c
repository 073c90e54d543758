// SPDX-License-Identifier: Apache-2.0
//
// Where a client looks for the daemon.
#include "proto/runtime_dir.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "proto/shm.h"

static bool has_socket(const char *dir)
{
    char path[4096];
    struct stat st;
    int n = snprintf(path, sizeof path, "%s/" KVQ_ATTACH_SOCKET, dir);
    return n > 0 && (size_t)n < sizeof path && stat(path, &st) == 0 && S_ISSOCK(st.st_mode);
}

int kvq_runtime_dir(const char *given, const char *system, char *path, size_t size)
{
    const char *own = getenv("KVQ_RUNTIME_DIR"), *user = getenv("XDG_RUNTIME_DIR");
    if (given || (own && *own))
        return snprintf(path, size, "%s", given ? given : own);
    if (!user || !*user)
        return snprintf(path, size, "%s", system);
    int n = snprintf(path, size, "%s/kvqd", user);
    if (n < 0 || (size_t)n >= size || has_socket(path) || !has_socket(system))
        return n;
    return snprintf(path, size, "%s", system);
}
