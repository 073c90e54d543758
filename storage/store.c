// SPDX-License-Identifier: Apache-2.0
//
// Opening and closing a store, and what all its parts use: names, complaints, who writes.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/ring.h"
#include "proto/status.h"
#include "storage/store_internal.h"

// ---- Names ----

void kvq__path(const struct kvq_store *s, const char *name, char path[KVQ__PATH_BYTES])
{
    snprintf(path, KVQ__PATH_BYTES, "%s/%s", s->folder, name);
}

void kvq__segment_name(uint64_t number, char name[KVQ__NAME_BYTES])
{
    snprintf(name, KVQ__NAME_BYTES, "segment-%016llx.kvqs", (unsigned long long)number);
}

uint64_t kvq__segment_number(const char *name)
{
    unsigned long long number = 0;
    char back[KVQ__NAME_BYTES];
    if (sscanf(name, "segment-%16llx.kvqs", &number) != 1) // NOLINT(cert-err34-c): checked below
        return 0;
    kvq__segment_name(number, back);
    return strcmp(name, back) == 0 && number < KVQ_MAX_STORE_NUMBER ? number : 0;
}

// ---- Complaints ----

int kvq__io_complain(const struct kvq__complaint *c, int error, const char *name, const char *verb)
{
    assert(error < 0);
    switch (-error) {
    case ENOSPC:
    case EDQUOT:
        return kvq__complain(c, KVQ_E_NO_SPACE,
                             "%s cannot be %s, the disk is full (%s): free some of it", name, verb,
                             strerror(-error));
    case EROFS:
        return kvq__complain(c, KVQ_E_READ_ONLY, "%s cannot be %s: %s", name, verb,
                             strerror(-error));
    case EACCES:
    case EPERM:
        return kvq__complain(c, KVQ_E_SYSTEM, // not KVQ_E_PERMISSION: it is not who asked
                             "%s cannot be %s: %s; give the daemon's user the right to read and "
                             "write there",
                             name, verb, strerror(-error));
    default:
        return kvq__complain(c, KVQ_E_SYSTEM, "%s cannot be %s: %s", name, verb, strerror(-error));
    }
}

int kvq__catalog_complain(struct kvq_store *s, int code, const struct kvq__complaint *c)
{
    assert(code < 0);
    if (code == KVQ_E_DAMAGED)
        kvq__catalog_doubt(s);
    return kvq__complain(c, code, "the catalog: %s", s->catalog.error);
}

void kvq__catalog_doubt(struct kvq_store *s)
{
    kvq_word_store(&s->doubted, 1);
    kvq__closed_forget(s);
}

// ---- Who writes ----

