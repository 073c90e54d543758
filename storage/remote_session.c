// SPDX-License-Identifier: Apache-2.0
//
// Sessions on the remote store: a file cut into chunks, each with its checksum. A pull fetches
// those that the file lacks; here are also the keys, the lists and removing. Pushing is in
// remote_push.c.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_internal.h"

enum { DAMAGED_TRIES = 3 }; // of a part whose bytes are not what they should be

// ---- Keys ----

static size_t escape_name(const char *name, char *out, size_t size)
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
    size_t n = escape_name(space, out, KVQ_REMOTE_KEY_BYTES / 2);
    if (n == 0)
        return KVQ_E_INVALID;
    out[n++] = '/';
    return escape_name(name, out + n, KVQ_REMOTE_KEY_BYTES / 2) ? 0 : KVQ_E_INVALID;
}

static int digit_value(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Undoes escape_name(). False: that is no name of ours.
static bool unescape_name(const char *from, size_t n, char out[KVQ_NAME_BYTES])
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

int kvq__session_keys_make(struct kvq__call *call, const char *space, const char *name,
                           struct kvq__session_keys *keys)
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

void kvq__session_name_data(struct kvq__session_keys *keys, const char *digest)
{
    assert(strlen(digest) == KVQ__SHA_HEX - 1);
    snprintf(keys->data, sizeof keys->data, "%.1023s/data/%.64s", keys->base, digest);
}

int kvq__session_get_head(struct kvq__call *call, const struct kvq__session_keys *keys, char **head,
                          size_t *n)
{
    void *data = NULL;
    int rc = kvq_remote_get(call->remote, keys->head, KVQ__INDEX_TEXT, &data, n, call->watch,
                            call->text, call->n);
    *head = data;
    return rc;
}

// ---- Files ----

int kvq__remote_say_file(struct kvq__call *call, const char *path, const char *what, int error)
{
    int code = kvq_io_is_full(error)   ? KVQ_E_NO_SPACE
               : error == -EWOULDBLOCK ? KVQ_E_BUSY
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

// ---- Pull ----

// Chunks that are being fetched, in one request.
struct fetch {
    const struct kvq__chunk *chunks;
    uint32_t n, tries;
    uint64_t at; // in the file
    struct kvq__range range;
    char key[sizeof((struct kvq__session_keys *)0)->data];
};

// A pull under way.
struct pull {
    struct kvq__call *call;
    struct kvq__session_keys *keys;
    const struct kvq__index *index;
    const char *path;
    int file;
    uint64_t had;           // bytes of the file before
    uint64_t most, next_at; // bytes of the longest chunk; where the next one goes
    uint32_t next;          // the first chunk that nobody has looked at yet
    uint8_t *buffer;        // for one chunk
    struct kvq_remote_moved *moved;
    struct fetch lanes[KVQ_REMOTE_CONNECTIONS];
};

static bool is_right(const void *bytes, const struct kvq__chunk *c)
{
    uint8_t sha[KVQ__SHA_BYTES];
    return kvq__sha256(bytes, (size_t)c->size, sha) == 0 && memcmp(sha, c->sha, sizeof sha) == 0;
}

// Whether a chunk is in the file already.
static bool chunk_is_there(struct pull *p, const struct kvq__chunk *c, uint64_t at)
{
    size_t got = 0;
    return at + c->size <= p->had &&
           kvq_io_read(p->call->remote->io, p->file, p->buffer, (size_t)c->size, at, &got) == 0 &&
           got == c->size && is_right(p->buffer, c);
}

static bool are_right(const uint8_t *bytes, const struct kvq__chunk *c, uint32_t n)
{
    bool right = true;
    for (uint32_t i = 0; i < n && right; bytes += c[i++].size)
        right = is_right(bytes, &c[i]);
    return right;
}

// How many chunks from the i-th on, which is missing, are fetched in one request.
static uint32_t count_together(struct pull *p, uint32_t i, uint64_t at)
{
    const struct kvq__chunk *c = &p->index->chunks[i];
    uint64_t bytes = c->size, most = p->call->remote->part_bytes;
    uint32_t n = 1;
    for (; i + n < p->index->n_chunks; n++) {
        const struct kvq__chunk *next = &c[n];
        if (next->pack != c->pack || next->at != c->at + bytes || bytes + next->size > most ||
            chunk_is_there(p, next, at + bytes))
            break;
        bytes += next->size;
    }
    return n;
}

static int make_room(struct pull *p)
{
    struct kvq_io *io = p->call->remote->io;
    struct kvq_io_status status = {0};
    uint64_t room = 0;
    int rc = kvq_io_status(io, p->file, &status);
    if (rc != 0)
        return kvq__remote_say_file(p->call, p->path, "looking at it", rc);
    p->had = status.bytes;
    char *folder = folder_of(p->path);
    if (folder && p->index->bytes > p->had && kvq_io_space(io, folder, &room) == 0 &&
        room < p->index->bytes - p->had)
        rc = kvq__remote_say_file(p->call, p->path, "making room for the session", -ENOSPC);
    free(folder);
    return rc;
}

// The next chunks that are missing, for kvq__requests: n of them that lie one behind the other in a
// pack, as they do in the file.
static int make_fetch(void *context, uint32_t lane, struct kvq__request *request)
{
    struct pull *p = context;
    struct fetch *f = &p->lanes[lane];
    const struct kvq__index *x = p->index;
    int rc = 0;
    while (rc == 0 && p->next < x->n_chunks && chunk_is_there(p, &x->chunks[p->next], p->next_at)) {
        p->next_at += x->chunks[p->next].size;
        p->call->done += x->chunks[p->next++].size;
        rc = kvq__remote_tell(p->call, 0);
    }
    if (rc != 0 || p->next == x->n_chunks)
        return rc ? rc : 1;
    const struct kvq__chunk *c = &x->chunks[p->next];
    assert(c->pack < x->n_packs);
    *f = (struct fetch){.chunks = c, .n = count_together(p, p->next, p->next_at), .at = p->next_at};
    f->range = (struct kvq__range){.key = f->key, .from = c->at, .all = x->packs[c->pack].bytes};
    f->range.n = c[f->n - 1].at + c[f->n - 1].size - c->at;
    kvq__session_name_data(p->keys, x->packs[c->pack].digest);
    snprintf(f->key, sizeof f->key, "%s", p->keys->data);
    p->next += f->n;
    p->next_at += f->range.n;
    *request = kvq__range_request(&f->range);
    return 0;
}

static int take_fetch(void *context, uint32_t lane, struct kvq__answer *answer)
{
    struct pull *p = context;
    struct fetch *f = &p->lanes[lane];
    struct kvq__call *call = p->call;
    int rc = kvq__range_check(call, &f->range, answer);
    if (rc == 0 && are_right((const uint8_t *)answer->body, f->chunks, f->n)) {
        rc = kvq_io_write(call->remote->io, p->file, answer->body, f->range.n, f->at);
        p->moved->transferred += f->range.n;
        call->done += f->range.n;
        return rc < 0 ? kvq__remote_say_file(call, p->path, "writing it", rc) : 0;
    }
    if (rc != 0 || ++f->tries < DAMAGED_TRIES)
        return rc ? rc : 1;
    return kvq__remote_say(call, KVQ_E_DAMAGED, "GET", f->key,
                           "bytes %" PRIu64 " to %" PRIu64 " have a wrong checksum, %d times; "
                           "send all of the session once more, where it is whole: kvqctl session "
                           "push NAME --again",
                           f->range.from, f->range.from + f->range.n - 1, DAMAGED_TRIES);
}

static int get_file(struct pull *p)
{
    struct kvq_remote *r = p->call->remote;
    struct kvq_io *io = r->io;
    struct kvq__requests all = {
        .context = p,
        .make = make_fetch,
        .take = take_fetch,
        .lanes = kvq__lanes_of(r, p->most > r->part_bytes ? p->most : r->part_bytes)};
    int rc = make_room(p);
    rc = rc ? rc : kvq__requests(p->call, &all);
    rc = rc ? rc : kvq__remote_tell(p->call, 0);
    if (rc != 0)
        return rc;
    assert(p->next_at == p->index->bytes && p->call->done == p->next_at);
    rc = kvq_io_truncate(io, p->file, p->index->bytes);
    if (rc == 0)
        rc = kvq_io_sync(io, p->file);
    return rc == 0 ? 0 : kvq__remote_say_file(p->call, p->path, "writing it", rc);
}

// Brings what a head names into PART, an open file's path.
static int pull_head(struct kvq__call *call, struct kvq__session_keys *keys, const char *head,
                     size_t n, const char *part, int file, struct kvq_remote_moved *moved)
{
    struct kvq__index index;
    const char *why = "";
    int rc = kvq__index_read(head, n, &index, &why);
    if (rc != 0)
        return kvq__remote_say(call, rc, "GET", keys->head, "%s", why);
    struct pull p = {
        .call = call, .keys = keys, .index = &index, .path = part, .file = file, .moved = moved};
    moved->bytes = call->all = index.bytes;
    call->done = 0;
    for (uint32_t i = 0; i < index.n_chunks; i++)
        p.most = index.chunks[i].size > p.most ? index.chunks[i].size : p.most;
    p.buffer = malloc((size_t)p.most + 1);
    rc = p.buffer ? get_file(&p)
                  : kvq__remote_say(call, KVQ_E_NO_MEMORY, "GET", keys->data, "no memory");
    free(p.buffer);
    kvq__index_free(&index);
    return rc;
}

// Brings the newest data into an open file, also if it is replaced meanwhile.
static int pull_newest(struct kvq__call *call, struct kvq__session_keys *keys, const char *part,
                       int file, struct kvq_remote_moved *moved)
{
    enum { ROUNDS = 3 };
    char *head = NULL, *newer = NULL;
    size_t n = 0, newer_n = 0;
    int rc = kvq__session_get_head(call, keys, &head, &n);
    for (int round = 0; rc == 0 && round < ROUNDS; round++) {
        rc = pull_head(call, keys, head, n, part, file, moved);
        if (rc != KVQ_E_NO_SESSION)
            break;
        // The data is not there. Somebody may have pushed again and removed it.
        rc = kvq__session_get_head(call, keys, &newer, &newer_n);
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
    struct kvq__session_keys keys;
    struct kvq_io_status status;
    bool ours = false;
    char *part = NULL, *folder = folder_of(path);
    int file = -1, rc = kvq__session_keys_make(&call, space, name, &keys);
    memset(moved, 0, sizeof *moved);
    if (rc != 0)
        goto out;
    if (asprintf(&part, "%s.part", path) < 0 || !folder) {
        rc = kvq__remote_say_file(&call, path, "naming a file beside it", -ENOMEM);
        goto out;
    }
    (void)kvq_io_rename(io, path, part); // what an earlier call has made is checked again
    file = kvq_io_open(io, part, KVQ_IO_WRITE | KVQ_IO_CREATE);
    rc = file < 0 ? file : kvq_io_lock(io, file);
    if (rc < 0) {
        rc = kvq__remote_say_file(&call, part, "opening it for this transfer alone", rc);
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
        rc = kvq__remote_say_file(&call, path, "giving it its name", rc);
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

int kvq__remote_doom(void *context, const struct kvq_remote_object *object)
{
    enum { MOST = 1000, FULL = 1 }; // a session has few objects, and some that pushes left behind
    struct kvq__doomed *d = context;
    if (d->count == MOST)
        return FULL;
    if (d->count == d->room) {
        size_t room = d->room ? 2 * d->room : 16;
        void *bigger = realloc(d->keys, room * sizeof *d->keys);
        if (!bigger)
            return KVQ_E_NO_MEMORY;
        d->keys = bigger;
        d->room = room;
    }
    memcpy(d->keys[d->count++], object->key, sizeof object->key);
    return 0;
}

void kvq__doomed_free(struct kvq__doomed *d)
{
    free(d->keys);
    *d = (struct kvq__doomed){0};
}

// Deletes them, and empties *d. 0 or the first failure.
static int delete_doomed(struct kvq__call *call, struct kvq__doomed *d)
{
    int rc = 0;
    for (size_t i = 0; i < d->count; i++) {
        int gone = kvq_remote_delete(call->remote, d->keys[i], call->text, call->n);
        rc = rc == 0 ? gone : rc;
    }
    kvq__doomed_free(d);
    return rc;
}

// Deletes all objects whose keys start so, and counts them: until a list is empty, so that nothing
// is left that came meanwhile.
static int delete_all(struct kvq__call *call, const char *start, size_t *deleted)
{
    enum { ROUNDS = 100 };
    for (int round = 0; round < ROUNDS; round++) {
        struct kvq__doomed d = {0};
        int rc =
            kvq_remote_list(call->remote, start, "", kvq__remote_doom, &d, call->text, call->n);
        size_t count = d.count;
        int gone = delete_doomed(call, &d);
        rc = rc < 0 ? rc : gone;
        *deleted += count;
        if (rc != 0 || count == 0)
            return rc;
    }
    return kvq__remote_say(call, KVQ_E_REMOTE, "DELETE", start,
                           "after %zu deletions the store still lists objects there; try again",
                           *deleted);
}

int kvq_remote_forget(struct kvq_remote *remote, const char *space, const char *name, char *text,
                      size_t n)
{
    struct kvq__call call = {.remote = remote, .text = text, .n = n};
    struct kvq__session_keys keys;
    struct kvq_remote_object head;
    char start[KVQ_REMOTE_KEY_BYTES + 8];
    size_t deleted = 0;
    int rc = kvq__session_keys_make(&call, space, name, &keys);
    if (rc == 0)
        rc = kvq_remote_head(remote, keys.head, &head, text, n);
    bool had = rc == 0; // if not, an earlier call may have come no further than that
    if (had)            // first, so that nobody pulls what is half there
        rc = kvq_remote_delete(remote, keys.head, text, n);
    if (rc != 0 && rc != KVQ_E_NO_SESSION)
        return rc;
    snprintf(start, sizeof start, "%s/data/", keys.base);
    rc = delete_all(&call, start, &deleted);
    if (rc == 0)
        rc = kvq__remote_abort_uploads(&call, start);
    if (rc == 0 && !had && deleted == 0)
        rc =
            kvq__remote_say(&call, KVQ_E_NO_SESSION, "HEAD", keys.head, "there is no such session");
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
    if (strcmp(end, "/head") != 0 ||
        !unescape_name(object->key, (size_t)(slash - object->key), space) ||
        !unescape_name(slash + 1, (size_t)(end - slash - 1), name))
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
        size_t used = escape_name(space, start, sizeof start / 2);
        if (used == 0)
            return KVQ_E_INVALID;
        start[used] = '/';
        start[used + 1] = '\0';
    }
    return kvq_remote_list(remote, start, behind, on_session, &l, text, n);
}
