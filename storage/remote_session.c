// SPDX-License-Identifier: Apache-2.0
//
// Sessions on the remote store: a file pushed and pulled in parts, each with its checksum.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_internal.h"

enum { DAMAGED_TRIES = 3 }; // of a part whose bytes are not what they should be

// ---- Keys ----

static size_t escape(const char *name, char *out, size_t size)
{
    static const char digits[] = "0123456789ABCDEF";
    size_t used = 0;
    for (const char *at = name; *at; at++) {
        unsigned char c = (unsigned char)*at;
        bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                     c == '-' || (c == '.' && at != name);
        if (used + 4 > size)
            return 0;
        if (plain) {
            out[used++] = (char)c;
        } else {
            out[used++] = '_';
            out[used++] = digits[c >> 4];
            out[used++] = digits[c & 15];
        }
    }
    out[used] = '\0';
    return used;
}

int kvq_remote_session_key(const char *space, const char *name, char out[KVQ_REMOTE_KEY_BYTES])
{
    if (strlen(space) >= KVQ_NAME_BYTES || strlen(name) >= KVQ_NAME_BYTES)
        return KVQ_E_LIMIT;
    size_t n = escape(space, out, KVQ_REMOTE_KEY_BYTES / 2);
    if (n == 0)
        return KVQ_E_INVALID;
    out[n++] = '/';
    return escape(name, out + n, KVQ_REMOTE_KEY_BYTES / 2) ? 0 : KVQ_E_INVALID;
}

static int digit_value(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Undoes escape(). False: that is no name of ours.
static bool unescape(const char *from, size_t n, char out[KVQ_NAME_BYTES])
{
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        char c = from[i];
        if (used + 1 >= KVQ_NAME_BYTES)
            return false;
        if (c == '_') {
            int high = i + 2 < n ? digit_value(from[i + 1]) : -1;
            int low = i + 2 < n ? digit_value(from[i + 2]) : -1;
            if (high < 0 || low < 0 || (high | low) == 0)
                return false;
            c = (char)(high << 4 | low);
            i += 2;
        }
        out[used++] = c;
    }
    out[used] = '\0';
    return used > 0;
}

// Keys of one session, and what is under them.
struct session_keys {
    char base[KVQ_REMOTE_KEY_BYTES]; // SPACE/NAME
    char head[KVQ_REMOTE_KEY_BYTES + 8];
    char data[KVQ_REMOTE_KEY_BYTES + 80];
};

static int make_keys(struct kvq__call *call, const char *space, const char *name,
                     struct session_keys *keys)
{
    int rc = kvq_remote_session_key(space, name, keys->base);
    if (rc != 0) {
        if (call->n)
            snprintf(call->text, call->n, "\"%.100s\" in \"%.100s\" is no name for a session", name,
                     space);
        return rc;
    }
    snprintf(keys->head, sizeof keys->head, "%s/head", keys->base);
    snprintf(keys->data, sizeof keys->data, "%s/data/%064d", keys->base, 0); // as long as any
    return kvq__remote_key_check(call, keys->data);
}

static int name_data(struct session_keys *keys, const char *head, size_t n)
{
    uint8_t sha[KVQ__SHA_BYTES];
    char hex[KVQ__SHA_HEX];
    int rc = kvq__sha256(head, n, sha);
    if (rc != 0)
        return rc;
    kvq__sha_hex(sha, hex);
    snprintf(keys->data, sizeof keys->data, "%s/data/%s", keys->base, hex);
    return 0;
}

// Gets the head, by malloc. KVQ_E_NO_SESSION, with a sentence: there is none.
static int get_head(struct kvq__call *call, const struct session_keys *keys, char **head, size_t *n)
{
    void *data = NULL;
    int rc = kvq_remote_get(call->remote, keys->head, KVQ__PARTS_TEXT, &data, n, call->watch,
                            call->text, call->n);
    *head = data;
    return rc;
}

// ---- Files ----

