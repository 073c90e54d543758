// SPDX-License-Identifier: Apache-2.0
//
// Sessions that begin with a prefix while a restore reads it; see saved_internal.h.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/state.h"

enum { PIECE_PAGES = 32 }; // pages that the index is given in one turn of the poller

// ---- Giving the pages to the index ----

int kvq__restore_offer(struct kvq__restore *r)
{
    struct kvq__session *s = r->session;
    uint32_t end = r->offered + PIECE_PAGES;
    if (s->dropped || kvq__ids_identify(s, NULL) < 0 || s->ids.known < s->tokens)
        return KVQ__COMPLETE;
    if (r->offered == 0)
        memcpy(r->chain, s->ids.root, sizeof r->chain);
    for (; r->offered < s->n_pages; r->offered++) {
        bool made;
        if (r->offered == end)
            return KVQ__MORE;
        struct kvq__node *node = kvq__prefix_offer(s, r->offered, r->chain, &made);
        if (!node)
            return KVQ__COMPLETE;
        if (made) {
            node->from = r;
            LIST_INSERT_HEAD(&r->nodes, node, from_link);
        }
    }
    return KVQ__COMPLETE;
}

// ---- Following ----

static bool follows(const struct kvq__session *s, const struct kvq__restore *r)
{
    const struct kvq__follower *f;
    LIST_FOREACH (f, &s->follows, of_session)
        if (f->restore == r)
            return true;
    return false;
}

static int follow(struct kvq__session *s, struct kvq__restore *r)
{
    struct kvq__follower *f = kvq__allocate(s->core, sizeof *f);
    if (!f)
        return KVQ_E_NO_MEMORY;
    assert(s->n_layers == r->session->n_layers);
    f->restore = r;
    f->session = s;
    LIST_INSERT_HEAD(&r->followers, f, of_restore);
    LIST_INSERT_HEAD(&s->follows, f, of_session);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (r->session->layers[i].loading && s->layers[i].loading++ == 0 && s->n_loading++ == 0)
            s->core->disk.n_loading++;
    return 0;
}

int kvq__follow(struct kvq__session *s, const struct kvq__node *last)
{
    int rc = 0;
    for (const struct kvq__node *node = last; node && rc == 0; node = node->parent)
        if (node->from && !follows(s, node->from))
            rc = follow(s, node->from);
    return rc;
}

bool kvq__layer_came(struct kvq__session *s, uint32_t layer)
{
    struct kvq__layer *l = &s->layers[layer];
    assert(l->loading > 0 && s->n_loading > 0);
    if (--l->loading > 0 || --s->n_loading > 0)
        return false;
    assert(s->core->disk.n_loading > 0);
    s->core->disk.n_loading--;
    return true;
}

void kvq__follow_layer(struct kvq__restore *r, uint32_t layer)
{
    const struct kvq__follower *f;
    LIST_FOREACH (f, &r->followers, of_restore) {
        struct kvq__session *s = f->session;
        if (kvq__layer_came(s, layer) && s->park)
            kvq__park_want(s->core); // parking was asked for meanwhile
    }
}

static void part(struct kvq__follower *f)
{
    LIST_REMOVE(f, of_restore);
    LIST_REMOVE(f, of_session);
    kvq__deallocate(f->session->core, f, sizeof *f);
}

void kvq__follow_leave(struct kvq__session *s)
{
    struct kvq__follower *f;
    while ((f = LIST_FIRST(&s->follows))) {
        for (uint32_t i = 0; i < s->n_layers; i++)
            if (f->restore->session->layers[i].loading)
                kvq__layer_came(s, i);
        part(f);
    }
}

// ---- The end ----

void kvq__follow_done(struct kvq__restore *r)
{
    struct kvq__node *node;
    struct kvq__follower *f;
    while ((node = LIST_FIRST(&r->nodes))) {
        LIST_REMOVE(node, from_link);
        node->from = NULL;
    }
    while ((f = LIST_FIRST(&r->followers)))
        part(f);
}

static void tell_lost(const struct kvq__session *s)
{
    char text[192];
    snprintf(text, sizeof text,
             "the %llu tokens that it began with could not be read, and it ends; opened again it "
             "begins with what is good of them",
             (unsigned long long)s->prefix_tokens);
    kvq__event(s->core, KVQ__EVENT_STORAGE_DAMAGED, s->ns->name, s->name, 0, text);
}

void kvq__follow_failed(struct kvq__restore *r, int status)
{
    struct kvq__node *node;
    struct kvq__follower *f;
    while ((node = LIST_FIRST(&r->nodes))) { // the last page first
        LIST_REMOVE(node, from_link);
        node->from = NULL;
        kvq__prefix_withdraw(r->core, &r->session->ns->prefixes, node);
    }
    while ((f = LIST_FIRST(&r->followers))) {
        struct kvq__session *s = f->session;
        tell_lost(s);
        kvq__session_give_up(s, status);
    }
}

uint64_t kvq__follows_loading(const struct kvq__session *s, uint32_t layer)
{
    const struct kvq__follower *f;
    uint64_t n = 0;
    LIST_FOREACH (f, &s->follows, of_session)
        n += f->restore->session->layers[layer].loading;
    return n;
}
