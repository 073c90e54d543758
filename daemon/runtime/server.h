// SPDX-License-Identifier: Apache-2.0
//
// The daemon as the loop's thread sees it: what store, attach and control share, which lifecycle.c
// opens and closes. Everything here belongs to the loop's thread unless it says otherwise.
#ifndef KVQ_DAEMON_RUNTIME_SERVER_H
#define KVQ_DAEMON_RUNTIME_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/config/config.h"
#include "daemon/core/core.h"
#include "daemon/runtime/mailbox.h"
#include "daemon/runtime/memory.h"
#include "daemon/runtime/poller.h"
#include "daemon/runtime/shm.h"
#include "proto/wire.h"

struct kvq__attach;
struct kvq__control;
struct kvq__gpus;
struct kvq__history;
struct kvq__http;
struct kvq__jobs;
struct kvq__codebooks;
struct kvq__refill;
struct kvq__service;

// What stays the same for the daemon's whole run.
struct kvq__identity {
    const char *version, *backend, *isa, *runtime_dir;
    uint64_t epoch, pid, start_ns;
    uint32_t workers;
    bool stores; // sessions, in a folder
};

// How far the daemon's end is.
enum kvq__drain_phase { KVQ__DRAIN_STEPS, KVQ__DRAIN_SAVES, KVQ__DRAIN_OVER };
struct kvq__drain_state {
    enum kvq__drain_phase phase;
    bool complete; // all steps and requests have ended; known from KVQ__DRAIN_SAVES on
    uint32_t saved, not_saved, unsaved;
};

// What the store jobs time and count.
enum kvq__store_time {
    KVQ__TIME_SAVE,    // the saves when the daemon ends, and what was not changed, are not timed
    KVQ__TIME_RESTORE, // sessions of which something was read
    KVQ__TIME_FETCH,   // parked sessions that came back, from when their reading was asked for
    KVQ__TIME_PREFIX,  // prefixes that were read for a session
    KVQ__TIME_PUSH,
    KVQ__TIME_PULL,
    KVQ__TIMES,
};

// What the store jobs tell of the store, for those who watch (store.h). The figures of the disk are
// as they were a moment ago, the failures as they are.
struct kvq__storage_state {
    bool known; // it was looked at; else there is no store, or not yet
    bool read_only;
    uint64_t sessions;                            // that are saved, each shard counted
    uint64_t used_bytes, limit_bytes, free_bytes; // limit 0: none; free: of the file system
    uint64_t room_bytes;                          // that saves may still write
    struct kvq__store_failures {
        uint64_t count;    // since the start; each try counts
        uint64_t by_quota; // of these, for a namespace's disk-bytes
        int status;        // of the last one,
        uint64_t at_ns;    // and when that was
        bool went_well;    // one has since
    } failed[KVQ__TIMES];
};
// Whether jobs fail just now, for people: the last one did, within ten minutes. A save that fails
// is tried again once a minute at least.
static inline bool kvq__store_fails(const struct kvq__store_failures *failed, uint64_t now_ns)
{
    const uint64_t lately = 600 * 1000000000ull;
    return failed->count > 0 && !failed->went_well && now_ns - failed->at_ns < lately;
}

struct kvq__server {
    struct kvq_config config;
    int argc; // the command line and the environment, for when the configuration is read again
    char *const *argv, *const *environment;
    struct kvq__identity identity;
    uv_loop_t loop;
    bool loop_open;
    uv_async_t async;                 // mail has come
    struct kvq__mailbox box;          // to the loop's thread; any thread posts
    struct kvq__gpus *gpus;           // from start to stop; NULL: none
    struct kvq__refill *refill;       // of their reserves
    char *no_gpu;                     // why there is none, if one was looked for; else NULL
    struct kvq__core *core;           // the poller's, from start to stop
    struct kvq__memory_source memory; // the core's
    struct kvq__codebooks *codebooks; // any thread
    struct kvq__poller *poller;
    struct kvq__shm page; // struct kvq_daemon_page
    struct kvq__jobs *jobs;
    struct kvq__storage_state storage;
    struct kvq__attach *attach;
    struct kvq__control *control;
    struct kvq__http *http;                              // NULL: not served
    struct kvq__service *service;                        // NULL: no service manager is told
    struct kvq__refused attach_refused, control_refused; // requests of these sockets
    struct kvq__history *history; // the last events; NULL: nobody asks for them
    // Poller's thread: a GPU has faulted, and the process has to end (struct kvq__core_config).
    void (*fault)(void *context, const char *place, const char *text);
    // While closing: the GPU work of so many clients never ends, and the process has to end without
    // waiting for them. NULL: it waits.
    void (*stuck)(uint32_t clients);
    // Begins the daemon's end if it has not begun, or ends it at once. NULL: nobody can.
    void (*end)(struct kvq__server *server, bool now);
    int lock_fd; // held while the runtime directory is ours
    bool draining;
    // Called once when draining is over: no request is under way, or the time is up.
    void (*drained)(struct kvq__server *server);
    uv_timer_t drain_timer;
    uint64_t drain_until_ns;
    struct kvq__mail drain_mail;
    bool drain_asked;  // the poller has the mail
    bool drain_looked; // the poller was asked once: without any time an idle daemon is drained, too
    bool core_idle;    // its answer
    struct kvq__drain_state drain;
};

// The role of a user: admin for root and the daemon's own, else what the options give it.
enum kvq__role kvq__server_role(const struct kvq__server *server, const struct kvq__peer *peer);

// Bytes of an extent, in all places.
static inline uint64_t kvq__server_extent(const struct kvq__server *server)
{
    const struct kvq_config *c = &server->config;
    return server->gpus ? c->gpu_extent_bytes : c->host_extent_bytes;
}

#endif
