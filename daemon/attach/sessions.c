// SPDX-License-Identifier: Apache-2.0
//
// Commands that describe a session: codebooks that its formats name are read before the core opens
// it, on a thread of libuv's.
#include <assert.h>
#include <string.h>

#include "daemon/attach/internal.h"
#include "daemon/store/codebooks.h"

// Names of codebooks, each once. n: as many as there are, of which the first are kept.
struct book_names {
    uint32_t n;
    const char *name[KVQ_MAX_CODEBOOKS];
};

static void add_book_of(struct book_names *names, const char *format)
{
    const char *at = strchr(format, '@');
    if (!at || names->n > KVQ_MAX_CODEBOOKS)
        return;
    for (uint32_t i = 0; i < names->n; i++)
        if (strcmp(names->name[i], at + 1) == 0)
            return;
    if (names->n < KVQ_MAX_CODEBOOKS)
        names->name[names->n] = at + 1;
    names->n++;
}

// Codebooks that a format name asks for, itself or by what the configuration says of it.
static void add_books_of(const struct kvq__server *server, struct book_names *names,
                         const char *format)
{
    add_book_of(names, format);
    const struct kvq__own_format *own = kvq__config_own_format(&server->config, format);
    if (!own)
        return;
    add_book_of(names, own->rest.name);
    for (uint32_t i = 0; i < own->n_ranges; i++)
        add_book_of(names, own->ranges[i].row.name);
}

// The session that a command describes.
static const Kvq__OpenSession *described(const struct kvq__connection *c)
{
    return c->request->command_case == KVQ__REQUEST__COMMAND_OPEN_SESSION ? c->request->open_session
           : c->request->command_case == KVQ__REQUEST__COMMAND_LOOKUP_PREFIX
               ? c->request->lookup_prefix->session
               : NULL;
}

void kvq__session_read_codebooks(struct kvq__connection *c)
{
    const Kvq__OpenSession *open = described(c);
    assert(open);
    struct book_names names = {0};
    add_books_of(c->server, &names, open->format);
    for (size_t i = 0; i < open->n_layers; i++)
        add_books_of(c->server, &names, open->layers[i]->format);
    for (uint32_t i = 0; names.n <= KVQ_MAX_CODEBOOKS && i < names.n; i++) // else the core refuses
        kvq__codebooks_load(c->server->codebooks, names.name[i], &c->books);
}

// Whether any file may have to be read before the session can be opened.
bool kvq__session_needs_codebooks(const struct kvq__connection *c)
{
    const Kvq__OpenSession *open = described(c);
    if (!open || open->n_layers == 0 || !c->server->config.codebook_dir[0])
        return false;
    bool any =
        strchr(open->format, '@') || kvq__config_own_format(&c->server->config, open->format);
    for (size_t i = 0; i < open->n_layers && !any; i++)
        any = strchr(open->layers[i]->format, '@') ||
              kvq__config_own_format(&c->server->config, open->layers[i]->format);
    return any;
}

uint64_t kvq__open_session_made(const struct kvq__connection *c)
{
    return c->reply.session->handle;
}