static int say_file(struct kvq__call *call, const char *path, const char *what, int error)
{
    int code = error == -ENOSPC || error == -EDQUOT ? KVQ_E_NO_SPACE
               : error == -EWOULDBLOCK              ? KVQ_E_BUSY
                                                    : KVQ_E_SYSTEM;
    if (call->n)
        snprintf(call->text, call->n, "%.300s: %s: %s", path, what, strerror(-error));
    return code;
}

// The folder that a file is in, by malloc.
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return strdup(".");
    return strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

// Fills in the checksums of an open file's parts.
static int hash_file(struct kvq__call *call, const char *path, int file, struct kvq__parts *parts)
{
    struct kvq_io *io = call->remote->io;
    uint8_t *buffer = malloc(kvq__part_size(parts, 0));
    int rc = buffer ? 0 : say_file(call, path, "reading it", -ENOMEM);
    for (uint32_t i = 0; rc == 0 && i < parts->count; i++) {
        size_t size = kvq__part_size(parts, i), got = 0;
        rc = kvq_io_read(io, file, buffer, size, i * parts->part_bytes, &got);
        if (rc != 0 || got != size)
            rc = say_file(call, path, "reading it", rc ? rc : -EIO);
        else if (kvq__sha256(buffer, size, parts->sha[i]) != 0)
            rc = say_file(call, path, "SHA-256 of it", -ENOSYS);
        else
            rc = kvq__remote_tell(call, 0);
    }
    free(buffer);
    return rc;
}

// ---- Push ----

// What is done once the new head is there. That it fails costs space, and no more.
static void remove_old(struct kvq__call *call, const struct session_keys *keys, const char *old,
                       size_t n)
{
    struct session_keys before = *keys;
    char start[KVQ_REMOTE_KEY_BYTES + 80];
    struct kvq__call quiet = {.remote = call->remote};
    if (old && name_data(&before, old, n) == 0 && strcmp(before.data, keys->data) != 0)
        (void)kvq_remote_delete(call->remote, before.data, NULL, 0);
    snprintf(start, sizeof start, "%s/data/", keys->base);
    (void)kvq__remote_abort_uploads(&quiet, start);
}

static int push_parts(struct kvq__call *call, struct session_keys *keys, int file,
                      const struct kvq__parts *parts, struct kvq_remote_moved *moved)
{
    char *head = NULL, *old = NULL;
    size_t bytes = 0, old_bytes = 0;
    struct kvq_remote_object there;
    int rc = kvq__parts_write(parts, &head, &bytes);
    if (rc == 0)
        rc = name_data(keys, head, bytes);
    if (rc != 0) {
        rc = kvq__remote_say(call, rc, "PUT", keys->head, "no memory, or no SHA-256");
        goto out;
    }
    rc = get_head(call, keys, &old, &old_bytes);
    if (rc == KVQ_E_NO_SESSION || rc == KVQ_E_REMOTE) // whatever is there is replaced
        rc = 0;
    if (rc == 0)
        rc = kvq_remote_head(call->remote, keys->data, &there, call->text, call->n);
    if (rc == KVQ_E_NO_SESSION || (rc == 0 && there.bytes != parts->bytes))
        rc = kvq__remote_upload(call, keys->data, file, parts, &moved->transferred);
    if (rc == 0)
        rc = kvq_remote_put(call->remote, keys->head, head, bytes, NULL, call->text, call->n);
    if (rc == 0)
        remove_old(call, keys, old, old_bytes);
out:
    free(head);
    free(old);
    return rc;
}

int kvq_remote_push_file(struct kvq_remote *remote, const char *path, const char *space,
                         const char *name, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .watch = watch, .text = text, .n = n};
    struct session_keys keys;
    struct kvq__parts parts = {0};
    struct kvq_io_status status = {0};
    memset(moved, 0, sizeof *moved);
    int rc = make_keys(&call, space, name, &keys);
    if (rc != 0)
        return rc;
    int file = kvq_io_open(remote->io, path, KVQ_IO_READ);
    if (file < 0)
        return say_file(&call, path, "opening it", file);
    rc = kvq_io_status(remote->io, file, &status);
    if (rc != 0 || status.bytes == 0) {
        rc = say_file(&call, path, rc ? "looking at it" : "it is empty", rc ? rc : -EINVAL);
        goto out;
    }
    rc = kvq__parts_make(&parts, status.bytes, remote->part_bytes);
    if (rc != 0) {
        rc = say_file(&call, path, "listing its parts", -ENOMEM);
        goto out;
    }
    moved->bytes = call.all = status.bytes;
    rc = hash_file(&call, path, file, &parts);
    if (rc == 0)
        rc = push_parts(&call, &keys, file, &parts, moved);
