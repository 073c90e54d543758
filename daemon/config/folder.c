// SPDX-License-Identifier: Apache-2.0
//
// The configuration in several files: the one that is named, and conf.d/*.conf beside it. Packages
// and tools add and take away a file there, and leave alone what an administrator has written.
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/internal.h"
#include "proto/status.h"

static const char ending[] = ".conf";

enum { FOLDER_PATH = KVQ_CONFIG_PATH + 16 };

static void folder_of(const struct kvq_config *config, char *folder)
{
    const char *slash = strrchr(config->file, '/');
    int n = slash ? (int)(slash - config->file) + 1 : 0;
    assert(config->file[0]);
    snprintf(folder, FOLDER_PATH, "%.*sconf.d", n, config->file);
}

// In a folder such as /tmp anybody can make a conf.d.
static int check_folder(const char *folder, const struct stat *status, char *text)
{
    if (!S_ISDIR(status->st_mode))
        return kvq__config_refuse(text, folder,
                                  "is no folder; conf.d beside the configuration "
                                  "file holds more of it");
    if (status->st_uid != 0 && status->st_uid != geteuid())
        return kvq__config_refuse(text, folder,
                                  "belongs to user %u; give it to root or to kvqd's user, or move "
                                  "the configuration file to a folder of its own",
                                  status->st_uid);
    if (status->st_mode & S_IWOTH)
        return kvq__config_refuse(text, folder, "everybody may write to it (mode %04o); chmod o-w",
                                  status->st_mode & 07777);
    return 0;
}

static int ends_in_conf(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name), n = strlen(ending);
    return entry->d_name[0] != '.' && length > n && strcmp(entry->d_name + length - n, ending) == 0;
}

// By bytes, whatever the locale.
static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_one(struct kvq_config *config, const char *folder, const char *name, char *text)
{
    char path[FOLDER_PATH + KVQ_CONFIG_NAME];
    if (strlen(name) >= KVQ_CONFIG_NAME)
        return kvq__config_refuse(text, folder, "the name %.80s is longer than %d bytes", name,
                                  KVQ_CONFIG_NAME - 1);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    config->n_more_files++;
    return kvq__config_read_file(config, path, name, text);
}

static int read_folder(struct kvq_config *config, const char *folder, char *text)
{
    struct dirent **entries;
    int error = 0, n = scandir(folder, &entries, ends_in_conf, by_name);
    if (n < 0)
        return kvq__config_refuse(text, folder, "cannot read it: %s", strerror(errno));
    if (n > KVQ_MAX_CONFIG_FILES)
        error = kvq__config_refuse(text, folder, "%d files end in %s; allowed are %d; join some", n,
                                   ending, KVQ_MAX_CONFIG_FILES);
    for (int i = 0; i < n; i++) {
        if (error == 0)
            error = read_one(config, folder, entries[i]->d_name, text);
        free(entries[i]);
    }
    free(entries);
    return error;
}

int kvq__config_read_files(struct kvq_config *config, char *text)
{
    char folder[FOLDER_PATH];
    struct stat status;
    int error = kvq__config_read_file(config, config->file, "", text);
    config->n_more_files = 0;
    if (error)
        return error;
    folder_of(config, folder);
    if (stat(folder, &status) != 0)
        return errno == ENOENT
                   ? 0
                   : kvq__config_refuse(text, folder, "cannot read it: %s", strerror(errno));
    error = check_folder(folder, &status, text);
    return error ? error : read_folder(config, folder, text);
}
