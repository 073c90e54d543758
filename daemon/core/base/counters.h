// SPDX-License-Identifier: Apache-2.0
//
// What the core counts. A row is all that a counter needs: the code counts in the field of that
// name in core->counts, and a status tells it by that name, and so do kvqctl and what reads its
// JSON.
#ifndef KVQ_DAEMON_CORE_BASE_COUNTERS_H
#define KVQ_DAEMON_CORE_BASE_COUNTERS_H

#include <stdint.h>

// X(name, kind, what it counts)
// kind: TOTAL  since the start of the daemon, only ever more
//       MOST   the largest that there was
//       NOW    as it is when somebody asks; kvq__core_counts fills it in
#define KVQ__COUNTER_TABLE(X)                                                                      \
    X(steps, TOTAL, "steps committed")                                                             \
    X(attends, TOTAL, "attention calls, one for each session and layer")                           \
    X(appended_tokens, TOTAL, "tokens committed, over all sessions")                               \
    X(refused_requests, TOTAL, "requests answered with an error")                                  \
    X(kicked_clients, TOTAL, "clients that an administrator has ended")                            \
    X(parked_room, TOTAL, "sessions that went to disk since their pool was full")                  \
    X(parked_room_bytes, TOTAL, "bytes that were free then")                                       \
    X(parked_quota, TOTAL, "sessions that went to disk since their namespace was at its limit")    \
    X(parked_quota_bytes, TOTAL, "bytes that were free then")                                      \
    X(parked_idle, TOTAL, "sessions that went to disk after park_idle_seconds without use")        \
    X(parked_idle_bytes, TOTAL, "bytes that were free then")                                       \
    X(parked_asked, TOTAL, "sessions that went to disk as kvqctl or a client asked")               \
    X(parked_asked_bytes, TOTAL, "bytes that were free then")                                      \
    X(offloaded_now, NOW, "sessions that are on disk alone")                                       \
    X(fetched, TOTAL, "sessions that came back from disk")                                         \
    X(fetched_bytes, TOTAL, "bytes that they then took")                                           \
    X(fetch_failed, TOTAL, "sessions that could not come back")                                    \
    X(fetch_ns, TOTAL, "nanoseconds that sessions took to come back, each from its first request") \
    X(fetch_longest_ms, MOST, "milliseconds that the slowest of them took")                        \
    X(demoted, TOTAL, "sessions that went from a GPU to the host's memory")                        \
    X(demoted_bytes, TOTAL, "bytes that were free on the GPU then")                                \
    X(demoted_now, NOW, "sessions in the host's memory that belong on a GPU")                      \
    X(promoted, TOTAL, "sessions that came back from there to their GPU")                          \
    X(promoted_bytes, TOTAL, "bytes that they then took")                                          \
    X(waited_for_room, TOTAL, "requests that waited for room")                                     \
    X(waiting_for_room_now, NOW, "requests that wait for room")                                    \
    X(refused_for_room, TOTAL, "requests refused for want of room")                                \
    X(evictions_failed, TOTAL, "sessions that were to go, and stayed")                             \
    X(prompts_packed, TOTAL, "prompts packed before their end, since others needed the room")      \
    X(prompts_packed_bytes, TOTAL, "bytes that were free then")

struct kvq__counts {
#define KVQ__COUNTER_FIELD(name, kind, what) uint64_t name;
    KVQ__COUNTER_TABLE(KVQ__COUNTER_FIELD)
#undef KVQ__COUNTER_FIELD
};

enum { KVQ__COUNTERS = sizeof(struct kvq__counts) / sizeof(uint64_t) };

enum kvq__counter_kind { KVQ__COUNTER_TOTAL, KVQ__COUNTER_MOST, KVQ__COUNTER_NOW };

struct kvq__counter {
    const char *name, *what;
    enum kvq__counter_kind kind;
};
// In the order of the fields of struct kvq__counts.
extern const struct kvq__counter kvq__counters[KVQ__COUNTERS];

#endif
