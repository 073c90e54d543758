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

enum { TEXT = KVQ_TEXT_BYTES / 2, PATH_BYTES = 512, MAX_FAILURES = 16 };

// A codebook; or, in the list of failures, why there is none.
struct entry {
    TAILQ_ENTRY(entry) link;
    char name[KVQ_FORMAT_NAME];
    struct kvq_codebook *book;
    uint64_t number; // never used again
    uint64_t refs;   // layers of sessions, and replies under way
    int error;
    char text[TEXT];
};
TAILQ_HEAD(entries, entry);

struct kvq__codebooks {
    char folder[PATH_BYTES];
    pthread_mutex_t lock; // of what follows
    uint32_t n, n_failures;
    uint64_t last_number;
    struct entries entries;  // last used first
    struct entries failures; // newest first; each is told once
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

static int refuse_room(struct kvq__codebooks *books, const char *name, char *text)
{
    snprintf(text, TEXT,
             "codebook %s: sessions use %u others, and a daemon holds %d; drop sessions that are "
             "not needed (kvqctl session list)",
             name, books->n, KVQ_MAX_CODEBOOKS);
    return KVQ_E_LIMIT;
}

// With the lock held: puts a codebook that was read into the list, unless somebody else was
// faster. What is not needed any more goes to *rest, to be closed without the lock.
static int add_codebook(struct kvq__codebooks *books, struct entry *e, struct entry **out,
                        struct entry **rest, char *text)
{
    *rest = NULL;
    if ((*out = find_loaded(&books->entries, e->name))) {
        *rest = e;
        return 0;
    }
    if (books->n == KVQ_MAX_CODEBOOKS && !(*rest = take_unused(books))) {
        *rest = e;
        return refuse_room(books, e->name, text);
    }
    TAILQ_INSERT_HEAD(&books->entries, e, link);
    e->number = ++books->last_number;
    books->n++;
    *out = e;
    return 0;
}

// Without the lock.
static int read_file(struct kvq__codebooks *books, const char *name, struct entry **out, char *text)
{
    char path[PATH_BYTES + KVQ_FORMAT_NAME + 16];
    snprintf(path, sizeof path, "%s/%s.kvqbook", books->folder, name);
    struct entry *e = calloc(1, sizeof *e);
    snprintf(text, TEXT, "no memory for codebook %s", name);
    if (!e)
        return KVQ_E_NO_MEMORY;
    snprintf(e->name, sizeof e->name, "%s", name);
    int rc = kvq_codebook_open(path, &e->book, text, TEXT);
    if (rc < 0)
        entry_free(e);
    *out = rc < 0 ? NULL : e;
    return rc;
}

// With the lock held, which is let go while the file is read.
static int load_codebook(struct kvq__codebooks *books, const char *name, struct entry **out,
                         char *text)
{
    struct entry *e, *rest = NULL;
    uint32_t used = 0;
    *out = NULL;
    TAILQ_FOREACH (e, &books->entries, link)
        used += e->refs > 0;
    if (used == KVQ_MAX_CODEBOOKS)
        return refuse_room(books, name, text);
    pthread_mutex_unlock(&books->lock);
    int rc = read_file(books, name, &e, text);
    pthread_mutex_lock(&books->lock);
    if (rc == 0)
        rc = add_codebook(books, e, out, &rest, text);
    if (!rest)
        return rc;
    if (*out)
        (*out)->refs++; // nobody may take it out meanwhile
    pthread_mutex_unlock(&books->lock);
    entry_free(rest);
    pthread_mutex_lock(&books->lock);
    if (*out)
        (*out)->refs--;
    return rc;
}

// With the lock held.
static void note_failure(struct kvq__codebooks *books, const char *name, int error,
                         const char *text)
{
    struct entry *e = find_loaded(&books->failures, name);
    if (e) {
        TAILQ_REMOVE(&books->failures, e, link);
    } else if (books->n_failures < MAX_FAILURES) {
        e = calloc(1, sizeof *e);
        books->n_failures += e != NULL;
    } else {
        e = TAILQ_LAST(&books->failures, entries);
        TAILQ_REMOVE(&books->failures, e, link);
    }
    if (!e)
        return; // it will be tried again, and told then
    snprintf(e->name, sizeof e->name, "%s", name);
    snprintf(e->text, sizeof e->text, "%s", text);
    e->error = error;
    TAILQ_INSERT_HEAD(&books->failures, e, link);
}

// With the lock held: a failure of just now, or 0.
static int take_failure(struct kvq__codebooks *books, const char *name, char *text)
{
    struct entry *e = find_loaded(&books->failures, name);
    if (!e)
        return 0;
    int error = e->error;
    snprintf(text, TEXT, "%s", e->text);
    TAILQ_REMOVE(&books->failures, e, link);
    books->n_failures--;
    entry_free(e);
    return error;
}

void kvq__codebooks_load(struct kvq__codebooks *books, const char *name)
{
    char text[TEXT];
    struct entry *e;
    if (!books->folder[0] || !is_plain(name))
        return; // kvq__codebooks_get says so
    pthread_mutex_lock(&books->lock);
    if (!find_loaded(&books->entries, name)) {
        int rc = load_codebook(books, name, &e, text);
        if (rc < 0)
            note_failure(books, name, rc, text);
    }
    pthread_mutex_unlock(&books->lock);
}

// ---- Holding ----

// With the lock held.
static int find_or_load(struct kvq__codebooks *books, const char *name, struct entry **e,
                        char *text)
{
    *e = find_loaded(&books->entries, name);
    int rc = *e ? 0 : take_failure(books, name, text);
    return *e || rc < 0 ? rc : load_codebook(books, name, e, text);
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
    int rc = find_or_load(books, name, &e, text);
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
    e->refs--;
    pthread_mutex_unlock(&books->lock);
}
