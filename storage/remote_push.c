// SPDX-License-Identifier: Apache-2.0
//
// Pushing a session: its file is cut into chunks, and those that are not there go as one pack.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "storage/remote_internal.h"

// ---- The file ----

// Cuts an open file into chunks. The buffer has room for two of the longest: what is left of one
// read and moved to the front is shorter than what the next one brings.
static int cut_file(struct kvq__call *call, const char *path, int file, uint64_t bytes,
                    struct kvq__index *index)
{
    struct kvq_io *io = call->remote->io;
    uint64_t about = kvq__chunk_about(bytes, call->remote->part_bytes), at = 0; // of the buffer
    size_t longest = kvq__chunk_most(about), room = 2 * longest, had = 0, used = 0;
    uint8_t *buffer = malloc(room);
    int rc = buffer ? 0 : -ENOMEM;
    while (rc == 0 && at + used < bytes) {
        assert(used <= had && had <= room);
        if (had - used < longest && at + had < bytes) { // the longest chunk may not fit
            size_t got = 0, left = had - used;
            size_t most = room - left < bytes - at - had ? room - left : (size_t)(bytes - at - had);
            memmove(buffer, buffer + used, left);
            at += used;
            used = 0;
            had = left;
            rc = kvq_io_read(io, file, buffer + had, most, at + had, &got);
            rc = rc == 0 && got != most ? -EIO : rc;
            had += got;
            continue;
        }
        size_t n = kvq__chunk_end(buffer + used, had - used, about);
        if (kvq__index_add(index, buffer + used, n) != 0)
            rc = -ENOMEM;
        used += n;
        if (rc == 0 && kvq__remote_tell(call, 0) != 0) {
            free(buffer);
            return KVQ_E_CANCELLED;
        }
    }
    free(buffer);
    assert(rc || index->bytes == bytes);
    return rc ? kvq__remote_say_file(call, path, "reading it", rc) : 0;
}

// ---- Push ----

// A push under way.
struct push {
    struct kvq__call *call;
    struct kvq__session_keys *keys;
    const char *path;
    bool again;              // all of it is sent, whatever is there
    struct kvq__index index; // of the file
    struct kvq__source fresh;
    struct kvq__parts parts; // of that
    uint64_t fresh_bytes;
    char *old; // the head that is there; NULL: there is none
    size_t old_bytes;
    char *head; // the new one
    size_t head_bytes;
    struct kvq_remote_moved *moved;
};

static int add_stretch(struct kvq__source *source, const struct kvq__chunk *c, uint64_t from)
{
    struct kvq__stretch *last = source->n ? &source->stretches[source->n - 1] : NULL;
    if (last && last->from + last->bytes == from) {
        assert(c->at == last->at + last->bytes); // as in the file
        last->bytes += c->size;
        return 0;
    }
    if (source->n == source->room) {
        uint32_t room = source->room ? 2 * source->room : 64;
        void *more = realloc(source->stretches, room * sizeof *source->stretches);
        if (!more)
            return -ENOMEM;
        source->stretches = more;
        source->room = room;
    }
    source->stretches[source->n++] = (struct kvq__stretch){c->at, from, c->size};
    return 0;
}

// The new pack: its stretches, its parts with their checksums, and its digest.
static int make_pack(struct push *p)
{
    struct kvq__index *x = &p->index;
    struct kvq__call *call = p->call;
    uint8_t *buffer = NULL, sha[KVQ__SHA_BYTES];
    uint64_t from = 0;
    bool cancelled = false;
    assert(x->n_packs > 0 && x->packs[x->n_packs - 1].bytes == p->fresh_bytes);
    int rc = kvq__parts_make(&p->parts, p->fresh_bytes, call->remote->part_bytes) ? -ENOMEM : 0;
    for (uint32_t i = 0; i < x->n_chunks && rc == 0; from += x->chunks[i++].size)
        if (x->chunks[i].pack == x->n_packs - 1)
            rc = add_stretch(&p->fresh, &x->chunks[i], from);
    buffer = rc ? NULL : malloc(kvq__part_size(&p->parts, 0));
    rc = rc || buffer ? rc : -ENOMEM;
    for (uint32_t i = 0; i < p->parts.count && rc == 0 && !cancelled; i++) {
        size_t size = kvq__part_size(&p->parts, i);
        cancelled = kvq__remote_tell(call, 0) != 0;
        rc = kvq__source_read(call->remote->io, &p->fresh, buffer, size, i * p->parts.part_bytes);
        if (rc == 0 && kvq__sha256(buffer, size, p->parts.sha[i]) != 0)
            rc = -ENOSYS;
    }
    free(buffer);
    if (rc == 0 && kvq__sha256(p->parts.sha, p->parts.count * sizeof *p->parts.sha, sha) != 0)
        rc = -ENOSYS;
    if (rc)
        return kvq__remote_say_file(call, p->path, "reading what is new of it", rc);
    if (cancelled)
        return KVQ_E_CANCELLED;
    kvq__sha_hex(sha, x->packs[x->n_packs - 1].digest);
    return 0;
}

