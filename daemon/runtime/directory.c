// SPDX-License-Identifier: Apache-2.0
//
// Making and checking directories; see directory.h.
#include "daemon/runtime/directory.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/shm.h"
#include "proto/status.h"

enum { OF_OTHERS = S_IWGRP | S_IWOTH, SHARED = S_ISVTX | S_IWOTH };

int kvq__directory_fail(const char *what, const char *path, char *text)
{
    int error = errno;
    snprintf(text, KVQ_TEXT_BYTES, "cannot %s %.200s: %s", what, path, strerror(error));
    return error == EACCES || error == EPERM || error == EROFS ? KVQ_E_PERMISSION : KVQ_E_SYSTEM;
}

static int set_group(const struct kvq_config *config, int fd, char *text)
{
    if (!config->runtime_group[0])
        return 0;
    errno = 0;
    struct group *group = getgrnam(config->runtime_group);
    if (!group) {
        snprintf(text, KVQ_TEXT_BYTES, "runtime_group \"%.64s\" is no group of this system",
                 config->runtime_group);
        return KVQ_E_INVALID;
    }
    if (fchown(fd, (uid_t)-1, group->gr_gid) != 0)
        return kvq__directory_fail("change the group of", config->runtime_dir, text);
    return 0;
}

// 1: no entries, or kvqd.lock is one of them; 0: only others'; negative: an errno.
static int is_daemons(int fd)
{
    struct stat st;
    bool empty = true;
    if (fstatat(fd, KVQ_LOCK_FILE, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
        st.st_uid == geteuid())
        return 1;
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = own < 0 ? NULL : fdopendir(own);
    if (!folder) {
        int error = errno;
        if (own >= 0)
            close(own);
        return -error;
    }
    for (struct dirent *entry = readdir(folder); entry && empty; entry = readdir(folder))
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(folder);
    return empty;
}

static int check_owner(const char *path, int fd, char *text)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return kvq__directory_fail("look at the runtime directory", path, text);
    if (st.st_uid != geteuid()) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%.200s is not a directory of user %u (its owner is %u); remove it or choose "
                 "another runtime_dir",
                 path, geteuid(), st.st_uid);
        return KVQ_E_PERMISSION;
    }
    if (st.st_mode & SHARED) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%.200s is shared with other users (mode %04o); runtime_dir must be kvqd's alone: "
                 "name a new one, such as %.150s/kvqd",
                 path, (unsigned)st.st_mode & 07777, path);
        return KVQ_E_PERMISSION;
    }
    int daemons = is_daemons(fd);
    if (daemons < 0) {
        errno = -daemons;
        return kvq__directory_fail("look into the runtime directory", path, text);
    }
    if (daemons == 0) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%.200s has files in it, and no " KVQ_LOCK_FILE " of an earlier kvqd; runtime_dir "
                 "must be kvqd's alone: name a new or empty one, such as %.150s/kvqd",
                 path, path);
        return KVQ_E_PERMISSION;
    }
    return 0;
}

// Where the user may not look, as a plain one in /run, another directory is the way out.
static int fail_there(const char *what, const char *path, char *text)
{
    int code = kvq__directory_fail(what, path, text);
    size_t n = strlen(text);
    if (code == KVQ_E_PERMISSION)
        snprintf(text + n, KVQ_TEXT_BYTES - n, "; name another one with --runtime-dir");
    return code;
}

int kvq__directory_open(const struct kvq_config *config, char *text)
{
    const char *path = config->runtime_dir;
    assert(!(config->runtime_mode & OF_OTHERS)); // or kvq__config_check had refused it
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return fail_there("make the runtime directory", path, text);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && (errno == ENOTDIR || errno == ELOOP)) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%.200s is not a directory; remove it or choose another runtime_dir", path);
        return KVQ_E_PERMISSION;
    }
    if (fd < 0)
        return fail_there("look at the runtime directory", path, text);
    int error = check_owner(path, fd, text);
    error = error ? error : set_group(config, fd, text);
    if (error == 0 && fchmod(fd, (mode_t)config->runtime_mode) != 0)
        error = kvq__directory_fail("set the mode of", path, text);
    close(fd);
    return error;
}

int kvq__directory_lock_file(const char *directory, int *out, char *text)
{
    char path[KVQ_CONFIG_PATH + 16];
    snprintf(path, sizeof path, "%s/" KVQ_LOCK_FILE, directory);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return kvq__directory_fail("open the lock file", path, text);
    if (fchmod(fd, 0600) != 0) { // one that was left behind may have had another mode
        int error = kvq__directory_fail("set the mode of", path, text);
        close(fd);
        return error;
    }
    *out = fd;
    return 0;
}

int kvq__directory_check(const char *option, const char *path, char *text)
{
    struct stat st;
    if (stat(path, &st) != 0) // whoever makes it says what is wrong
        return 0;
    if (st.st_uid == geteuid() && !(st.st_mode & OF_OTHERS))
        return 0;
    snprintf(
        text, KVQ_TEXT_BYTES,
        "%s: others than user %u may change what is in %.200s (owner %u, mode %04o); take write "
        "from group and others, or name another directory",
        option, geteuid(), path, st.st_uid, (unsigned)st.st_mode & 07777);
    return KVQ_E_PERMISSION;
}
