// SPDX-License-Identifier: Apache-2.0
//
// Remotes: options, keys, time, and what a request to one needs to know.
#include "storage/remote.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "storage/remote_internal.h"

enum { MAX_KEYS_FILE = 64 << 10, MAX_PART = 256 << 20 };

static const char key_letters[] =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/";
static const char bucket_letters[] = "abcdefghijklmnopqrstuvwxyz0123456789.-";

static int complain(char *text, size_t n, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int complain(char *text, size_t n, int code, const char *format, ...)
{
    if (n == 0)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(text, n, format, args);
    va_end(args);
    return code;
}

bool kvq_remote_built(void)
{
    return true;
}

// ---- Time ----

static uint64_t real_now(struct kvq_remote_clock *clock)
{
    (void)clock;
    return kvq_now_ns() / 1000000;
}

static void real_sleep(struct kvq_remote_clock *clock, uint32_t ms)
{
    (void)clock;
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static uint32_t real_random(struct kvq_remote_clock *clock)
{
    (void)clock;
    uint32_t value = 0;
    if (getrandom(&value, sizeof value, GRND_NONBLOCK) != (ssize_t)sizeof value)
        value = (uint32_t)real_now(NULL) * 2654435761u; // it only spreads tries in time
    return value;
}

struct kvq_remote_clock *kvq_remote_clock_real(void)
{
    static struct kvq_remote_clock clock = {real_now, real_sleep, real_random};
    return &clock;
}

// ---- Keys ----

struct keys_reader {
    struct kvq_remote_keys *keys;
    const char *section;
    bool found, too_long;
};

static void take_key(struct keys_reader *r, char *to, size_t size, const char *value)
{
    if (strlen(value) >= size) {
        r->too_long = true;
        return;
    }
    memcpy(to, value, strlen(value) + 1);
}

static void take_setting(struct keys_reader *r, const char *section, const char *name,
                         const char *value)
{
    if (strcmp(section, r->section) != 0)
        return;
    r->found = true;
    if (strcmp(name, "aws_access_key_id") == 0)
        take_key(r, r->keys->id, sizeof r->keys->id, value);
    else if (strcmp(name, "aws_secret_access_key") == 0)
        take_key(r, r->keys->secret, sizeof r->keys->secret, value);
    else if (strcmp(name, "aws_session_token") == 0)
        take_key(r, r->keys->token, sizeof r->keys->token, value);
}

static char *trim(char *s)
{
    s += strspn(s, " \t\r");
    for (char *end = s + strlen(s); end > s && strchr(" \t\r", end[-1]); end--)
        end[-1] = '\0';
    return s;
}

// Takes the content apart, in place. 0, or the number of a line that says nothing. (inih's lines
// have 199 bytes at most; a session token has hundreds.)
static int take_settings(struct keys_reader *r, char *content)
{
    const char *section = "";
    int number = 1;
    for (char *line; (line = strsep(&content, "\n")); number++) {
        line = trim(line);
        char *end = line + strlen(line), *value = strchr(line, '=');
        if (*line == '\0' || *line == '#' || *line == ';')
            continue;
        if (*line == '[' && end[-1] == ']') {
            end[-1] = '\0';
            section = trim(line + 1);
        } else if (*line == '[' || !value) {
            return number;
        } else {
            *value = '\0';
            take_setting(r, section, trim(line), trim(value + 1));
        }
    }
    return 0;
}

// The whole file with a NUL behind, or a code.
static int read_keys_file(const char *file, char **out, char *text, size_t n)
{
    int rc = 0;
    struct stat st;
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = complain(text, n, KVQ_E_SYSTEM, "%s: cannot open the file of keys: %s", file,
                      strerror(errno));
        goto out;
    }
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_KEYS_FILE) {
        rc =
            complain(text, n, KVQ_E_INVALID, "%s: not a file of keys, or larger than 64 KiB", file);
        goto out;
    }
    if (st.st_mode & (S_IRWXG | S_IRWXO)) {
        rc = complain(text, n, KVQ_E_PERMISSION,
                      "%s: others may read these keys; say chmod 600 and try again", file);
        goto out;
    }
    *out = calloc(1, MAX_KEYS_FILE + 1);
    if (!*out)
        rc = complain(text, n, KVQ_E_NO_MEMORY, "%s: no memory to read it", file);
    else if (read(fd, *out, MAX_KEYS_FILE) < 0)
        rc = complain(text, n, KVQ_E_SYSTEM, "%s: cannot be read: %s", file, strerror(errno));
out:
    if (fd >= 0)
        close(fd);
    return rc;
}

