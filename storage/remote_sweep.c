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
    time_t at; // of its last change
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

static bool note_leftover(struct leftovers *l, const char *name, time_t at)
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
    f->at = at;
    return true;
}

static int newest_first(const void *a, const void *b)
{
    const struct leftover *x = a, *y = b;
    return (x->at < y->at) - (x->at > y->at);
}

void kvq_remote_sweep(const char *folder, uint64_t max_age_s, uint32_t most)
{
    struct leftovers l = {0};
    struct stat st;
    time_t now = time(NULL);
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    int at = dirfd(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        if (!is_ours(e->d_name) || fstatat(at, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        bool old = st.st_mtime < now && (uint64_t)(now - st.st_mtime) > max_age_s;
        if (old || ends_with(e->d_name, ".tmp") || !note_leftover(&l, e->d_name, st.st_mtime))
            (void)unlinkat(at, e->d_name, 0);
    }
    if (l.count > most)
        qsort(l.files, l.count, sizeof *l.files, newest_first);
    for (size_t i = most; i < l.count; i++)
        (void)unlinkat(at, l.files[i].name, 0);
    free(l.files);
    closedir(dir);
}
