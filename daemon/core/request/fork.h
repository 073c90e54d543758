// SPDX-License-Identifier: Apache-2.0
//
// Forks: where a session can be cut, and copies of tokens (fork.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_FORK_H
#define KVQ_DAEMON_CORE_REQUEST_FORK_H

#include "daemon/core/state.h"

// A block to be copied for a fork: `tokens` tokens of every head. sinks: how many of its first
// tokens stand behind the codes as well; 0 except in the first block.
struct kvq__copy {
    const uint8_t *from;
    uint8_t *to;
    uint32_t layer, tokens, sinks;
    bool packed;
};

// Goes on with a FORK whose new sessions are not all made yet.
enum kvq__progress kvq__fork_on(struct kvq__queue *q);
// Lets go of an entry's new session, if there is one.
void kvq__fork_release(struct kvq__queue *q, struct kvq__entry *w);

// ---- Where a session can be cut ----

// fork_possible: the highest count at or below `at` where the session can be forked; 0 always is
// one. fork_floor: the floor of a fork at that count. fork_base: of a layer of that fork, the count
// below which tokens exist in packed form only; false if the layer cannot be cut there.
uint64_t kvq__fork_possible(const struct kvq__session *s, uint64_t at);
uint64_t kvq__fork_floor(const struct kvq__session *s, uint64_t at);
bool kvq__fork_base(const struct kvq__session *s, const struct kvq__layer *l, uint64_t at,
                    uint64_t *base);
// Copies the tokens of every head. Any thread.
void kvq__copy_tokens(const struct kvq__layer *l, const struct kvq__copy *c);

#endif