out:
    kvq__parts_free(&parts);
    remote->io->close(remote->io, file);
    return rc;
}

// ---- Pull ----

// A pull under way.
struct pull {
    struct kvq__call *call;
    const struct session_keys *keys;
    const struct kvq__parts *parts;
    const char *path;
    int file;
    uint64_t had; // bytes of the file before
    uint8_t *buffer;
    struct kvq_remote_moved *moved;
};

// Whether a part is in the file already.
static bool part_is_there(struct pull *p, uint32_t i)
{
    size_t size = kvq__part_size(p->parts, i), got = 0;
    uint64_t at = i * p->parts->part_bytes;
    uint8_t sha[KVQ__SHA_BYTES];
    return at + size <= p->had &&
           kvq_io_read(p->call->remote->io, p->file, p->buffer, size, at, &got) == 0 &&
           got == size && kvq__sha256(p->buffer, size, sha) == 0 &&
           memcmp(sha, p->parts->sha[i], sizeof sha) == 0;
}

static int get_part(struct pull *p, uint32_t i)
{
    struct kvq__call *call = p->call;
    size_t size = kvq__part_size(p->parts, i);
    uint64_t at = i * p->parts->part_bytes;
    uint8_t sha[KVQ__SHA_BYTES];
    int rc = 0;
    for (uint32_t tries = 0; tries < DAMAGED_TRIES; tries++) {
        struct kvq__answer answer = {0};
        rc = tries ? kvq__remote_wait(call, tries, 0) : 0;
        if (rc == 0)
            rc = kvq__remote_range(call, p->keys->data, at, size, p->parts->bytes, &answer);
        bool right = rc == 0 && kvq__sha256(answer.body, size, sha) == 0 &&
                     memcmp(sha, p->parts->sha[i], sizeof sha) == 0;
        if (right) {
            rc = kvq_io_write(call->remote->io, p->file, answer.body, size, at);
            p->moved->transferred += size;
        }
        kvq__answer_free(&answer);
        if (rc < 0 && right)
            return say_file(call, p->path, "writing it", rc);
        if (rc != 0 || right)
            return rc;
    }
    return kvq__remote_say(call, KVQ_E_DAMAGED, "GET", p->keys->data,
                           "bytes %" PRIu64 " to %" PRIu64 " have a wrong checksum, %d times; "
                           "push the session again",
                           at, at + size - 1, DAMAGED_TRIES);
}

static int get_parts(struct pull *p)
{
    struct kvq_io *io = p->call->remote->io;
    struct kvq_io_status status = {0};
    uint64_t room = 0;
    int rc = kvq_io_status(io, p->file, &status);
    if (rc != 0)
        return say_file(p->call, p->path, "looking at it", rc);
    p->had = status.bytes;
    char *folder = folder_of(p->path);
    if (folder && p->parts->bytes > p->had && io->space(io, folder, &room) == 0 &&
        room < p->parts->bytes - p->had)
        rc = say_file(p->call, p->path, "making room for the session", -ENOSPC);
    free(folder);
    for (uint32_t i = 0; rc == 0 && i < p->parts->count; i++) {
        if (!part_is_there(p, i))
            rc = get_part(p, i);
        p->call->done += kvq__part_size(p->parts, i);
        if (rc == 0)
            rc = kvq__remote_tell(p->call, 0);
    }
    if (rc != 0)
        return rc;
    rc = kvq_io_truncate(io, p->file, p->parts->bytes);
    if (rc == 0)
        rc = kvq_io_sync(io, p->file);
    return rc == 0 ? 0 : say_file(p->call, p->path, "writing it", rc);
}

