// SPDX-License-Identifier: Apache-2.0
//
// A new session that begins with what the index has of its prompt; and what is told of the index.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/session/prefix.h"
#include "daemon/core/session/prefix_ask.h"
#include "daemon/core/state.h"

// ---- Beginning with it ----

static void adopt_layer(struct kvq__session *s, struct kvq__layer *l, uint64_t tokens)
{
    l->first_page = (uint32_t)(kvq__first_kept(l, tokens) / KVQ_BLOCK_TOKENS);
    assert(l->first_page <= s->n_pages);
    l->raw_page = l->first_page;
    if (l->packed_bytes == 0)
        return;
    l->base = l->packed = tokens; // as in a fork: below, tokens are only there packed
    l->raw_page = s->n_pages;
}

static void adopt_page(struct kvq__session *s, const struct kvq__node *node)
{
    const struct kvq__pageref *from = node->pages;
    assert(node->page < s->n_pages && node->n_layers == s->n_owned);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        if (node->page >= l->first_page) {
            kvq__page(l, node->page)->packed = kvq__block_share(from->packed);
            kvq__page(l, node->page)->raw = kvq__block_share(from->raw);
        }
        from++;
    }
    memcpy(kvq__ids_at(&s->ids, (uint64_t)node->page * KVQ_BLOCK_TOKENS), node->ids,
           sizeof node->ids);
}

void kvq__prefix_counts(struct kvq__session *s, uint64_t tokens)
{
    assert(tokens % KVQ_BLOCK_TOKENS == 0);
    s->n_pages = (uint32_t)(tokens / KVQ_BLOCK_TOKENS);
    kvq__session_count(s, tokens);
    s->floor = tokens;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            adopt_layer(s, &s->layers[i], tokens);
}

// Begins with what was found, of which some may be yet to be read. Pages that were given up since
// are not there: it begins with none.
static int adopt(struct kvq__session *s, const struct kvq__prefix_ask *ask)
{
    struct kvq__namespace *ns = ask->spaces[ask->best].ns;
    assert(s->n_pages == 0 && s->tokens == 0 && s->ids.known == 0);
    struct kvq__node *last = kvq__prefix_ask_found(ask, s);
    uint64_t tokens = last ? (uint64_t)ask->here * KVQ_BLOCK_TOKENS : 0;
    s->ns->prefixes.lookups++;
    s->ns->prefixes.asked_tokens += (uint64_t)ask->pages * KVQ_BLOCK_TOKENS;
    if (!last)
        return 0;
    kvq__prefix_touch(s->core, &ns->prefixes, last); // others go first where tables need room
    int rc = kvq__pages_grow(s, ask->here);
    rc = rc ? rc : kvq__ids_grow(s, tokens);
    if (rc < 0 || !(last = kvq__prefix_ask_found(ask, s)))
        return rc;
    kvq__prefix_counts(s, tokens);
    s->prefix_tokens = s->ids.known = tokens;
    s->ids.again = ask->here;
    s->foreign = ns != s->ns;
    kvq__session_changed(s); // none of it is saved
    for (const struct kvq__node *node = last; node; node = node->parent)
        adopt_page(s, node);
    if (!s->foreign) {
        s->ids.sealed = ask->here;
        memcpy(s->ids.chain, last->chain, KVQ__HASH_BYTES);
    }
    rc = s->core->up->follow(s, last);
    if (rc < 0)
        return rc;
    s->ns->prefixes.hits++;
    s->ns->prefixes.hit_tokens += tokens;
    return 0;
}

int kvq__prefix_adopt(struct kvq__client *client, struct kvq__session *s,
                      const struct kvq__prefix_spec *spec, char *text)
{
    struct kvq__prefix_ask *own = NULL;
    const struct kvq__prefix_ask *ask = spec->ask;
    if (spec->tokens == 0 || ask) { // it may say what images there are all the same
        int rc = kvq__ids_spans(s, spec->spans, spec->n_spans, text);
        rc = rc || !ask ? rc : kvq__ids_identify(s, text);
        if (rc < 0 || !ask)
            return rc;
    } else {
        int rc = kvq__prefix_ask_now(client, s, spec, &own, text);
        if (rc < 0)
            return rc;
        ask = own;
    }
    int rc = adopt(s, ask);
    kvq__prefix_ask_end(&own);
    return rc < 0 ? kvq__ns_refused(s->ns, rc, "a session that begins with a prefix", text) : 0;
}

int kvq__session_spans(struct kvq__client *client, uint64_t handle, const struct kvq__span *spans,
                       uint32_t n, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_get(client, handle, &h);
    if (rc < 0)
        return kvq__fail(text, rc, "handle %#llx is no open session of this client",
                         (unsigned long long)handle);
    if (h->read_only)
        return kvq__fail(text, KVQ_E_READ_ONLY,
                         "what images a session's tokens stand for its writer says");
    for (uint32_t i = 0; i < n; i++)
        if (spans[i].first < h->session->tokens)
            return kvq__fail(text, KVQ_E_POSITION,
                             "span %u begins at token %llu; the session has %llu already: tell "
                             "spans before their tokens are appended",
                             i, (unsigned long long)spans[i].first,
                             (unsigned long long)h->session->tokens);
    rc = kvq__ids_spans(h->session, spans, n, text);
    if (rc == 0 && n > 0)
        kvq__session_changed(h->session); // to be saved before the tokens themselves
    return rc;
}

// ---- Telling ----

uint32_t kvq__core_prefixes(const struct kvq__core *core, const struct kvq__peer *peer,
                            uint64_t after, struct kvq__prefix_info *out, uint32_t max)
{
    const struct kvq__namespace *ns;
    uint32_t n = 0;
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        const struct kvq__prefixes *p = &ns->prefixes;
        if (n == max)
            break;
        if (ns->number <= after || !kvq__namespace_allows(ns, peer) ||
            (p->n_nodes == 0 && p->lookups == 0))
            continue;
        out[n] = (struct kvq__prefix_info){.ns_number = ns->number,
                                           .pages = p->n_nodes,
                                           .bytes = p->bytes,
                                           .idle_bytes = p->alone.bytes,
                                           .lookups = p->lookups,
                                           .hits = p->hits,
                                           .asked_tokens = p->asked_tokens,
                                           .hit_tokens = p->hit_tokens,
                                           .evicted = p->evicted};
        snprintf(out[n].ns, sizeof out[n].ns, "%s", ns->name);
        n++;
    }
    return n;
}