static int keys_from_file(const char *file, const char *section, struct kvq_remote_keys *keys,
                          char *text, size_t n)
{
    char *content = NULL;
    struct keys_reader r = {.keys = keys, .section = section};
    int rc = read_keys_file(file, &content, text, n);
    if (rc != 0)
        goto out;
    int line = take_settings(&r, content);
    if (line > 0)
        rc = complain(text, n, KVQ_E_INVALID, "%s: line %d is neither [SECTION] nor NAME = VALUE",
                      file, line);
    else if (r.too_long)
        rc = complain(text, n, KVQ_E_LIMIT, "%s: a key in [%s] is too long", file, section);
    else if (!keys->id[0] || !keys->secret[0])
        rc = complain(text, n, KVQ_E_INVALID,
                      r.found ? "%s: [%s] lacks aws_access_key_id or aws_secret_access_key"
                              : "%s: there is no section [%s]",
                      file, section);
out:
    if (content)
        explicit_bzero(content, MAX_KEYS_FILE);
    free(content);
    return rc;
}

static int keys_from_environment(struct kvq_remote_keys *keys, char *text, size_t n)
{
    const char *id = getenv("AWS_ACCESS_KEY_ID"), *secret = getenv("AWS_SECRET_ACCESS_KEY");
    const char *token = getenv("AWS_SESSION_TOKEN");
    struct keys_reader r = {.keys = keys};
    if (!id || !*id || !secret || !*secret)
        return complain(text, n, KVQ_E_PERMISSION,
                        "there are no keys for the remote store: set AWS_ACCESS_KEY_ID and "
                        "AWS_SECRET_ACCESS_KEY, or name a file of keys");
    take_key(&r, keys->id, sizeof keys->id, id);
    take_key(&r, keys->secret, sizeof keys->secret, secret);
    take_key(&r, keys->token, sizeof keys->token, token ? token : "");
    return r.too_long ? complain(text, n, KVQ_E_LIMIT,
                                 "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
                                 "or AWS_SESSION_TOKEN is too long")
                      : 0;
}

int kvq_remote_keys_load(const char *file, const char *section, struct kvq_remote_keys *keys,
                         char *text, size_t n)
{
    memset(keys, 0, sizeof *keys);
    int rc = file ? keys_from_file(file, section ? section : "default", keys, text, n)
                  : keys_from_environment(keys, text, n);
    if (rc != 0)
        explicit_bzero(keys, sizeof *keys);
    return rc;
}

// ---- Options ----

static bool made_of(const char *text, const char *letters)
{
    return text[strspn(text, letters)] == '\0';
}

// Whether a path has no step that a server, or a proxy before it, would fold away. It may be empty
// and may end with a slash.
static bool plain_path(const char *path)
{
    while (*path) {
        size_t n = strcspn(path, "/");
        if (n == 0 || (n <= 2 && strncmp(path, "..", n) == 0))
            return false;
        path += n + (path[n] == '/');
    }
    return true;
}

// The part of an endpoint, or an empty text; by curl_free.
static char *url_part(CURLU *url, CURLUPart part)
{
    char *value = NULL;
    return curl_url_get(url, part, &value, 0) == CURLUE_OK ? value : NULL;
}

