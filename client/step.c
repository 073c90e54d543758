// SPDX-License-Identifier: Apache-2.0
//
// A whole step in one request: K and V of all layers stand behind its entries.
#include "client/internal.h"

#include <assert.h>
#include <stdio.h>

static const char *const side_names[2] = {"k", "v"};

static const struct kvq_tensor *tensor_of(const struct kvq_step_work *w, uint32_t layer, int side)
{
    return side ? &w->v[layer] : &w->k[layer];
}

// Again, for a text that names the layer.
static int explain_view(const kvq_queue *queue, const struct kvq_step_work *w, uint32_t layer,
                        int side)
{
    char name[32];
    struct kvq_wire_view view;
    snprintf(name, sizeof name, "%s of layer %u", side_names[side], layer);
    int rc = kvq__put_view(queue, KVQ_OP_STEP, name, false, tensor_of(w, layer, side), &view);
    assert(rc); // as it was before
    return rc;
}

static int check_layers(const kvq_queue *queue, const struct kvq_step_work *w)
{
    struct kvq_wire_view view;
    for (uint32_t i = 0; i < w->n_layers; i++) {
        for (int side = 0; side < 2; side++)
            if (kvq__put_view(queue, KVQ_OP_STEP, side_names[side], false, tensor_of(w, i, side),
                              &view))
                return explain_view(queue, w, i, side);
        if (!w->k[i].buffer != !w->v[i].buffer)
            return kvq__set_error(
                KVQ_E_BUFFER,
                "step: layer %u has a buffer for one of k and v, but none for the "
                "other",
                i);
    }
    return KVQ_OK;
}

static int check_work(const struct kvq_step_work *w)
{
    if (!w || !w->k || !w->v)
        return kvq__set_error(KVQ_E_INVALID, "step: work, or one of its arrays, is NULL");
    if (w->n_layers == 0 || w->n_layers > KVQ_MAX_LAYERS)
        return kvq__set_error(KVQ_E_SHAPE,
                              "step of %u layers: it can be 1 to %d, as many as the "
                              "sessions have",
                              w->n_layers, KVQ_MAX_LAYERS);
    return KVQ_OK;
}

int kvq__step_make(kvq_queue *queue, const struct kvq_step_work *w, struct kvq_entry *entries,
                   uint32_t n, uint32_t *extents, struct kvq__pending **pending)
{
    struct kvq__pending *p = NULL;
    int rc = check_work(w);
    if (rc)
        return rc;
    struct kvq_work work = {
        .layer = w->n_layers, .deadline_ns = w->deadline_ns, .pages = w->pages, .ids = w->ids};
    rc = kvq__submit_make(queue, KVQ_OP_STEP, &work, entries, n, &p);
    if (rc == KVQ_OK)
        rc = check_layers(queue, w);
    if (rc)
        return rc;
    assert(p && p->request.op == KVQ_OP_STEP);
    p->request.slots = (uint16_t)kvq_request_slots(n, w->n_layers);
    assert(p->request.slots <= KVQ_REQ_MAX_SLOTS);
    p->step = w;
    p->extents = extents;
    *pending = p;
    return KVQ_OK;
}

int kvq__step_run(kvq_queue *queue, const struct kvq_step_work *w, struct kvq_entry *entries,
                  uint32_t n, uint32_t *extents)
{
    struct kvq__pending *p = NULL;
    int rc = kvq__step_make(queue, w, entries, n, extents, &p);
    if (rc == KVQ_OK)
        rc = kvq__submit_send(queue, p);
    return rc ? rc : kvq_wait(queue, p->ticket, UINT64_MAX);
}

int kvq_step(kvq_queue *queue, const struct kvq_step_work *work, struct kvq_entry *entries,
             uint32_t n)
{
    return kvq__step_run(queue, work, entries, n, NULL);
}
