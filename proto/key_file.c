// SPDX-License-Identifier: Apache-2.0
//
// See key_file.h. inih reads the file, libsodium makes the keys.
#include "proto/key_file.h"

#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/status.h"

_Static_assert(KVQ_KEY_BYTES == crypto_box_PUBLICKEYBYTES, "keys of CURVE are those of crypto_box");
_Static_assert(KVQ_KEY_BYTES == crypto_box_SECRETKEYBYTES, "keys of CURVE are those of crypto_box");

enum { KEY_PUBLIC = 1, KEY_SECRET = 2, KEY_SERVER = 4, LONGEST_FILE = 4096 };

static const char header[] = "# A key of kvq's control port. Whoever has \"secret\" is taken for "
                             "you: leave this file 0600.\n";

void kvq_key_to_hex(const uint8_t key[KVQ_KEY_BYTES], char hex[KVQ_KEY_HEX])
{
    sodium_bin2hex(hex, KVQ_KEY_HEX, key, KVQ_KEY_BYTES);
}

bool kvq_key_from_hex(const char *hex, uint8_t key[KVQ_KEY_BYTES])
{
    size_t n = 0;
    return strlen(hex) == KVQ_KEY_HEX - 1 &&
           sodium_hex2bin(key, KVQ_KEY_BYTES, hex, KVQ_KEY_HEX - 1, NULL, &n, NULL) == 0 &&
           n == KVQ_KEY_BYTES;
}

void kvq_key_forget(struct kvq_key_file *key)
{
    sodium_memzero(key, sizeof *key);
}

int kvq_key_make(struct kvq_key_file *key, char *text)
{
    memset(key, 0, sizeof *key);
    if (sodium_init() < 0) {
        snprintf(text, KVQ_TEXT_BYTES, "this machine gives no random bytes for a key");
        return KVQ_E_SYSTEM;
    }
    crypto_box_keypair(key->public_key, key->secret);
    return 0;
}

// ---- Reading ----

struct read_lines {
    struct kvq_key_file *key;
    unsigned seen;
    bool wrong;
};

static int take_line(void *context, const char *section, const char *name, const char *value)
{
    static const char *const names[] = {"public", "secret", "server"};
    struct read_lines *r = context;
    uint8_t *const fields[] = {r->key->public_key, r->key->secret, r->key->server};
    unsigned at = 0;
    while (at < 3 && strcmp(names[at], name) != 0)
        at++;
    if (*section || at == 3 || r->seen & 1u << at || !kvq_key_from_hex(value, fields[at]))
        r->wrong = true;
    r->seen |= at < 3 ? 1u << at : 0;
    return !r->wrong;
}

// What the file says, which is not repeated: it may be a secret.
static int parse_key(const char *contents, struct kvq_key_file *key, const char *path, char *text)
{
    struct read_lines r = {.key = key};
    uint8_t derived[KVQ_KEY_BYTES];
    int line = ini_parse_string(contents, take_line, &r);
    if (line != 0) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%.300s:%d: a line has to be public, secret or server, once each, = and 64 "
                 "hexadecimal digits; kvqctl key make writes such a file",
                 path, line);
        return KVQ_E_INVALID;
    }
    key->has_server = r.seen & KEY_SERVER;
    if ((r.seen & (KEY_PUBLIC | KEY_SECRET)) != (KEY_PUBLIC | KEY_SECRET)) {
        snprintf(text, KVQ_TEXT_BYTES, "%.300s has no %s; kvqctl key make writes such a file", path,
                 r.seen & KEY_PUBLIC ? "secret" : "public");
        return KVQ_E_INVALID;
    }
    if (crypto_scalarmult_base(derived, key->secret) != 0 ||
        memcmp(derived, key->public_key, sizeof derived) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "%.300s: public is not the public key of secret", path);
        return KVQ_E_INVALID;
    }
    return 0;
}

// 0, or why nobody should rely on such a file.
static int check_owner(int fd, const char *path, char *text)
{
    struct stat s;
    const char *why = NULL;
    if (fstat(fd, &s) != 0)
        why = strerror(errno);
    else if (!S_ISREG(s.st_mode))
        why = "not a file";
    else if (s.st_uid != geteuid() && s.st_uid != 0 && geteuid() != 0)
        why = "it belongs to another user; have one of your own";
    else if (s.st_mode & 077)
        why = "others may read or write it; chmod 600 it, and make a new key if they have";
    if (why)
        snprintf(text, KVQ_TEXT_BYTES, "%.300s: %s", path, why);
    return why ? KVQ_E_INVALID : 0;
}

int kvq_key_read(const char *path, struct kvq_key_file *key, char *text)
{
    char contents[LONGEST_FILE];
    ssize_t n = -1;
    memset(key, 0, sizeof *key);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    int error = fd < 0 ? 0 : check_owner(fd, path, text);
    if (fd >= 0 && error == 0)
        n = read(fd, contents, sizeof contents);
    if (error == 0 && n < 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot read %.300s: %s", path, strerror(errno));
        error = KVQ_E_SYSTEM;
    } else if (error == 0 && ((size_t)n == sizeof contents || memchr(contents, 0, (size_t)n))) {
        snprintf(text, KVQ_TEXT_BYTES, "%.300s is no key: it is longer, or no text", path);
        error = KVQ_E_INVALID;
    }
    if (error == 0) {
        contents[n] = 0;
        error = parse_key(contents, key, path, text);
    }
    if (fd >= 0)
        close(fd);
    sodium_memzero(contents, sizeof contents);
    if (error)
        kvq_key_forget(key);
    return error;
}

// ---- Writing ----

int kvq_key_write(const char *path, const struct kvq_key_file *key, char *text)
{
    char lines[512], public_hex[KVQ_KEY_HEX], secret[KVQ_KEY_HEX], server[KVQ_KEY_HEX];
    kvq_key_to_hex(key->public_key, public_hex);
    kvq_key_to_hex(key->secret, secret);
    kvq_key_to_hex(key->server, server);
    int n = snprintf(lines, sizeof lines, "%spublic = %s\nsecret = %s\n%s%s%s", header, public_hex,
                     secret, key->has_server ? "server = " : "", key->has_server ? server : "",
                     key->has_server ? "\n" : "");
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool good = fd >= 0 && write(fd, lines, (size_t)n) == n && fsync(fd) == 0;
    if (!good) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot write %.300s: %s%s", path, strerror(errno),
                 errno == EEXIST ? "; a key is not overwritten, remove it first" : "");
        if (fd >= 0)
            unlink(path);
    }
    if (fd >= 0)
        close(fd);
    sodium_memzero(lines, sizeof lines);
    sodium_memzero(secret, sizeof secret);
    return good ? 0 : KVQ_E_SYSTEM;
}
