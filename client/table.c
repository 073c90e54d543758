// SPDX-License-Identifier: Apache-2.0
//
// The session handles that this client holds, and the shapes behind them.
#include "client/internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t repeats(const struct kvq_layer *row)
{
    return row->repeat ? row->repeat : 1;
}

// NULL for rows that cannot be: the daemon refuses those with a better text.
struct kvq__shape *kvq__shape_make(const struct kvq_layer *rows, uint32_t n_rows)
{
    uint64_t layers = 0;
    for (uint32_t i = 0; i < n_rows; i++)
        layers += repeats(&rows[i]);
    if (layers == 0 || layers > KVQ_MAX_LAYERS)
        return NULL;
    struct kvq__shape *shape = calloc(1, sizeof *shape + layers * sizeof shape->layer[0]);
    if (!shape)
        return NULL;
    shape->refs = 1;
    for (uint32_t i = 0; i < n_rows; i++) {
        for (uint32_t r = 0; r < repeats(&rows[i]); r++) {
            uint32_t layer = shape->layers++;
            assert(layer < layers);
            shape->layer[layer].q_heads = rows[i].q_heads;
            shape->layer[layer].kv_heads = rows[i].kv_heads;
            shape->layer[layer].k_dim = rows[i].k_dim;
            shape->layer[layer].v_dim = rows[i].v_dim;
            shape->layer[layer].window = rows[i].window;
            shape->layer[layer].softcap = rows[i].softcap;
            shape->layer[layer].scale = rows[i].scale;
            shape->layer[layer].source = rows[i].kv_from ? rows[i].kv_from - 1 : layer;
        }
    }
    return shape;
}

void kvq__shape_unref(struct kvq__shape *shape)
{
    assert(!shape || shape->refs > 0);
    if (shape && --shape->refs == 0)
        free(shape);
}

static int add_handle(kvq_client *client, uint64_t handle, bool read_only, struct kvq__shape *shape,
                      const char *shown)
{
    if (handle == 0 || (uint32_t)handle >= KVQ__HANDLES)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon gave a session handle of index %u, at most %d are agreed",
                              (uint32_t)handle, KVQ__HANDLES - 1);
    struct kvq__handle *h = &client->handles[kvq__handle_index(handle)];
    if (h->handle == 0)
        client->open_handles++;
    assert(client->open_handles > 0 && client->open_handles < KVQ__HANDLES);
    kvq__shape_unref(h->shape);
    free(h->shown);
    *h = (struct kvq__handle){handle, read_only, shape, shown ? strdup(shown) : NULL};
    return KVQ_OK;
}

int kvq__handle_add(kvq_client *client, uint64_t handle, bool read_only, struct kvq__shape *shape,
                    const char *shown)
{
    pthread_mutex_lock(&client->table);
    int rc = add_handle(client, handle, read_only, shape, shown);
    if (rc)
        kvq__shape_unref(shape);
    pthread_mutex_unlock(&client->table);
    return rc;
}

int kvq__handle_fork(kvq_client *client, uint64_t source, uint64_t handle)
{
    pthread_mutex_lock(&client->table);
    const struct kvq__handle *h = kvq__handle_find(client, source);
    struct kvq__shape *shape = h ? h->shape : NULL;
    if (shape)
        shape->refs++;
    int rc = add_handle(client, handle, false, shape, NULL);
    if (rc)
        kvq__shape_unref(shape);
    pthread_mutex_unlock(&client->table);
    return rc;
}

static void clear_handle(kvq_client *client, struct kvq__handle *h)
{
    assert(h->handle && client->open_handles > 0);
    client->open_handles--;
    kvq__note_change(client, h->handle);
    kvq__shape_unref(h->shape);
    free(h->shown);
    *h = (struct kvq__handle){0};
}

void kvq__handle_remove(kvq_client *client, uint64_t handle)
{
    pthread_mutex_lock(&client->table);
    if (kvq__handle_find(client, handle))
        clear_handle(client, &client->handles[kvq__handle_index(handle)]);
    pthread_mutex_unlock(&client->table);
}

uint32_t kvq__handle_clear(kvq_client *client)
{
    pthread_mutex_lock(&client->table);
    uint32_t held = client->open_handles;
    for (uint32_t i = 0; i < KVQ__HANDLES; i++)
        if (client->handles[i].handle)
            clear_handle(client, &client->handles[i]);
    assert(client->open_handles == 0);
    pthread_mutex_unlock(&client->table);
    return held;
}

const struct kvq__handle *kvq__handle_find(const kvq_client *client, uint64_t handle)
{
    const struct kvq__handle *h = &client->handles[kvq__handle_index(handle)];
    return handle && h->handle == handle ? h : NULL;
}

const char *kvq__handle_shown(const kvq_client *client, uint64_t handle, char *text)
{
    const struct kvq__handle *h = kvq__handle_find(client, handle);
    if (h && h->shown)
        snprintf(text, KVQ__SHOWN_BYTES, "session %s", h->shown);
    else
        snprintf(text, KVQ__SHOWN_BYTES, "session %#" PRIx64, handle);
    return text;
}