int kvq__write_begin(struct kvq_store *s, const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    pthread_mutex_lock(&s->lock);
    if (s->read_only)
        rc = kvq__complain(c, KVQ_E_READ_ONLY, "is read-only until it is opened again: %s", s->why);
    else if (s->writing)
        rc = kvq__complain(c, KVQ_E_BUSY, "somebody else writes to it; try again later");
    else
        s->writing = true;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void kvq__write_end(struct kvq_store *s)
{
    pthread_mutex_lock(&s->lock);
    assert(s->writing);
    s->writing = false;
    pthread_mutex_unlock(&s->lock);
}

void kvq__set_read_only(struct kvq_store *s, const char *why)
{
    assert(*why);
    pthread_mutex_lock(&s->lock);
    if (!s->read_only)
        snprintf(s->why, sizeof s->why, "%s", why);
    s->read_only = true;
    pthread_mutex_unlock(&s->lock);
}

// ---- Opening ----

// Compacting copies a segment before it frees it, so one must be small against the cap.
static uint64_t default_segment(uint64_t cap)
{
    uint64_t most = 1ull << 30, part = cap / 8 / KVQ_IO_PAGE * KVQ_IO_PAGE;
    return cap && part < most ? part : most;
}

static int take_options(struct kvq_store *s, const char *folder,
                        const struct kvq_store_options *options, const struct kvq__complaint *c)
{
    s->io = options->io ? options->io : kvq_io_posix();
    s->cap_bytes = options->cap_bytes;
    s->segment_bytes =
        options->segment_bytes ? options->segment_bytes : default_segment(s->cap_bytes);
    s->buffer_bytes = options->buffer_bytes ? options->buffer_bytes : 4u << 20;
    size_t n = strlen(folder);
    if (n == 0 || n >= sizeof s->folder)
        return kvq__complain(c, KVQ_E_LIMIT, "the path has %zu bytes; 1 to %zu are allowed", n,
                             sizeof s->folder - 1);
    memcpy(s->folder, folder, n + 1);
    if (s->cap_bytes && s->cap_bytes < KVQ_STORE_MIN_CAP)
        return kvq__complain(c, KVQ_E_INVALID, "a cap of %llu bytes: give at least %d",
                             (unsigned long long)s->cap_bytes, KVQ_STORE_MIN_CAP);
    if (s->segment_bytes % KVQ_IO_PAGE || s->segment_bytes < 4 * KVQ_IO_PAGE)
        return kvq__complain(c, KVQ_E_INVALID,
                             "segments of %llu bytes: give a multiple of %d, at least %d",
                             (unsigned long long)s->segment_bytes, KVQ_IO_PAGE, 4 * KVQ_IO_PAGE);
    if (s->buffer_bytes % KVQ_IO_PAGE)
        return kvq__complain(c, KVQ_E_INVALID, "a buffer of %u bytes: give a multiple of %d",
                             s->buffer_bytes, KVQ_IO_PAGE);
    return KVQ_OK;
}

// Who holds the lock wrote its process id into it.
static int complain_locked(struct kvq_store *s, const struct kvq__complaint *c)
{
    char pid[24] = "";
    size_t got;
    if (kvq_io_read(s->io, s->lock_file, pid, sizeof pid - 1, 0, &got))
        pid[0] = '\0';
    pid[strspn(pid, "0123456789")] = '\0';
    return kvq__complain(c, KVQ_E_BUSY, "another process has it open%s%s", pid[0] ? ", pid " : "",
                         pid);
}

static int is_of_store(void *context, const char *name)
{
    (void)context;
    return strcmp(name, "catalog.db") == 0 || kvq__segment_number(name) != 0;
}

// A name that somebody has mistyped must not become an empty store that is all good.
static int check_existing(struct kvq_store *s, const struct kvq__complaint *c)
{
    int found = s->io->list(s->io, s->folder, is_of_store, NULL);
    assert(s->lock_file < 0);
    if (found == 0 || found == -ENOENT || found == -ENOTDIR)
        return kvq__complain(c, KVQ_E_INVALID,
                             "no store is there: %s; give the storage_dir of a daemon, or a copy "
                             "of it",
                             found == 0         ? "the folder has neither catalog.db nor a segment"
                             : found == -ENOENT ? "there is no such folder"
                                                : "it is no folder");
    return found < 0 ? kvq__io_complain(c, found, "the folder", "listed") : KVQ_OK;
}

static int make_store_folder(struct kvq_store *s, const struct kvq__complaint *c)
{
    int rc = kvq_io_make_dir(s->io, s->folder);
    if (rc && rc != -EEXIST)
        return kvq__io_complain(c, rc, "the folder", "made");
    if (rc == 0) // else all of it may be gone after a loss of power
        rc = kvq_io_sync_parent(s->io, s->folder);
    if (rc && rc != -EEXIST)
        return kvq__io_complain(c, rc, "the folder above it", "synced");
    return KVQ_OK;
}

static int lock_folder(struct kvq_store *s, const struct kvq__complaint *c)
{
    char path[KVQ__PATH_BYTES], pid[24];
    kvq__path(s, "lock", path);
    s->lock_file = kvq_io_open(s->io, path, KVQ_IO_WRITE | KVQ_IO_CREATE);
    if (s->lock_file == -EROFS) { // others may have it open where it can be written
        s->lock_file = kvq_io_open(s->io, path, KVQ_IO_READ);
        kvq__set_read_only(s, "its file system is read-only");
        if (s->lock_file == -ENOENT) // a copy, which nobody has ever opened
            return KVQ_OK;
    }
    if (s->lock_file < 0)
        return kvq__io_complain(c, s->lock_file, "lock", "opened");
    int rc = kvq_io_lock(s->io, s->lock_file);
    if (rc == -EWOULDBLOCK)
        return complain_locked(s, c);
    if (rc || s->read_only)
        return rc ? kvq__io_complain(c, rc, "lock", "taken") : KVQ_OK;
    int n = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
    rc = kvq_io_truncate(s->io, s->lock_file, 0);
    if (rc == 0)
        rc = kvq_io_write(s->io, s->lock_file, pid, (size_t)n, 0);
    if (kvq_io_is_full(rc)) // only who is refused would want to read it
        rc = 0;
    return rc ? kvq__io_complain(c, rc, "lock", "written") : KVQ_OK;
}

int kvq_store_open(const char *folder, const struct kvq_store_options *options,
                   struct kvq_store **store, struct kvq_store_report *report, char *text, size_t n)
{
    const struct kvq__complaint c = {folder, text, n};
    struct kvq_store_report unasked;
    report = report ? report : &unasked;
    memset(report, 0, sizeof *report);
    *store = NULL;
    struct kvq_store *s = calloc(1, sizeof *s);
    if (!s)
        return kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory to open it");
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->catalog_lock, NULL);
    s->lock_file = s->writer.file = -1;
    s->names_unsynced = true;
    int rc = take_options(s, folder, options, &c);
    if (rc == KVQ_OK)
        rc = options->existing_only ? check_existing(s, &c) : make_store_folder(s, &c);
    if (rc == KVQ_OK)
        rc = lock_folder(s, &c);
    if (rc == KVQ_OK)
        rc = kvq__writer_make(s, &c);
    if (rc == KVQ_OK)
        rc = kvq__recover(s, report, &c);
    if (rc)
        kvq_store_close(&s);
    *store = s;
    return rc;
}

void kvq_store_id(const struct kvq_store *store, uint8_t id[KVQ_STORE_ID_BYTES])
{
    memcpy(id, store->id, KVQ_STORE_ID_BYTES);
}

void kvq_store_close(struct kvq_store **store)
{
    struct kvq_store *s = store ? *store : NULL;
    if (!s)
        return;
    if (s->writing) // a save that nobody will end any more
        kvq__writer_undo(s);
    kvq__writer_free(s);
    kvq__catalog_close(&s->catalog);
    if (s->sound && !s->read_only && !kvq_word_load(&s->doubted))
        kvq__closed_note(s);
    kvq__segments_free(s);
    if (s->lock_file >= 0)
        s->io->close(s->io, s->lock_file);
    pthread_mutex_destroy(&s->catalog_lock);
    pthread_mutex_destroy(&s->lock);
    free(s->owed);
    free(s->limits);
    free(s);
    *store = NULL;
}
