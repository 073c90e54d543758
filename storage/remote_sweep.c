// SPDX-License-Identifier: Apache-2.0
//
// What transfers have left behind in their folder. Only files that are named as remote_move.c names
// them are touched.
#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "storage/remote.h"

struct leftover {
    char name[128];
    time_t at;      // of its last change
    uint64_t bytes; // on disk
};

struct leftovers {
    struct leftover *files;
    size_t count, room;
};

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static bool is_ours(const char *name)
{
    return (strncmp(name, "push-", 5) == 0 || strncmp(name, "pull-", 5) == 0) &&
           strlen(name) < sizeof((struct leftover *)0)->name &&
           (ends_with(name, ".kvq") || ends_with(name, ".kvq.part") || ends_with(name, ".kvq.tmp"));
}

static uint64_t bytes_on_disk(const struct stat *st)
{
    return (uint64_t)st->st_blocks * 512;
}

static bool note_leftover(struct leftovers *l, const char *name, const struct stat *st)
{
    if (l->count == l->room) {
        size_t room = l->room ? 2 * l->room : 16;
        struct leftover *bigger = realloc(l->files, room * sizeof *bigger);
        if (!bigger)
            return false;
        l->files = bigger;
        l->room = room;
    }
    struct leftover *f = &l->files[l->count++];
    assert(strlen(name) < sizeof f->name);
    memcpy(f->name, name, strlen(name) + 1);
    f->at = st->st_mtime;
    f->bytes = bytes_on_disk(st);
    return true;
}

static int newest_first(const void *a, const void *b)
{
    const struct leftover *x = a, *y = b;
    return (x->at < y->at) - (x->at > y->at);
}

uint64_t kvq_remote_sweep(const char *folder, const char *keep, uint64_t max_age_s, uint32_t most)
{
    const char *slash = keep ? strrchr(keep, '/') : NULL, *kept = slash ? slash + 1 : keep;
    struct leftovers l = {0};
    uint64_t freed = 0;
    struct stat st;
    time_t now = time(NULL);
    DIR *dir = opendir(folder);
    if (!dir)
        return 0;
    int at = dirfd(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        if (!is_ours(e->d_name) || (kept && strncmp(e->d_name, kept, strlen(kept)) == 0) ||
            fstatat(at, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        bool old = st.st_mtime < now && (uint64_t)(now - st.st_mtime) > max_age_s;
        if ((old || ends_with(e->d_name, ".tmp") || !note_leftover(&l, e->d_name, &st)) &&
            unlinkat(at, e->d_name, 0) == 0)
            freed += bytes_on_disk(&st);
    }
    if (l.count > most)
        qsort(l.files, l.count, sizeof *l.files, newest_first);
    for (size_t i = most; i < l.count; i++)
        if (unlinkat(at, l.files[i].name, 0) == 0)
            freed += l.files[i].bytes;
    free(l.files);
    closedir(dir);
    return freed;
}