// Makes http://HOST[:PORT]/BUCKET of an endpoint that is nothing but a scheme, host and port.
static int make_base(struct kvq_remote *r, const struct kvq_remote_options *o, char *text, size_t n)
{
    CURLU *url = curl_url();
    char *scheme = NULL, *host = NULL, *port = NULL, *path = NULL, *user = NULL, *query = NULL;
    int rc = 0;
    assert(!r->base);
    if (!url)
        return complain(text, n, KVQ_E_NO_MEMORY, "no memory for a remote");
    bool parsed = curl_url_set(url, CURLUPART_URL, o->endpoint, 0) == CURLUE_OK;
    scheme = url_part(url, CURLUPART_SCHEME);
    host = url_part(url, CURLUPART_HOST);
    port = url_part(url, CURLUPART_PORT);
    path = url_part(url, CURLUPART_PATH);
    user = url_part(url, CURLUPART_USER);
    query = url_part(url, CURLUPART_QUERY);
    bool web = scheme && (strcmp(scheme, "http") == 0 || strcmp(scheme, "https") == 0);
    if (!parsed || !web || !host || !path || strcmp(path, "/") != 0 || user || query ||
        strchr(o->endpoint, '#')) {
        rc = complain(text, n, KVQ_E_INVALID,
                      user ? "the endpoint holds a user's name: give keys by themselves"
                           : "endpoint \"%.200s\" is not http[s]://HOST[:PORT]",
                      o->endpoint);
        goto out;
    }
    const char *colon = port ? ":" : "", *number = port ? port : "";
    int made = o->virtual_host
                   ? asprintf(&r->base, "%s://%s.%s%s%s", scheme, o->bucket, host, colon, number)
                   : asprintf(&r->base, "%s://%s%s%s/%s", scheme, host, colon, number, o->bucket);
    if (made < 0) {
        r->base = NULL;
        rc = complain(text, n, KVQ_E_NO_MEMORY, "no memory for a remote");
    }
out:
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_free(path);
    curl_free(user);
    curl_free(query);
    curl_url_cleanup(url);
    return rc;
}

static int check_names(const struct kvq_remote_options *o, char *text, size_t n)
{
    const char *bucket = o->bucket ? o->bucket : "", *prefix = o->prefix ? o->prefix : "";
    const char *region = o->region ? o->region : "";
    size_t length = strlen(bucket);
    if (!o->endpoint)
        return complain(text, n, KVQ_E_INVALID, "no endpoint is given for the remote store");
    if (length < 3 || length > 63 || !made_of(bucket, bucket_letters) || !plain_path(bucket) ||
        bucket[0] == '.' || bucket[0] == '-' || strstr(bucket, ".."))
        return complain(text, n, KVQ_E_INVALID,
                        "bucket \"%.80s\" has not 3 to 63 small letters, digits, dots or minus "
                        "signs",
                        bucket);
    if (!made_of(prefix, key_letters) || !plain_path(prefix) || strlen(prefix) > 255)
        return complain(text, n, KVQ_E_INVALID,
                        "prefix \"%.80s\" may have at most 255 letters, digits, dots, minus signs, "
                        "underscores, and slashes between them",
                        prefix);
    if (strlen(region) > 60 || !made_of(region, key_letters) || strchr(region, '/'))
        return complain(text, n, KVQ_E_INVALID, "region \"%.80s\" is no region's name", region);
    return 0;
}

static int check_options(const struct kvq_remote_options *o, char *text, size_t n)
{
    int rc = check_names(o, text, n);
    if (rc != 0)
        return rc;
    if (!o->keys.id[0] || !o->keys.secret[0])
        return complain(text, n, KVQ_E_PERMISSION, "there are no keys for the remote store");
    if (strpbrk(o->keys.id, "\r\n:") || strpbrk(o->keys.token, "\r\n"))
        return complain(text, n, KVQ_E_INVALID, "a key holds a character that no key has");
    if (o->part_bytes && (o->part_bytes < KVQ_REMOTE_PART_MIN || o->part_bytes > MAX_PART))
        return complain(text, n, KVQ_E_INVALID,
                        "parts of %u bytes; from 64 KiB to 256 MiB are possible", o->part_bytes);
    if (o->connections > KVQ_REMOTE_CONNECTIONS)
        return complain(text, n, KVQ_E_INVALID, "%u connections; at most %d are possible",
                        o->connections, KVQ_REMOTE_CONNECTIONS);
    return 0;
}

