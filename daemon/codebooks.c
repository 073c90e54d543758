// SPDX-License-Identifier: Apache-2.0
//
// See codebooks.h.
#include "daemon/codebooks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "proto/limits.h"
#include "proto/status.h"
#include "storage/codebook.h"

enum { TEXT = KVQ_TEXT_BYTES / 2, PATH_BYTES = 512 };

struct entry {
    SLIST_ENTRY(entry) link;
    char name[KVQ_FORMAT_NAME];
    struct kvq_codebook *book;
};

struct kvq__codebooks {
    char folder[PATH_BYTES];
    uint32_t n;
    SLIST_HEAD(, entry) entries;
};

struct kvq__codebooks *kvq__codebooks_new(const char *folder)
{
    struct kvq__codebooks *books = calloc(1, sizeof *books);
    if (books)
        snprintf(books->folder, sizeof books->folder, "%s", folder);
    return books;
}

void kvq__codebooks_free(struct kvq__codebooks **pointer)
{
    struct kvq__codebooks *books = *pointer;
    struct entry *e;
    *pointer = NULL;
    while (books && (e = SLIST_FIRST(&books->entries))) {
        SLIST_REMOVE_HEAD(&books->entries, link);
        kvq_codebook_close(&e->book);
        free(e);
    }
    free(books);
}

// Names come from clients and become file names.
static bool is_plain(const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strspn(name, allowed);
    return n > 0 && name[n] == '\0' && name[0] != '.' && n < KVQ_FORMAT_NAME;
}

static int load(struct kvq__codebooks *books, const char *name, struct entry **out, char *text)
{
    char path[PATH_BYTES + KVQ_FORMAT_NAME + 16];
    struct entry *e;
    if (books->n == KVQ_MAX_CODEBOOKS) {
        snprintf(text, TEXT, "%d codebooks are loaded; a daemon holds no more", KVQ_MAX_CODEBOOKS);
        return KVQ_E_LIMIT;
    }
    snprintf(path, sizeof path, "%s/%s.kvqbook", books->folder, name);
    e = calloc(1, sizeof *e);
    if (!e) {
        snprintf(text, TEXT, "no memory for codebook %s", name);
        return KVQ_E_NO_MEMORY;
    }
    int rc = kvq_codebook_open(path, &e->book, text, TEXT);
    if (rc < 0) {
        free(e);
        return rc;
    }
    snprintf(e->name, sizeof e->name, "%s", name);
    SLIST_INSERT_HEAD(&books->entries, e, link);
    books->n++;
    *out = e;
    return 0;
}

int kvq__codebooks_get(struct kvq__codebooks *books, const char *name, uint32_t layer,
                       const struct kvq_format *format, const struct kvq_shape *shape,
                       struct kvq_book *book, char *text)
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
    SLIST_FOREACH (e, &books->entries, link)
        if (strcmp(e->name, name) == 0)
            break;
    int rc = e ? 0 : load(books, name, &e, text);
    if (rc == 0 && !kvq_codebook_fits(e->book, layer, format, shape, text, TEXT))
        rc = KVQ_E_FORMAT;
    if (rc == 0)
        kvq_codebook_layer(e->book, layer, book);
    return rc;
}
