// SPDX-License-Identifier: Apache-2.0
//
// Commands that describe a session: codebooks that its formats name are read before the core opens
// it, on a thread of libuv's.
#include <assert.h>
#include <string.h>

#include "daemon/attach/internal.h"
#include "daemon/store/codebooks.h"

// Codebooks that a format name asks for, itself or by what the configuration says of it.
static void read_codebooks_of(const struct kvq__server *server, const char *format)
{
    const char *at = strchr(format, '@');
    if (at)
        kvq__codebooks_load(server->codebooks, at + 1);
    const struct kvq__own_format *own = kvq__config_own_format(&server->config, format);
    if (!own)
        return;
    if ((at = strchr(own->rest.name, '@')))
        kvq__codebooks_load(server->codebooks, at + 1);
    for (uint32_t i = 0; i < own->n_ranges; i++)
        if ((at = strchr(own->ranges[i].row.name, '@')))
            kvq__codebooks_load(server->codebooks, at + 1);
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
    read_codebooks_of(c->server, open->format);
    for (size_t i = 0; i < open->n_layers; i++) {
        const char *format = open->layers[i]->format;
        size_t before = 0;
        while (before < i && strcmp(open->layers[before]->format, format) != 0)
            before++;
        if (before == i && strcmp(open->format, format) != 0) // each once, also if it fails
            read_codebooks_of(c->server, format);
    }
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
