// SPDX-License-Identifier: Apache-2.0
//
// Sessions between a store and the remote: export and push, pull and import.
//
// Files in between are named by what they hold, so that a later call finds what an earlier one has
// left: push-WHAT-VERSION.kvq and pull-WHAT.kvq. WHAT is of the namespace and name, VERSION of the
// store and of the saves of all shards.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_internal.h"
#include "storage/store.h"

enum { HEX_KEPT = 24 }; // digits of a SHA-256 that tell files apart

static int say(char *text, size_t n, int code, const char *path, const char *what, int error)
{
    if (n)
        snprintf(text, n, "%.300s: %s%s%s", path, what, error ? ": " : "",
                 error ? strerror(error) : "");
    return code;
}

static int name_hash(const char *space, const char *name, char out[KVQ__SHA_HEX], char *text,
                     size_t n)
{
    char both[KVQ_REMOTE_KEY_BYTES];
    uint8_t sha[KVQ__SHA_BYTES];
    int rc = kvq_remote_session_key(space, name, both);
    if (rc == 0)
        rc = kvq__sha256(both, strlen(both), sha);
    if (rc != 0)
        return say(text, n, rc, name, "no name for a session", 0);
    kvq__sha_hex(sha, out);
    out[HEX_KEPT] = '\0';
    return 0;
}

// What tells one save of a shard from any other: a store that was begun anew, or whose folder was
// put back from a copy, counts its sessions and saves as before.
struct save_mark {
    uint64_t id, save, tokens;
    int64_t saved_at;
    uint8_t meta[KVQ__SHA_BYTES]; // of the opaque bytes
};

static int mark_save(struct kvq_store *store, const struct kvq_store_session *session,
                     struct save_mark *mark, char *text, size_t n)
{
    void *meta = malloc(session->n_bytes + 1);
    *mark = (struct save_mark){session->id, session->save, session->tokens, session->saved_at, {0}};
    if (!meta)
        return say(text, n, KVQ_E_NO_MEMORY, session->name, "no memory to look at it", 0);
    int rc = kvq_store_meta_read(store, session, meta, text, n);
    rc = rc ? rc : kvq__sha256(meta, session->n_bytes, mark->meta);
    free(meta);
    return rc;
}

// A digest of the store and of the saves that all shards of a session are at.
static int saves_hash(struct kvq_store *store, const char *space, const char *name,
                      char out[KVQ__SHA_HEX], char *text, size_t n)
{
    struct {
        uint8_t store[KVQ_STORE_ID_BYTES];
        struct save_mark saves[KVQ_MAX_SHARDS];
    } all;
    uint8_t sha[KVQ__SHA_BYTES];
    uint32_t shards = 1;
    memset(&all, 0, sizeof all);
    kvq_store_id(store, all.store);
    for (uint32_t i = 0; i < shards; i++) {
        struct kvq_store_session session;
        int rc = kvq_store_find(store, space, name, i, &session, text, n);
        if (rc == 0)
            rc = mark_save(store, &session, &all.saves[i], text, n);
        if (rc != 0)
            return rc;
        shards = session.shards <= KVQ_MAX_SHARDS ? session.shards : KVQ_MAX_SHARDS;
    }
    int rc = kvq__sha256(&all, sizeof all, sha);
    kvq__sha_hex(sha, out);
    out[HEX_KEPT] = '\0';
    return rc;
}

static int make_folder(struct kvq_io *io, const char *folder, char *text, size_t n)
{
    int rc = kvq_io_make_dir(io, folder);
    return rc == 0 || rc == -EEXIST
               ? 0
               : say(text, n, KVQ_E_SYSTEM, folder, "making the folder for transfers", -rc);
}

static bool is_there(struct kvq_io *io, const char *path)
{
    int file = kvq_io_open(io, path, KVQ_IO_READ);
    if (file >= 0)
        io->close(io, file);
    return file >= 0;
}

// ---- Push ----

// Whoever looks on at the transfer looks on at the export before it, too, of which nothing counts.
static int tell_export(void *context, uint64_t done, uint64_t all)
{
    const struct kvq_remote_watch *w = context;
    (void)done;
    return w->tell ? w->tell(w->context, 0, all) : 0;
}

// Whether an earlier push has left its file, and every record of it is as it was written: what lay
// on the disk since then is not sent on trust. 0, KVQ_E_CANCELLED, or KVQ_E_NO_SESSION: export it.
static int look_for_export(struct kvq_io *io, struct kvq_store *store, const char *path,
                           const struct kvq_store_watch *watch, char *text, size_t n)
{
    struct kvq_store_file file;
    if (!is_there(io, path))
        return KVQ_E_NO_SESSION;
    int rc = kvq_store_look(store, path, watch, &file, text, n);
    free(file.opaque);
    return rc == 0 || rc == KVQ_E_CANCELLED ? rc : KVQ_E_NO_SESSION;
}

// Files of earlier saves of the same session.
struct stale {
    struct kvq_io *io;
    const char *folder, *start, *keep;
};

