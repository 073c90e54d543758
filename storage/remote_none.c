// SPDX-License-Identifier: Apache-2.0
//
// The remote tier of a build that has none: every call says so.
#include <stdio.h>
#include <string.h>

#include "proto/status.h"
#include "storage/remote.h"

static int none(char *text, size_t n)
{
    if (n)
        snprintf(text, n,
                 "this build knows no remote store: it was made without libcurl, OpenSSL or expat; "
                 "install their development packages and build with -DKVQ_REMOTE=ON");
    return KVQ_E_UNSUPPORTED;
}

bool kvq_remote_built(void)
{
    return false;
}

struct kvq_remote_clock *kvq_remote_clock_real(void)
{
    return NULL;
}

int kvq_remote_keys_load(const char *file, const char *section, struct kvq_remote_keys *keys,
                         char *text, size_t n)
{
    (void)file, (void)section;
    memset(keys, 0, sizeof *keys);
    return none(text, n);
}

int kvq_remote_check(const struct kvq_remote_options *options, char *text, size_t n)
{
    (void)options;
    return none(text, n);
}

int kvq_remote_open(const struct kvq_remote_options *options, struct kvq_remote **remote,
                    char *text, size_t n)
{
    (void)options;
    *remote = NULL;
    return none(text, n);
}

void kvq_remote_close(struct kvq_remote **remote)
{
    (void)remote;
}

int kvq_remote_put(struct kvq_remote *remote, const char *key, const void *data, size_t bytes,
                   const struct kvq_remote_watch *watch, char *text, size_t n)
{
    (void)remote, (void)key, (void)data, (void)bytes, (void)watch;
    return none(text, n);
}

int kvq_remote_get(struct kvq_remote *remote, const char *key, size_t max, void **data,
                   size_t *bytes, const struct kvq_remote_watch *watch, char *text, size_t n)
{
    (void)remote, (void)key, (void)max, (void)data, (void)bytes, (void)watch;
    return none(text, n);
}

int kvq_remote_head(struct kvq_remote *remote, const char *key, struct kvq_remote_object *out,
                    char *text, size_t n)
{
    (void)remote, (void)key, (void)out;
    return none(text, n);
}

int kvq_remote_delete(struct kvq_remote *remote, const char *key, char *text, size_t n)
{
    (void)remote, (void)key;
    return none(text, n);
}

int kvq_remote_list(struct kvq_remote *remote, const char *start, const char *after,
                    int (*each)(void *context, const struct kvq_remote_object *object),
                    void *context, char *text, size_t n)
{
    (void)remote, (void)start, (void)after, (void)each, (void)context;
    return none(text, n);
}

int kvq_remote_session_key(const char *space, const char *name, char out[KVQ_REMOTE_KEY_BYTES])
{
    (void)space, (void)name;
    out[0] = '\0';
    return KVQ_E_UNSUPPORTED;
}

int kvq_remote_push_file(struct kvq_remote *remote, const char *path, const char *space,
                         const char *name, bool again, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n)
{
    (void)remote, (void)path, (void)space, (void)name, (void)again, (void)watch, (void)moved;
    return none(text, n);
}

int kvq_remote_pull_file(struct kvq_remote *remote, const char *space, const char *name,
                         const char *path, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n)
{
    (void)remote, (void)space, (void)name, (void)path, (void)watch, (void)moved;
    return none(text, n);
}

int kvq_remote_forget(struct kvq_remote *remote, const char *space, const char *name, char *text,
                      size_t n)
{
    (void)remote, (void)space, (void)name;
    return none(text, n);
}

int kvq_remote_sessions(struct kvq_remote *remote, const char *space,
                        const struct kvq_remote_name *after,
                        int (*each)(void *context, const char *space, const char *name,
                                    uint64_t bytes),
                        void *context, char *text, size_t n)
{
    (void)remote, (void)space, (void)after, (void)each, (void)context;
    return none(text, n);
}

int kvq_remote_push(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const char *space, const char *name, bool again,
                    const struct kvq_remote_watch *watch, struct kvq_remote_moved *moved,
                    char *text, size_t n)
{
    (void)remote, (void)store, (void)folder, (void)space, (void)name, (void)again, (void)watch;
    (void)moved;
    return none(text, n);
}

int kvq_remote_fetch(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                     const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                     struct kvq_remote_moved *moved, char **path, char *text, size_t n)
{
    (void)remote, (void)store, (void)folder, (void)what, (void)watch, (void)moved;
    *path = NULL;
    return none(text, n);
}

int kvq_remote_take(struct kvq_store *store, const struct kvq_remote_pull *what, const char *path,
                    const struct kvq_remote_watch *watch, char *text, size_t n)
{
    (void)store, (void)what, (void)path, (void)watch;
    return none(text, n);
}

uint64_t kvq_remote_sweep(const char *folder, const char *keep, uint64_t max_age_s, uint32_t most)
{
    (void)folder, (void)keep, (void)max_age_s, (void)most;
    return 0;
}

int kvq_remote_pull(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                    struct kvq_remote_moved *moved, char *text, size_t n)
{
    (void)remote, (void)store, (void)folder, (void)what, (void)watch, (void)moved;
    return none(text, n);
}
