// SPDX-License-Identifier: Apache-2.0
//
// See codebooks.h.
#include "daemon/store/codebooks.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "proto/limits.h"
#include "proto/status.h"
#include "storage/codebook.h"

enum { TEXT = KVQ_TEXT_BYTES / 2, PATH_BYTES = 512 };

// A codebook; or, in the list of failures, why there is none, for those who wanted it.
struct entry {
    TAILQ_ENTRY(entry) link;
    char name[KVQ_FORMAT_NAME];
    struct kvq_codebook *book; // NULL: a failure
    uint64_t number;           // never used again
    uint64_t refs;             // layers of sessions, opens and replies under way
    int error;
    char text[TEXT];
};
TAILQ_HEAD(entries, entry);

struct kvq__codebooks {
    char folder[PATH_BYTES];
    pthread_mutex_t lock; // of what follows
    uint32_t n;
    uint64_t last_number;
    struct entries entries;  // last used first
    struct entries failures; // newest first
};

struct kvq__codebooks *kvq__codebooks_new(const char *folder)
{
    struct kvq__codebooks *books = calloc(1, sizeof *books);
    if (!books)
        return NULL;
    snprintf(books->folder, sizeof books->folder, "%s", folder);
    pthread_mutex_init(&books->lock, NULL);
    TAILQ_INIT(&books->entries);
    TAILQ_INIT(&books->failures);
    return books;
}

static void entry_free(struct entry *e)
{
    if (!e)
        return;
    assert(e->refs == 0);
    kvq_codebook_close(&e->book);
    free(e);
}

static void list_free(struct entries *list)
{
    struct entry *e;
    while ((e = TAILQ_FIRST(list))) {
        TAILQ_REMOVE(list, e, link);
        entry_free(e);
    }
}

void kvq__codebooks_free(struct kvq__codebooks **pointer)
{
    struct kvq__codebooks *books = *pointer;
    *pointer = NULL;
    if (!books)
        return;
    list_free(&books->entries);
    list_free(&books->failures);
    pthread_mutex_destroy(&books->lock);
    free(books);
}

static struct entry *find_loaded(struct entries *list, const char *name)
{
    struct entry *e;
    TAILQ_FOREACH (e, list, link)
        if (strcmp(e->name, name) == 0)
            return e;
    return NULL;
}

// ---- Reading ----

// Names come from clients and become file names.
static bool is_plain(const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strspn(name, allowed);
    return n > 0 && name[n] == '\0' && name[0] != '.' && n < KVQ_FORMAT_NAME;
}

// With the lock held: the one that nobody has used for longest, taken out. NULL if all are in use.
static struct entry *take_unused(struct kvq__codebooks *books)
{
    struct entry *e;
    TAILQ_FOREACH_REVERSE(e, &books->entries, entries, link)
    if (e->refs == 0)
        break;
    if (!e)
        return NULL;
    TAILQ_REMOVE(&books->entries, e, link);
    books->n--;
    return e;
}

// Without the lock.
static int read_file(const struct kvq__codebooks *books, struct entry *e)
{
    char path[PATH_BYTES + KVQ_FORMAT_NAME + 16];
    snprintf(path, sizeof path, "%s/%s.kvqbook", books->folder, e->name);
    int rc = kvq_codebook_open(path, &e->book, e->text, TEXT);
    assert((rc == 0) == (e->book != NULL));
    return rc;
}

// With the lock held: the entry becomes a failure.
static void note_failure(struct kvq__codebooks *books, struct entry *e, int error)
{
    assert(!e->book && error < 0);
    e->error = error;
    TAILQ_INSERT_HEAD(&books->failures, e, link);
}

static void note_no_room(struct kvq__codebooks *books, struct entry *e)
{
    snprintf(e->text, TEXT,
             "codebook %s: sessions use %u others, and a daemon holds %d; drop sessions that are "
             "not needed (kvqctl session list)",
             e->name, books->n, KVQ_MAX_CODEBOOKS);
    note_failure(books, e, KVQ_E_LIMIT);
}

// With the lock held: puts a codebook that was read into the list, unless somebody else was
// faster, and returns the one that is there, or the failure. *rest is to be closed without the
// lock.
static struct entry *add_codebook(struct kvq__codebooks *books, struct entry *e,
                                  struct kvq_codebook **rest)
{
    struct entry *there = find_loaded(&books->entries, e->name), *unused = NULL;
    if (there || (books->n == KVQ_MAX_CODEBOOKS && !(unused = take_unused(books)))) {
        *rest = e->book;
        e->book = NULL;
        if (!there)
            note_no_room(books, e);
        else
            free(e);
        return there ? there : e;
    }
    if (unused)
        *rest = unused->book;
    free(unused);
    TAILQ_INSERT_HEAD(&books->entries, e, link);
    e->number = ++books->last_number;
    books->n++;
    return e;
}

