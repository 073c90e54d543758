// SPDX-License-Identifier: Apache-2.0
//
// The key that hashes of prefixes are keyed with, beside the store that keeps such hashes: without
// it they tell nothing of anybody's tokens, and with another one they match nothing. It is a file
// of its own and not in the catalog, so that a catalog that is made anew still fits.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "daemon/store/internal.h"

enum { KEY_BYTES = 32 };

// A name, the key, and of both the checksum.
struct key_file {
    char magic[16];
    uint8_t key[KEY_BYTES];
    struct kvq_checksum check;
};
static const char magic[16] = "kvq prefix key 1";
static_assert(sizeof(struct key_file) == 64, "no holes");

static struct kvq_checksum checksum_of(const struct key_file *file)
{
    return kvq_checksum(file, offsetof(struct key_file, check));
}

static int complain(const char *path, const char *what, int error, char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "the key of prefixes, %.300s, cannot be %s: %s", path, what,
             strerror(-error));
    return KVQ_E_SYSTEM;
}

static bool is_whole(const struct key_file *file)
{
    return memcmp(file->magic, magic, sizeof magic) == 0 &&
           kvq_checksum_equal(file->check, checksum_of(file));
}

// 0; 1 if there is none, or none that is whole.
static int read_key(const char *path, uint8_t *key, char *text)
{
    struct key_file file, more;
    struct stat status;
    char quoted[KVQ_CONFIG_PATH + 64];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? 1 : complain(path, "opened", -errno, text);
    int rc = 0;
    if (fstat(fd, &status) == 0 && (status.st_mode & 077) && fchmod(fd, 0600) < 0)
        rc = complain(path, "kept from others (mode 0600)", -errno, text);
    ssize_t got = rc ? 0 : read(fd, &file, sizeof file);
    if (got < 0)
        rc = complain(path, "read", -errno, text);
    bool whole = got == sizeof file && read(fd, &more, sizeof more) == 0 && is_whole(&file);
    close(fd);
    if (rc == 0 && whole)
        memcpy(key, file.key, KEY_BYTES);
    else if (rc == 0)
        kvq__log(
            KVQ_LOG_WARN, "prefix_key",
            "path=%s text=\"damaged: a new one is made, and prefixes that are stored are found "
            "again once their sessions are saved again\"",
            kvq__log_quote(quoted, sizeof quoted, path));
    return rc ? rc : !whole;
}

// A new one, in its place only when it is durable.
static int make_key(struct kvq_io *io, const char *path, uint8_t *key, char *text)
{
    struct key_file file = {0};
    bool placed;
    int rc = kvq_io_random(io, file.key, KEY_BYTES);
    if (rc < 0)
        return complain(path, "made up", rc, text);
    memcpy(file.magic, magic, sizeof file.magic);
    file.check = checksum_of(&file);
    rc = kvq_io_replace(io, path, &file, sizeof file, &placed);
    if (rc < 0)
        return complain(path, "written", rc, text);
    memcpy(key, file.key, KEY_BYTES);
    return 0;
}

int kvq__prefix_key(struct kvq_io *io, const char *folder, uint8_t key[32], char *text)
{
    char path[KVQ_MAX_STORE_FOLDER + 24];
    if ((size_t)snprintf(path, sizeof path, "%s/prefix.key", folder) >= sizeof path) {
        snprintf(text, KVQ_TEXT_BYTES, "the folder's name is too long");
        return KVQ_E_INVALID;
    }
    int rc = read_key(path, key, text);
    return rc <= 0 ? rc : make_key(io, path, key, text);
}