static void init_curl(void)
{
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

static uint32_t or_default(uint32_t value, uint32_t instead)
{
    return value ? value : instead;
}

int kvq_remote_check(const struct kvq_remote_options *o, char *text, size_t n)
{
    struct kvq_remote r = {0};
    int rc = check_names(o, text, n);
    if (rc == 0)
        rc = make_base(&r, o, text, n);
    free(r.base);
    return rc;
}

int kvq_remote_open(const struct kvq_remote_options *o, struct kvq_remote **remote, char *text,
                    size_t n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_curl);
    *remote = NULL;
    int rc = check_options(o, text, n);
    if (rc != 0)
        return rc;
    struct kvq_remote *r = calloc(1, sizeof *r);
    if (!r)
        return complain(text, n, KVQ_E_NO_MEMORY, "no memory for a remote");
    r->keys = o->keys;
    r->connect_ms = or_default(o->connect_ms, 10 * 1000);
    r->stall_ms = or_default(o->stall_ms, 60 * 1000);
    r->retries = o->retries < 0 ? 0 : or_default((uint32_t)o->retries, 5);
    r->part_bytes = or_default(o->part_bytes, 16 << 20);
    r->lanes = or_default(o->connections, 4);
    r->clock = o->clock ? o->clock : kvq_remote_clock_real();
    r->io = o->io ? o->io : kvq_io_posix();
    r->watch = o->watch;
    snprintf(r->sigv4, sizeof r->sigv4, "aws:amz:%s:s3", o->region ? o->region : "us-east-1");
    rc = make_base(r, o, text, n);
    if (rc != 0)
        goto error;
    const char *prefix = o->prefix ? o->prefix : "";
    bool slash = *prefix && prefix[strlen(prefix) - 1] != '/';
    if (asprintf(&r->prefix, "%s%s", prefix, slash ? "/" : "") < 0)
        r->prefix = NULL;
    r->ca_file = o->ca_file ? strdup(o->ca_file) : NULL;
    r->multi = curl_multi_init();
    bool whole = r->prefix && (!o->ca_file || r->ca_file) && r->multi;
    for (uint32_t i = 0; whole && i < r->lanes; i++)
        whole = (r->easy[i] = curl_easy_init()) != NULL;
    if (!whole) {
        rc = complain(text, n, KVQ_E_NO_MEMORY, "no memory for a remote");
        goto error;
    }
    *remote = r;
    return 0;
error:
    kvq_remote_close(&r);
    return rc;
}

void kvq_remote_close(struct kvq_remote **remote)
{
    struct kvq_remote *r = remote ? *remote : NULL;
    if (!r)
        return;
    for (uint32_t i = 0; i < r->lanes; i++)
        curl_easy_cleanup(r->easy[i]);
    curl_multi_cleanup(r->multi);
    free(r->base);
    free(r->prefix);
    free(r->ca_file);
    explicit_bzero(r, sizeof *r);
    free(r);
    *remote = NULL;
}

int kvq__remote_key_check(struct kvq__call *call, const char *key)
{
    assert(strlen(call->remote->prefix) < KVQ_REMOTE_KEY_BYTES);
    size_t room = KVQ_REMOTE_KEY_BYTES - strlen(call->remote->prefix);
    if (*key && made_of(key, key_letters) && plain_path(key) && strlen(key) < room)
        return 0;
    return complain(call->text, call->n, KVQ_E_INVALID,
                    "\"%.100s\" is no key: it may have at most %zu letters, digits, dots, minus "
                    "signs, underscores, and slashes between them",
                    key, room - 1);
}