// Whether the store has the pack as a whole, by its length: the store tells that without sending
// the pack, and nothing of its bytes. 0, KVQ_E_NO_SESSION, or a code with a sentence.
static int look_for_pack(struct push *p, const struct kvq__pack *pack)
{
    struct kvq_remote_object there;
    kvq__session_name_data(p->keys, pack->digest);
    int rc = kvq_remote_head(p->call->remote, p->keys->data, &there, p->call->text, p->call->n);
    return rc == 0 && there.bytes != pack->bytes ? KVQ_E_NO_SESSION : rc;
}

// Packs that were there before.
static int look_for_packs(struct push *p)
{
    int rc = 0;
    assert(p->fresh_bytes == 0 || p->index.n_packs > 0);
    uint32_t old = p->index.n_packs - (p->fresh_bytes > 0);
    for (uint32_t i = 0; i < old && rc == 0; i++)
        rc = look_for_pack(p, &p->index.packs[i]);
    return rc;
}

// What is new compared with what the head that is there names, if that can be had.
static int plan_push(struct push *p, bool anew)
{
    struct kvq__index had = {0};
    const char *why;
    int rc = anew || !p->old ? 0 : kvq__index_read(p->old, p->old_bytes, &had, &why);
    if (rc != KVQ_E_NO_MEMORY) // a head that cannot be read names nothing that could be used again
        rc = kvq__index_place(&p->index, had.n_packs ? &had : NULL, &p->fresh_bytes);
    kvq__index_free(&had);
    rc = rc ? kvq__remote_say(p->call, rc, "PUT", p->keys->head, "no memory") : look_for_packs(p);
    if (rc == KVQ_E_NO_SESSION && !anew) // somebody has removed a pack
        return plan_push(p, true);
    return rc;
}

static bool has_pack(const struct kvq__index *x, const char *digest)
{
    for (uint32_t i = 0; i < x->n_packs; i++)
        if (strcmp(x->packs[i].digest, digest) == 0)
            return true;
    return false;
}

// Whether the head that is there still is the one that was put: if another push has put one since,
// that head names what the other push needs.
static bool is_head_ours(struct push *p, struct kvq__call *quiet)
{
    char *there = NULL;
    size_t n = 0;
    bool ours = kvq__session_get_head(quiet, p->keys, &there, &n) == 0 && n == p->head_bytes &&
                memcmp(there, p->head, n) == 0;
    free(there);
    return ours;
}

// What a push looks for below data/ once its head is there.
struct needless {
    const struct push *push;
    const char *start; // of the keys
    struct kvq__index had;
    int64_t before; // when a pack that no head names has had time enough to be named
    struct kvq__doomed doomed;
};

static int on_pack(void *context, const struct kvq_remote_object *object)
{
    struct needless *l = context;
    const char *digest = object->key + strlen(l->start);
    bool left = object->modified > 0 && object->modified < l->before;
    bool goes = !has_pack(&l->push->index, digest) && (left || has_pack(&l->had, digest));
    return goes ? kvq__remote_doom(&l->doomed, object) : 0;
}

// Deletes the packs one by one, for as long as the head is ours: another push, which has planned
// with packs of the old head, may put its own head at any time. Returns whether it still is ours.
static bool delete_needless(struct push *p, struct kvq__call *quiet, struct kvq__doomed *d)
{
    bool ours = true;
    for (size_t i = 0; i < d->count && ours; i++) {
        ours = is_head_ours(p, quiet);
        if (ours)
            (void)kvq_remote_delete(quiet->remote, d->keys[i], NULL, 0);
    }
    kvq__doomed_free(d);
    return ours;
}

// Once the new head is there: the packs that only the old one named, and those that pushes have
// left which ended before their heads. That it fails costs space, and no more.
static void remove_old(struct push *p)
{
    enum { LEFT_SECONDS = 24 * 3600 };
    const char *why;
    char start[KVQ_REMOTE_KEY_BYTES + 8];
    struct kvq__call quiet = {.remote = p->call->remote};
    struct needless l = {.push = p, .start = start, .before = time(NULL) - LEFT_SECONDS};
    if (!is_head_ours(p, &quiet))
        return;
    snprintf(start, sizeof start, "%s/data/", p->keys->base);
    if (p->old)
        (void)kvq__index_read(p->old, p->old_bytes, &l.had, &why);
    (void)kvq_remote_list(quiet.remote, start, "", on_pack, &l, NULL, 0);
    if (delete_needless(p, &quiet, &l.doomed))
        (void)kvq__remote_abort_uploads(&quiet, start);
    kvq__index_free(&l.had);
}

static int send_pack(struct push *p)
{
    struct kvq__call *call = p->call;
    assert(p->fresh_bytes <= p->index.bytes);
    call->done = p->index.bytes - p->fresh_bytes;
    if (p->fresh_bytes == 0)
        return 0;
    int rc = make_pack(p);
    if (rc != 0)
        return rc;
    const struct kvq__pack *pack = &p->index.packs[p->index.n_packs - 1];
    kvq__session_name_data(p->keys, pack->digest);
    rc = p->again ? KVQ_E_NO_SESSION : look_for_pack(p, pack);
    return rc == KVQ_E_NO_SESSION ? kvq__remote_upload(call, p->keys->data, &p->fresh, &p->parts,
                                                       p->again, &p->moved->transferred)
                                  : rc;
}