static int remove_stale(void *context, const char *name)
{
    const struct stale *s = context;
    char *path = NULL;
    if (strncmp(name, s->start, strlen(s->start)) == 0 && strcmp(name, s->keep) != 0 &&
        asprintf(&path, "%s/%s", s->folder, name) >= 0) {
        (void)kvq_io_unlink(s->io, path);
        free(path);
    }
    return 0;
}

int kvq_remote_push(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const char *space, const char *name, bool again,
                    const struct kvq_remote_watch *watch, struct kvq_remote_moved *moved,
                    char *text, size_t n)
{
    struct kvq_io *io = remote->io;
    char what[KVQ__SHA_HEX], version[KVQ__SHA_HEX], start[64], file[128];
    char *path = NULL;
    memset(moved, 0, sizeof *moved);
    int rc = name_hash(space, name, what, text, n);
    if (rc == 0)
        rc = saves_hash(store, space, name, version, text, n);
    if (rc == 0)
        rc = make_folder(io, folder, text, n);
    if (rc != 0)
        return rc;
    snprintf(start, sizeof start, "push-%.*s-", HEX_KEPT, what);
    snprintf(file, sizeof file, "%s%.*s.kvq", start, HEX_KEPT, version);
    if (asprintf(&path, "%s/%s", folder, file) < 0)
        return say(text, n, KVQ_E_NO_MEMORY, folder, "no memory for a name in it", 0);
    struct stale stale = {io, folder, start, file};
    (void)io->list(io, folder, remove_stale, &stale);
    struct kvq_remote_watch looks_on = watch ? *watch : remote->watch;
    const struct kvq_store_watch on_export = {tell_export, &looks_on};
    rc = look_for_export(io, store, path, &on_export, text, n);
    if (rc == KVQ_E_NO_SESSION)
        rc = kvq_store_export_watched(store, space, name, path, true, &on_export, text, n);
    if (rc == 0)
        rc = kvq_remote_push_file(remote, path, space, name, again, watch, moved, text, n);
    if (rc == 0 || rc == KVQ_E_DAMAGED)
        (void)kvq_io_unlink(io, path);
    free(path);
    return rc;
}

// ---- Pull ----

// Before anything is transferred. The import looks again.
static int check_absent(struct kvq_store *store, const struct kvq_remote_pull *what, char *text,
                        size_t n)
{
    const char *space = what->as_space ? what->as_space : what->space;
    const char *name = what->as_name ? what->as_name : what->name;
    struct kvq_store_session session;
    if (what->replace || kvq_store_find(store, space, name, 0, &session, NULL, 0) != 0)
        return 0;
    if (n)
        snprintf(text, n,
                 "the store has a session \"%.120s\" in \"%.120s\" already: delete it, "
                 "replace it, or pull under another name",
                 name, space);
    return KVQ_E_EXISTS;
}

int kvq_remote_fetch(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                     const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                     struct kvq_remote_moved *moved, char **path, char *text, size_t n)
{
    char hash[KVQ__SHA_HEX];
    memset(moved, 0, sizeof *moved);
    *path = NULL;
    int rc = check_absent(store, what, text, n);
    if (rc == 0)
        rc = name_hash(what->space, what->name, hash, text, n);
    if (rc == 0)
        rc = make_folder(remote->io, folder, text, n);
    if (rc != 0)
        return rc;
    if (asprintf(path, "%s/pull-%.*s.kvq", folder, HEX_KEPT, hash) < 0) {
        *path = NULL;
        return say(text, n, KVQ_E_NO_MEMORY, folder, "no memory for a name in it", 0);
    }
    return kvq_remote_pull_file(remote, what->space, what->name, *path, watch, moved, text, n);
}

// Whether an import that ended so needs its file no more: it is done, or cannot go better with that
// file. One that a limit refuses would take from the disk what its namespace may not have. After
// other failures (no memory, no descriptors, somebody has that name meanwhile) the next pull need
// not begin anew.
static bool has_had_its_use(int rc)
{
    assert(rc <= 0);
    switch (rc) {
    case KVQ_OK:
    case KVQ_E_DAMAGED:
    case KVQ_E_INVALID:
    case KVQ_E_VERSION:
    case KVQ_E_LIMIT:
    case KVQ_E_QUOTA:
        return true;
    default:
        return false;
    }
}

int kvq_remote_take(struct kvq_store *store, const struct kvq_remote_pull *what, const char *path,
                    const struct kvq_remote_watch *watch, char *text, size_t n)
{
    struct kvq_store_watch import = {0};
    if (watch)
        import = (struct kvq_store_watch){watch->tell, watch->context};
    const char *space = what->as_space ? what->as_space : what->space;
    const char *name = what->as_name ? what->as_name : what->name;
    int rc = kvq_store_import_watched(store, path, space, name, what->replace,
                                      watch ? &import : NULL, text, n);
    if (has_had_its_use(rc))
        (void)kvq_io_unlink(kvq_io_posix(), path);
    return rc;
}

int kvq_remote_pull(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                    struct kvq_remote_moved *moved, char *text, size_t n)
{
    char *path = NULL;
    int rc = kvq_remote_fetch(remote, store, folder, what, watch, moved, &path, text, n);
    if (rc == 0)
        rc = kvq_remote_take(store, what, path, NULL, text, n);
    free(path);
    return rc;
}
