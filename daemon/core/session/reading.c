// SPDX-License-Identifier: Apache-2.0
//
// What a client must know of a session besides its pages to attend to it in its own context.
#include <assert.h>

#include "daemon/core/state.h"

static int find_read_session(struct kvq__client *client, uint64_t value,
                             struct kvq__session **session, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_get(client, value, &h);
    if (rc < 0)
        return kvq__fail(text, rc,
                         "handle %#llx is none of this client's: its session was closed, dropped "
                         "or taken over; open the session again",
                         (unsigned long long)value);
    assert(!h->session->dropped);
    *session = h->session;
    return 0;
}

int kvq__session_reading(struct kvq__client *client, uint64_t handle,
                         struct kvq__layer_reading *out, uint8_t *path, uint32_t *shards,
                         char *text)
{
    struct kvq__session *s = NULL;
    int rc = find_read_session(client, handle, &s, text);
    if (rc < 0)
        return rc;
    assert(s->n_layers <= KVQ_MAX_LAYERS);
    for (uint32_t i = 0; i < s->n_layers; i++)
        out[i] = (struct kvq__layer_reading){
            .format = *s->layers[i].format,
            .shape = s->layers[i].shape,
            .source = s->layers[i].source,
        };
    *path = s->path;
    *shards = s->shards;
    return (int)s->n_layers;
}

int kvq__session_book(struct kvq__client *client, uint64_t handle, uint32_t layer,
                      struct kvq_book *book, void **hold, char *text)
{
    struct kvq__session *s = NULL;
    int rc = find_read_session(client, handle, &s, text);
    if (rc < 0)
        return rc;
    if (layer >= s->n_layers)
        return kvq__fail(text, KVQ_E_SHAPE, "layer %u: the session has %u layers", layer,
                         s->n_layers);
    const struct kvq__layer *l = &s->layers[layer];
    if (!l->book_hold)
        return kvq__fail(text, KVQ_E_FORMAT, "layer %u: format %s has no codebook", layer,
                         l->format->name);
    client->core->config.codebook_share(client->core->config.context, l->book_hold);
    *book = l->book;
    *hold = l->book_hold;
    return 0;
}
