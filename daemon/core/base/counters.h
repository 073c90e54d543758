// SPDX-License-Identifier: Apache-2.0
//
// What the core counts. A counter is a row here and a line that counts: the row makes the field of
// that name in core->counts, and a status, kvqctl's JSON and docs/operations.md have all rows.
#ifndef KVQ_DAEMON_CORE_BASE_COUNTERS_H
#define KVQ_DAEMON_CORE_BASE_COUNTERS_H

#include <stdint.h>

// X(name, kind, what it counts)
// kind: TOTAL  since the start of the daemon, only ever more
//       MOST   the largest that there was
//       NOW    as it is when somebody asks; kvq__core_counts fills it in
#define KVQ__COUNTER_TABLE(X)                                                                      \
    X(steps, TOTAL, "steps committed")                                                             \
    X(attends, TOTAL,                                                                              \
      "attention calls of requests, none in engines' own context; for each session and layer")     \
    X(appended_tokens, TOTAL, "tokens committed, over all sessions")                               \
    X(refused_requests, TOTAL, "requests answered with an error")                                  \
    X(kicked_clients, TOTAL, "clients that an administrator has ended")                            \
    X(parked_room, TOTAL, "sessions parked since their pool was full")                             \
    X(parked_room_bytes, TOTAL, "bytes of memory that parking these freed")                        \
    X(parked_quota, TOTAL, "sessions parked since their namespace was at its limit")               \
    X(parked_quota_bytes, TOTAL, "bytes of memory that parking these freed")                       \
    X(parked_idle, TOTAL, "sessions parked after park_idle_seconds without use")                   \
    X(parked_idle_bytes, TOTAL, "bytes of memory that parking these freed")                        \
    X(parked_asked, TOTAL, "sessions parked as kvqctl or a client asked")                          \
    X(parked_asked_bytes, TOTAL, "bytes of memory that parking these freed")                       \
    X(offloaded_now, NOW, "sessions whose blocks are on disk alone")                               \
    X(unsaved_now, NOW, "sessions with a name whose last change is not saved")                     \
    X(fetched, TOTAL, "sessions that came back from disk")                                         \
    X(fetched_bytes, TOTAL, "bytes of memory that these took")                                     \
    X(fetch_failed, TOTAL, "sessions that could not come back")                                    \
    X(fetch_ns, TOTAL, "nanoseconds that sessions took to come back, each from its first request") \
    X(fetch_longest_ms, MOST, "milliseconds that the slowest session took to come back")           \
    X(demoted, TOTAL, "sessions that went from a GPU to the host's memory")                        \
    X(demoted_bytes, TOTAL, "bytes of GPU memory that these freed")                                \
    X(demoted_now, NOW, "sessions in the host's memory that belong on a GPU")                      \
    X(promoted, TOTAL, "sessions that came back from the host's memory to their GPU")              \
    X(promoted_bytes, TOTAL, "bytes of memory that these took")                                    \
    X(waited_for_room, TOTAL, "requests that waited for room")                                     \
    X(waiting_for_room_now, NOW, "requests that wait for room")                                    \
    X(refused_for_room, TOTAL, "requests refused for want of room")                                \
    X(evictions_failed, TOTAL, "sessions that could not be evicted")                               \
    X(prompts_packed, TOTAL, "prompts packed before their end, since others needed the room")      \
    X(prompts_packed_bytes, TOTAL, "bytes of memory that packing these freed")

struct kvq__counts {
#define KVQ__COUNTER_FIELD(name, kind, what) uint64_t name;
    KVQ__COUNTER_TABLE(KVQ__COUNTER_FIELD)
#undef KVQ__COUNTER_FIELD
};

enum { KVQ__COUNTERS = sizeof(struct kvq__counts) / sizeof(uint64_t) };
// In the order of the fields of struct kvq__counts.
extern const char *const kvq__counter_names[KVQ__COUNTERS];

#endif
