// SPDX-License-Identifier: Apache-2.0
//
// Asking for a prefix, in memory and in a store (prefix_ask.c).
#ifndef KVQ_DAEMON_CORE_SESSION_PREFIX_ASK_H
#define KVQ_DAEMON_CORE_SESSION_PREFIX_ASK_H

#include "daemon/core/core.h"

struct kvq__session;

// What a client asks for, for as long as it is there with its buffers. Its ids are read where the
// client can change them at any time: nothing is believed of them but what is compared in the end.
// Life of one: kvq__prefix_ask, _hash, _match until it is true (and, if a store has brought more,
// _again and _match), then it stands in a spec that is looked up or opened, then _end.
struct kvq__prefix_ask {
    struct kvq__core *core;
    struct kvq__session *like; // as the session will be
    bool own;                  // `like` is the ask's
    const volatile uint8_t *ids;
    uint32_t pages, here;   // whole pages that are asked for, and that memory has
    uint32_t stored;        // of these, that a store has of all shards
    const char *ns, *place; // where its session will be; they live as long as the core
    uint32_t n_spaces;
    struct kvq__prefix_space { // namespaces that it may share with, its own first
        struct kvq__namespace *ns;
        const char *name;
        uint8_t root[32];
        uint8_t (*chains)[32]; // the hash of each page
    } spaces[1 + KVQ_MAX_NAMESPACES];
    uint32_t at, at_page;           // where matching is
    uint32_t best;                  // the namespace that has most
    uint32_t since[KVQ_MAX_LAYERS]; // where each layer's blocks are there from, without a gap
};

// Poller's thread. *ask is NULL where nothing is to be looked for: the session is there already, or
// less than a page is asked for. Its hashes count among the namespace's table bytes. 0, or what is
// wrong: opening and looking up say so, too.
int kvq__prefix_ask(struct kvq__client *client, const struct kvq__session_spec *spec,
                    struct kvq__prefix_ask **ask, char *text);
// Poller's thread. Accepts pointers to NULL.
void kvq__prefix_ask_end(struct kvq__prefix_ask **ask);
// Any thread. Computes the hashes of all pages.
void kvq__prefix_ask_hash(struct kvq__prefix_ask *ask);
// Poller's thread. Looks at so many pages of the index as take some tens of microseconds. True once
// all have been looked at: `here` is then how many it has.
bool kvq__prefix_ask_match(struct kvq__prefix_ask *ask);
// Any thread. Matching begins anew; a store has so many of the pages of all shards.
void kvq__prefix_ask_again(struct kvq__prefix_ask *ask, uint32_t stored);
// Any thread, once both are hashed. Whether the first so many pages (1 at least) of both are the
// same ones, in the same place and namespace.
bool kvq__prefix_ask_same(const struct kvq__prefix_ask *a, const struct kvq__prefix_ask *b,
                          uint32_t pages);
// Any thread. What a store knows its pages by in one of its namespaces.
void kvq__prefix_ask_stored(const struct kvq__prefix_ask *ask, uint32_t space,
                            uint8_t (*hashes)[32]);

#endif
