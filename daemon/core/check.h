// SPDX-License-Identifier: Apache-2.0
//
// Walks all of the core and counts everything anew: who references which block, what namespaces
// use, who stands in which list, what a session in each state may have. Tests do so after every
// step; nothing in the daemon does. It takes as long as there is much: some milliseconds for a
// thousand pages.
//
// Poller's thread, between requests.
#ifndef KVQ_DAEMON_CORE_CHECK_H
#define KVQ_DAEMON_CORE_CHECK_H

struct kvq__core;
struct kvq__check; // remembers what it saw last

// broken() is told what does not hold, and does not return. NULL: no memory.
struct kvq__check *kvq__check_new(void (*broken)(const char *file, int line, const char *what));
// Accepts a pointer to NULL.
void kvq__check_free(struct kvq__check **check);
// Looks at the core. What a namespace has above a limit must not be more than when it was last
// looked at.
void kvq__check_core(struct kvq__check *check, const struct kvq__core *core);
// The next core is another one than the last.
void kvq__check_forget(struct kvq__check *check);

#endif