// Brings the parts that a head names into PART, an open file's path.
static int pull_head(struct kvq__call *call, struct session_keys *keys, const char *head, size_t n,
                     const char *part, int file, struct kvq_remote_moved *moved)
{
    struct kvq__parts parts;
    const char *why = "";
    int rc = kvq__parts_read(head, n, &parts, &why);
    if (rc != 0)
        return kvq__remote_say(call, rc, "GET", keys->head, "%s", why);
    struct pull p = {
        .call = call, .keys = keys, .parts = &parts, .path = part, .file = file, .moved = moved};
    moved->bytes = call->all = parts.bytes;
    call->done = 0;
    rc = name_data(keys, head, n);
    p.buffer = malloc(kvq__part_size(&parts, 0));
    if (rc == 0)
        rc = p.buffer ? get_parts(&p)
                      : kvq__remote_say(call, KVQ_E_NO_MEMORY, "GET", keys->data, "no memory");
    free(p.buffer);
    kvq__parts_free(&parts);
    return rc;
}

// Brings the newest data into an open file, also if it is replaced meanwhile.
static int pull_newest(struct kvq__call *call, struct session_keys *keys, const char *part,
                       int file, struct kvq_remote_moved *moved)
{
    enum { ROUNDS = 3 };
    char *head = NULL, *newer = NULL;
    size_t n = 0, newer_n = 0;
    int rc = get_head(call, keys, &head, &n);
    for (int round = 0; rc == 0 && round < ROUNDS; round++) {
        rc = pull_head(call, keys, head, n, part, file, moved);
        if (rc != KVQ_E_NO_SESSION)
            break;
        // The data is not there. Somebody may have pushed again and removed it.
        rc = get_head(call, keys, &newer, &newer_n);
        bool same = rc == 0 && newer_n == n && memcmp(newer, head, n) == 0;
        free(head);
        head = newer;
        n = newer_n;
        newer = NULL;
        if (same || (rc == 0 && round == ROUNDS - 1))
            rc = kvq__remote_say(call, KVQ_E_DAMAGED, "GET", keys->data,
                                 "the session's data is not there; push it again");
    }
    free(head);
    return rc;
}

int kvq_remote_pull_file(struct kvq_remote *remote, const char *space, const char *name,
                         const char *path, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .watch = watch, .text = text, .n = n};
    struct kvq_io *io = remote->io;
    struct session_keys keys;
    struct kvq_io_status status;
    bool ours = false;
    char *part = NULL, *folder = folder_of(path);
    int file = -1, rc = make_keys(&call, space, name, &keys);
    memset(moved, 0, sizeof *moved);
    if (rc != 0)
        goto out;
    if (asprintf(&part, "%s.part", path) < 0 || !folder) {
        rc = say_file(&call, path, "naming a file beside it", -ENOMEM);
        goto out;
    }
    (void)kvq_io_rename(io, path, part); // what an earlier call has made is checked again
    file = kvq_io_open(io, part, KVQ_IO_WRITE | KVQ_IO_CREATE);
    rc = file < 0 ? file : io->lock(io, file);
    if (rc < 0) {
        rc = say_file(&call, part, "opening it for this transfer alone", rc);
        goto out;
    }
    ours = true;
    rc = pull_newest(&call, &keys, part, file, moved);
    if (rc != 0)
        goto out;
    rc = kvq_io_rename(io, part, path);
    if (rc == 0)
        rc = kvq_io_sync_dir(io, folder);
    if (rc != 0)
        rc = say_file(&call, path, "giving it its name", rc);
out:
    if (rc != 0 && ours && kvq_io_status(io, file, &status) == 0 && status.bytes == 0)
        (void)kvq_io_unlink(io, part); // nothing in it to go on with
    if (file >= 0)
        io->close(io, file);
    free(part);
    free(folder);
    return rc;
}

// ---- Lists ----

// Keys below a session that are to be deleted, kept while the list is read.
struct doomed {
    char (*keys)[KVQ_REMOTE_KEY_BYTES];
    size_t count, room;
};