// Whether a pull could read it: what cannot be pulled is not to look as if it had been pushed.
static int check_head(struct push *p, const char *head, size_t bytes)
{
    struct kvq__index again;
    const char *why = "";
    int rc = bytes > KVQ__INDEX_TEXT ? KVQ_E_LIMIT : kvq__index_read(head, bytes, &again, &why);
    if (rc == 0)
        kvq__index_free(&again);
    if (rc == 0 || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_SYSTEM)
        return rc == 0 ? 0 : kvq__remote_say(p->call, rc, "PUT", p->keys->head, "%s", why);
    return kvq__remote_say(p->call, KVQ_E_LIMIT, "PUT", p->keys->head,
                           "the session's file of %" PRIu64 " bytes has %" PRIu32
                           " chunks, and its head would have %zu bytes; a head has at most %d "
                           "chunks and %d bytes: export the session instead",
                           p->index.bytes, p->index.n_chunks, bytes, KVQ__INDEX_CHUNKS,
                           KVQ__INDEX_TEXT);
}

static int send_head(struct push *p)
{
    int rc = kvq__index_write(&p->index, &p->head, &p->head_bytes);
    if (rc != 0)
        return kvq__remote_say(p->call, rc, "PUT", p->keys->head, "no memory");
    rc = check_head(p, p->head, p->head_bytes);
    bool same =
        p->old && p->old_bytes == p->head_bytes && memcmp(p->old, p->head, p->head_bytes) == 0;
    return rc != 0 || same ? rc
                           : kvq_remote_put(p->call->remote, p->keys->head, p->head, p->head_bytes,
                                            NULL, p->call->text, p->call->n);
}

static void push_clear(struct push *p)
{
    free(p->fresh.stretches);
    p->fresh = (struct kvq__source){.file = p->fresh.file};
    kvq__parts_free(&p->parts);
    free(p->head);
    p->head = NULL;
}

static int push_once(struct push *p, bool anew)
{
    assert(p->fresh.n == 0 && !p->parts.sha);
    int rc = plan_push(p, anew);
    rc = rc ? rc : send_pack(p);
    rc = rc ? rc : send_head(p);
    if (rc == 0)
        rc = look_for_packs(p); // another push may have removed one meanwhile
    if (rc == 0)
        remove_old(p);
    push_clear(p);
    return rc;
}

// The head that is there, if there is one. One that is too long for any is replaced, as is one that
// makes no sense; but who cannot be asked may have one, whose packs nobody would remove.
static int get_old_head(struct push *p)
{
    struct kvq_remote_object there;
    int rc = kvq__session_get_head(p->call, p->keys, &p->old, &p->old_bytes);
    bool too_long = rc == KVQ_E_REMOTE &&
                    kvq_remote_head(p->call->remote, p->keys->head, &there, NULL, 0) == 0 &&
                    there.bytes > KVQ__INDEX_TEXT;
    return rc == KVQ_E_NO_SESSION || too_long ? 0 : rc;
}

static int push_file(struct push *p)
{
    int rc = get_old_head(p);
    rc = rc ? rc : push_once(p, p->again);
    if (rc == KVQ_E_NO_SESSION)
        rc = push_once(p, true);
    if (rc == KVQ_E_NO_SESSION) // which is what the session's absence here would be
        rc = kvq__remote_say(p->call, KVQ_E_REMOTE, "PUT", p->keys->head,
                             "its packs were removed while it was pushed, twice; push it again");
    return rc;
}

int kvq_remote_push_file(struct kvq_remote *remote, const char *path, const char *space,
                         const char *name, bool again, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .watch = watch, .text = text, .n = n};
    struct kvq__session_keys keys;
    struct push p = {.call = &call, .keys = &keys, .path = path, .again = again, .moved = moved};
    struct kvq_io_status status = {0};
    memset(moved, 0, sizeof *moved);
    int rc = kvq__session_keys_make(&call, space, name, &keys);
    if (rc != 0)
        return rc;
    int file = kvq_io_open(remote->io, path, KVQ_IO_READ);
    if (file < 0)
        return kvq__remote_say_file(&call, path, "opening it", file);
    p.fresh.file = file;
    rc = kvq_io_status(remote->io, file, &status);
    if (rc != 0 || status.bytes == 0) {
        rc = kvq__remote_say_file(&call, path, rc ? "looking at it" : "it is empty",
                                  rc ? rc : -EINVAL);
        goto out;
    }
    moved->bytes = call.all = status.bytes;
    rc = cut_file(&call, path, file, status.bytes, &p.index);
    rc = rc ? rc : push_file(&p);
out:
    kvq__index_free(&p.index);
    free(p.old);
    remote->io->close(remote->io, file);
    return rc;
}
