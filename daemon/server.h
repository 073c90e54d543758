// SPDX-License-Identifier: Apache-2.0
//
// The daemon as the loop's thread sees it: what its edges (attach.c, control.c, main.c) share.
// Everything here belongs to the loop's thread unless it says otherwise.
#ifndef KVQ_DAEMON_SERVER_H
#define KVQ_DAEMON_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/config.h"
#include "daemon/core.h"
#include "daemon/dispatch.h"
#include "daemon/mailbox.h"
#include "daemon/memory.h"
#include "daemon/poller.h"
#include "daemon/shm.h"

struct kvq__attach;
struct kvq__control;
struct kvq__gpus;
struct kvq__keeper;

struct kvq__server {
    struct kvq_config config;
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
    struct kvq__keeper *keeper;
    struct kvq__attach *attach;
    struct kvq__control *control;
    // Poller's thread: a GPU has faulted, and the process has to end (struct kvq__core_config).
    void (*fault)(void *context, const char *place, const char *text);
    // Closing: so many clients have work on GPUs that does not come to an end, and the process has
    // to end without them. NULL: they are waited for.
    void (*stuck)(uint32_t clients);
    int lock_fd; // held while the runtime directory is ours
    bool draining;
    // Told once, when draining is over: nothing is in flight, or the time is up.
    void (*drained)(struct kvq__server *server);
    uv_timer_t drain_timer;
    uint64_t drain_until_ns;
    struct kvq__mail drain_mail;
    bool drain_asked; // the poller has the mail
    bool core_idle;   // its answer
};

// Makes the runtime directory and takes its lock. 0, KVQ_E_PERMISSION, KVQ_E_SYSTEM, or
// KVQ_E_BUSY with the other daemon's pid in the text.
int kvq__server_lock(struct kvq__server *server, char *text);

// Opens core, poller, sockets: from here on clients may connect. server->config is resolved and
// the lock is held. On failure what was opened is closed by kvq__server_close.
int kvq__server_open(struct kvq__server *server, char *text);
// Refuses new work, lets what runs finish within config.drain_ms, then calls server->drained.
void kvq__server_drain(struct kvq__server *server);
// Ends every client and closes everything; runs the loop until that is done, or, where there are
// GPUs, calls server->stuck after KVQ__CLOSE_MS. Also after a failed open.
enum { KVQ__CLOSE_MS = 3000 };
void kvq__server_close(struct kvq__server *server);

// Whether a user may see and end everything: root, the daemon's own user, config.admin_uids.
bool kvq__server_is_admin(const struct kvq__server *server, uint32_t uid);

// Findings for people (doctor.c); all in the arena.
void kvq__doctor(const struct kvq__server *server, struct kvq_arena *arena, Kvq__Reply *reply);

// ---- attach.c ----

int kvq__attach_open(struct kvq__server *server, struct kvq__attach **attach, char *text);
// Takes no new connections.
void kvq__attach_refuse(struct kvq__attach *attach);
// Ends every connection and its client; all is gone when kvq__attach_idle says so.
void kvq__attach_end_all(struct kvq__attach *attach);
uint32_t kvq__attach_count(const struct kvq__attach *attach);
bool kvq__attach_idle(const struct kvq__attach *attach);
// Ends the client of that id, if it is there.
void kvq__attach_kick(struct kvq__attach *attach, uint64_t client);
// After the loop has closed its handles; count is 0. NULL is fine.
void kvq__attach_free(struct kvq__attach **attach);
// Poller's thread: the core's buffer_gone.
void kvq__attach_buffer_gone(struct kvq__attach *attach, uint64_t client, uint32_t buffer);
// Likewise its table_gone.
void kvq__attach_table_gone(struct kvq__attach *attach, uint64_t client,
                            const struct kvq__table_memory *memory);

// ---- control.c ----

int kvq__control_open(struct kvq__server *server, struct kvq__control **control, char *text);
void kvq__control_publish(struct kvq__control *control, const Kvq__Event *event);
// Stops listening and closes its handles in the loop.
void kvq__control_end(struct kvq__control *control);
// True once nothing of it is at the poller any more.
bool kvq__control_idle(const struct kvq__control *control);
void kvq__control_free(struct kvq__control **control); // after the loop; NULL is fine

#endif