static int on_doomed(void *context, const struct kvq_remote_object *object)
{
    enum { MOST = 1000 }; // a session has two objects, and some that a push left behind
    struct doomed *d = context;
    if (d->count == MOST)
        return KVQ_E_LIMIT;
    if (d->count == d->room) {
        d->room = d->room ? 2 * d->room : 16;
        void *bigger = realloc(d->keys, d->room * sizeof *d->keys);
        if (!bigger)
            return KVQ_E_NO_MEMORY;
        d->keys = bigger;
    }
    memcpy(d->keys[d->count++], object->key, sizeof object->key);
    return 0;
}

int kvq_remote_forget(struct kvq_remote *remote, const char *space, const char *name, char *text,
                      size_t n)
{
    struct kvq__call call = {.remote = remote, .text = text, .n = n};
    struct session_keys keys;
    struct doomed d = {0};
    struct kvq_remote_object head;
    char start[KVQ_REMOTE_KEY_BYTES + 8];
    int rc = make_keys(&call, space, name, &keys);
    if (rc == 0)
        rc = kvq_remote_head(remote, keys.head, &head, text, n);
    if (rc == 0) // first, so that nobody pulls what is half there
        rc = kvq_remote_delete(remote, keys.head, text, n);
    if (rc != 0)
        return rc;
    snprintf(start, sizeof start, "%s/data/", keys.base);
    rc = kvq_remote_list(remote, start, "", on_doomed, &d, text, n);
    for (size_t i = 0; i < d.count; i++) {
        int gone = kvq_remote_delete(remote, d.keys[i], text, n);
        rc = rc == 0 ? gone : rc;
    }
    if (rc == 0)
        rc = kvq__remote_abort_uploads(&call, start);
    free(d.keys);
    return rc;
}

struct session_lister {
    int (*each)(void *context, const char *space, const char *name, uint64_t bytes);
    void *context;
    char base[KVQ_REMOTE_KEY_BYTES]; // SPACE/NAME/ of the object before
    uint64_t bytes; // of data below it so far: lists are sorted, it comes before head
};

static int on_session(void *context, const struct kvq_remote_object *object)
{
    struct session_lister *l = context;
    char space[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    const char *slash = strchr(object->key, '/'), *end = slash ? strchr(slash + 1, '/') : NULL;
    if (!end)
        return 0;
    size_t base = (size_t)(end + 1 - object->key);
    if (strlen(l->base) != base || memcmp(l->base, object->key, base) != 0) {
        memcpy(l->base, object->key, base);
        l->base[base] = '\0';
        l->bytes = 0;
    }
    if (strncmp(end, "/data/", strlen("/data/")) == 0)
        l->bytes += object->bytes < UINT64_MAX - l->bytes ? object->bytes : 0;
    if (strcmp(end, "/head") != 0 || !unescape(object->key, (size_t)(slash - object->key), space) ||
        !unescape(slash + 1, (size_t)(end - slash - 1), name))
        return 0;
    return l->each(l->context, space, name, l->bytes);
}

int kvq_remote_sessions(struct kvq_remote *remote, const char *space,
                        const struct kvq_remote_name *after,
                        int (*each)(void *context, const char *space, const char *name,
                                    uint64_t bytes),
                        void *context, char *text, size_t n)
{
    struct session_lister l = {.each = each, .context = context};
    char start[KVQ_REMOTE_KEY_BYTES] = "", behind[KVQ_REMOTE_KEY_BYTES + 8] = "";
    if (after) {
        int rc = kvq_remote_session_key(after->space, after->name, behind);
        if (rc != 0)
            return rc;
        size_t used = strlen(behind);
        snprintf(behind + used, sizeof behind - used, "/head"); // the last of its keys
    }
    if (space) {
        size_t used = escape(space, start, sizeof start / 2);
        if (used == 0)
            return KVQ_E_INVALID;
        start[used] = '/';
        start[used + 1] = '\0';
    }
    return kvq_remote_list(remote, start, behind, on_session, &l, text, n);
}