// With the lock held, which is let go while the file is read. The codebook or the failure, held
// once; NULL: there is no memory.
static struct entry *load_codebook(struct kvq__codebooks *books, const char *name)
{
    struct entry *e, *out = calloc(1, sizeof *out);
    struct kvq_codebook *rest = NULL;
    uint32_t used = 0;
    if (!out)
        return NULL;
    snprintf(out->name, sizeof out->name, "%s", name);
    TAILQ_FOREACH (e, &books->entries, link)
        used += e->refs > 0;
    if (used == KVQ_MAX_CODEBOOKS) {
        note_no_room(books, out);
        out->refs++;
        return out;
    }
    pthread_mutex_unlock(&books->lock);
    int rc = read_file(books, out);
    pthread_mutex_lock(&books->lock);
    if (rc < 0)
        note_failure(books, out, rc);
    else
        out = add_codebook(books, out, &rest);
    out->refs++;
    pthread_mutex_unlock(&books->lock);
    kvq_codebook_close(&rest);
    pthread_mutex_lock(&books->lock);
    return out;
}

static bool holds_name(const struct kvq__book_holds *holds, const char *name)
{
    for (uint32_t i = 0; i < holds->n; i++)
        if (strcmp(((const struct entry *)holds->hold[i])->name, name) == 0)
            return true;
    return false;
}

void kvq__codebooks_load(struct kvq__codebooks *books, const char *name,
                         struct kvq__book_holds *holds)
{
    assert(!holds->books || holds->books == books);
    if (!books->folder[0] || !is_plain(name) || holds->n == KVQ_MAX_CODEBOOKS ||
        holds_name(holds, name))
        return; // kvq__codebooks_get says so
    pthread_mutex_lock(&books->lock);
    struct entry *e = find_loaded(&books->entries, name);
    if (e)
        e->refs++;
    else
        e = load_codebook(books, name);
    pthread_mutex_unlock(&books->lock);
    holds->books = books;
    if (e)
        holds->hold[holds->n++] = e;
}

void kvq__codebooks_let_go(struct kvq__book_holds *holds)
{
    assert(holds->n <= KVQ_MAX_CODEBOOKS);
    while (holds->n > 0)
        kvq__codebooks_release(holds->books, holds->hold[--holds->n]);
}

// ---- Holding ----

// With the lock held.
static int find_or_tell(struct kvq__codebooks *books, const char *name, struct entry **out,
                        char *text)
{
    *out = find_loaded(&books->entries, name);
    const struct entry *failed = *out ? NULL : find_loaded(&books->failures, name);
    if (failed)
        snprintf(text, TEXT, "%s", failed->text);
    else if (!*out)
        snprintf(text, TEXT,
                 "codebook %s was not read: the session names more than %d, the most that a daemon "
                 "holds, or there was no memory for it",
                 name, KVQ_MAX_CODEBOOKS);
    return *out ? 0 : failed ? failed->error : KVQ_E_LIMIT;
}

int kvq__codebooks_get(struct kvq__codebooks *books, const char *name, uint32_t layer,
                       const struct kvq_format *format, const struct kvq_shape *shape,
                       struct kvq_book *book, void **hold, char *text)
{
    struct entry *e;
    if (!books->folder[0]) {
        snprintf(text, TEXT, "format %s: this daemon has no codebooks; set codebook_dir",
                 format->name);
        return KVQ_E_FORMAT;
    }
    if (!is_plain(name)) {
        snprintf(text, TEXT,
                 "codebook name \"%.64s\": use letters, digits, '.', '_' and '-', and no '.' first",
                 name);
        return KVQ_E_INVALID;
    }
    pthread_mutex_lock(&books->lock);
    int rc = find_or_tell(books, name, &e, text);
    if (rc == 0 && !kvq_codebook_fits(e->book, layer, format, shape, text, TEXT))
        rc = KVQ_E_FORMAT;
    if (rc == 0) {
        kvq_codebook_layer(e->book, layer, book);
        e->refs++;
        TAILQ_REMOVE(&books->entries, e, link);
        TAILQ_INSERT_HEAD(&books->entries, e, link);
        *hold = e;
    }
    pthread_mutex_unlock(&books->lock);
    return rc;
}

void kvq__codebooks_share(struct kvq__codebooks *books, void *hold)
{
    struct entry *e = hold;
    pthread_mutex_lock(&books->lock);
    assert(e->refs > 0);
    e->refs++;
    pthread_mutex_unlock(&books->lock);
}

int kvq__codebooks_memory(const void *hold, const float **values, size_t *n, uint64_t *id)
{
    const struct entry *e = hold;
    *id = e->number;
    return kvq_codebook_memory(e->book, values, n);
}

uint64_t kvq__codebooks_id(const void *hold)
{
    return kvq_codebook_id(((const struct entry *)hold)->book);
}

void kvq__codebooks_release(struct kvq__codebooks *books, void *hold)
{
    struct entry *e = hold;
    pthread_mutex_lock(&books->lock);
    assert(e->refs > 0);
    bool told = --e->refs == 0 && !e->book; // a failure, to all who wanted it
    if (told)
        TAILQ_REMOVE(&books->failures, e, link);
    pthread_mutex_unlock(&books->lock);
    if (told)
        entry_free(e);
}
