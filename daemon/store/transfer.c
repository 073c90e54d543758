// SPDX-License-Identifier: Apache-2.0
//
// How transfers run; see transfer.h.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "daemon/log/log.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/transfer.h"
#include "proto/sync.h"

enum {
    TALK_AT_ONCE = 2, // pushes and pulls
    ASK_AT_ONCE = 2,  // lists and removals
    MOST = 64,        // pushes and pulls under way, queued ones included
    MOST_OF_ONE = 16, // of one user or key
    MOST_ASKS = 6,    // lists and removals: somebody waits for each, and takes up room
    MOST_ASKS_OF_ONE = 2,
    TOLD = 64,          // of those that have ended
    TOLD_SECONDS = 600, // since then
    TRIES = 3,          // where a session is saved again while it is exported
};

static const struct kvq__peer self = {.admin = true};

static void start_next_transfer(struct kvq__desk *desk);
static bool clear_leftovers(struct kvq__task *t, const struct kvq__transfer *own, uint64_t bytes);

static bool has_ticket(const struct kvq__transfer *x)
{
    return x->kind == KVQ__TRANSFER_PUSH || x->kind == KVQ__TRANSFER_PULL;
}

const char *kvq__transfer_kind(const struct kvq__transfer *x)
{
    static const char *const names[] = {[KVQ__TRANSFER_PUSH] = "push",
                                        [KVQ__TRANSFER_PULL] = "pull",
                                        [KVQ__TRANSFER_REMOVE] = "remove",
                                        [KVQ__TRANSFER_LIST] = "list"};
    return names[x->kind];
}

const char *kvq__transfer_phase(const struct kvq__transfer *x)
{
    static const char *const names[] = {[KVQ__TRANSFER_QUEUED] = "queued",
                                        [KVQ__TRANSFER_SAVING] = "saving",
                                        [KVQ__TRANSFER_WAITING] = "waiting",
                                        [KVQ__TRANSFER_IMPORTING] = "importing"};
    if (x->phase == KVQ__TRANSFER_ENDED)
        return x->rc < 0 ? "failed" : "done";
    if (x->phase == KVQ__TRANSFER_TALKING)
        return x->kind == KVQ__TRANSFER_PUSH ? "sending" : "receiving";
    return names[x->phase];
}

static bool is_asked_by(const struct kvq__transfer *x, uint32_t uid, const uint8_t *key)
{
    return x->uid == uid && memcmp(x->key, key, sizeof x->key) == 0;
}

bool kvq__transfer_visible(const struct kvq__transfer *x, const struct kvq__peer *peer)
{
    return has_ticket(x) && (peer->admin || is_asked_by(x, peer->uid, peer->key));
}

struct kvq__transfer *kvq__transfer_find(struct kvq__desk *desk, uint64_t id,
                                         const struct kvq__peer *peer)
{
    struct kvq__transfer *x;
    TAILQ_FOREACH (x, &desk->transfers, link)
        if (x->id == id && kvq__transfer_visible(x, peer))
            return x;
    return NULL;
}

void kvq__transfer_cancel(struct kvq__transfer *x)
{
    kvq_word_store(&x->cancel, 1);
    start_next_transfer(x->desk); // if it is queued, it ends now
}

// ---- The end ----

static void forget_transfer(struct kvq__transfer *x)
{
    TAILQ_REMOVE(&x->desk->transfers, x, link);
    free(x->path);
    free(x);
}

// Those that ended long ago, or when many have.
static void forget_old(struct kvq__desk *desk)
{
    struct kvq__transfer *x = TAILQ_FIRST(&desk->transfers), *next;
    uint64_t now = kvq_now_ns();
    uint32_t ended = 0;
    TAILQ_FOREACH (next, &desk->transfers, link)
        ended += next->phase == KVQ__TRANSFER_ENDED;
    for (; x; x = next) {
        next = TAILQ_NEXT(x, link);
        if (x->phase != KVQ__TRANSFER_ENDED)
            continue;
        if (ended > TOLD || now - x->ended > TOLD_SECONDS * 1000000000ull)
            forget_transfer(x);
        ended--;
    }
}

static void tell_transfer(const struct kvq__transfer *x)
{
    char text[KVQ_TEXT_BYTES + 16];
    struct kvq__jobs *jobs = x->desk->jobs;
    bool push = x->kind == KVQ__TRANSFER_PUSH;
    kvq__jobs_note_end(jobs, push ? KVQ__TIME_PUSH : KVQ__TIME_PULL, x->rc);
    if (x->rc < 0) {
        snprintf(text, sizeof text, "%s: %s", kvq__transfer_kind(x), x->text);
        kvq__jobs_tell(jobs, KVQ__EVENT_REMOTE_FAILED, x->ns, x->name, text);
        return;
    }
    kvq__histogram_add(&jobs->times.of[push ? KVQ__TIME_PUSH : KVQ__TIME_PULL],
                       x->ended - x->begun);
    snprintf(text, sizeof text, "%" PRIu64 " bytes, %" PRIu64 " of them transferred, in %.1f s",
             x->moved.bytes, x->moved.transferred, (double)(x->ended - x->begun) / 1e9);
    kvq__jobs_tell(jobs, push ? KVQ__EVENT_SESSION_PUSHED : KVQ__EVENT_SESSION_PULLED, x->ns,
                   x->name, text);
}

static void stop_talking(struct kvq__transfer *x)
{
    if (x->talks)
        *(has_ticket(x) ? &x->desk->n_talking : &x->desk->n_asking) -= 1;
    x->talks = false;
}

static bool is_cancelled(const struct kvq__transfer *x)
{
    return kvq_word_load(&x->cancel) || kvq_word_load(&x->desk->stop);
}

static struct kvq__transfer *of_task(struct kvq__task *t)
{
    return (struct kvq__transfer *)((char *)t - offsetof(struct kvq__transfer, task));
}

// How it has ended, with x->text if x->rc is below 0.
static void conclude(struct kvq__task *t)
{
    struct kvq__transfer *x = of_task(t);
    struct kvq__desk *desk = x->desk;
    stop_talking(x);
    x->phase = KVQ__TRANSFER_ENDED;
    x->ended = kvq_now_ns();
    TAILQ_REMOVE(&desk->transfers, x, link); // who ended first is forgotten first
    TAILQ_INSERT_TAIL(&desk->transfers, x, link);
    if (x->rc == KVQ_E_CANCELLED)
        snprintf(x->text, sizeof x->text,
                 "%s; what was transferred is kept, and the next try goes on from there",
                 kvq_word_load(&desk->stop) ? "the daemon is shutting down"
                                            : "the transfer was cancelled");
    else if (x->rc == 0)
        x->text[0] = '\0';
    else if (!x->text[0])
        snprintf(x->text, sizeof x->text, "%s", kvq_status_text(x->rc));
    if (has_ticket(x)) {
        desk->failed += x->rc < 0 && x->left;
        tell_transfer(x);
    } else {
        struct kvq__task *asker = x->asker;
        asker->rc = x->rc;
        snprintf(asker->text, sizeof asker->text, "%s", x->text);
        forget_transfer(x);
        kvq__task_wake(asker);
    }
    forget_old(desk);
    start_next_transfer(desk);
}

// ---- Talking to the remote store ----

static int watch(void *context, uint64_t done, uint64_t all)
{
    struct kvq__transfer *x = context;
    if (all > 0) {
        kvq_long_store(&x->all, all);
        kvq_long_store(&x->done, done);
    }
    return is_cancelled(x);
}

int kvq__remote_connect(const struct kvq_config *config, struct kvq__transfer *x,
                        struct kvq_remote **remote, char *text)
{
    const char *file = config->remote_keys_file, *section = config->remote_keys_section;
    const char *region = config->remote_region, *ca_file = config->remote_ca_file;
    struct kvq_remote_options o = {.endpoint = config->remote_endpoint,
                                   .bucket = config->remote_bucket,
                                   .prefix = config->remote_prefix,
                                   .region = region[0] ? region : NULL,
                                   .ca_file = ca_file[0] ? ca_file : NULL,
                                   .virtual_host = config->remote_virtual_host,
                                   .stall_ms = (uint32_t)config->remote_stall_seconds * 1000,
                                   .part_bytes = (uint32_t)config->remote_part_bytes,
                                   .connections = (uint32_t)config->remote_connections};
    if (x)
        o.watch = (struct kvq_remote_watch){watch, x};
    *remote = NULL;
    int rc = kvq_remote_keys_load(file[0] ? file : NULL, section[0] ? section : NULL, &o.keys, text,
                                  KVQ_TEXT_BYTES);
    if (rc == 0)
        rc = kvq_remote_open(&o, remote, text, KVQ_TEXT_BYTES);
    explicit_bzero(&o.keys, sizeof o.keys);
    return rc;
}

static int push_session(struct kvq__transfer *x, struct kvq_remote *remote)
{
    struct kvq__desk *desk = x->desk;
    int rc = KVQ_E_STALE;
    for (int i = 0; i < TRIES && rc == KVQ_E_STALE; i++)
        rc = kvq_remote_push(remote, desk->jobs->store, desk->folder, x->ns, x->name, x->again,
                             NULL, &x->moved, x->text, sizeof x->text);
    return rc;
}

static struct kvq_remote_pull what_of(const struct kvq__transfer *x)
{
    return (struct kvq_remote_pull){x->far_ns, x->far, x->ns, x->name, x->replace};
}

static int fetch_session(struct kvq__transfer *x, struct kvq_remote *remote)
{
    struct kvq__desk *desk = x->desk;
    struct kvq_remote_pull what = what_of(x);
    free(x->path); // of a try before
    return kvq_remote_fetch(remote, desk->jobs->store, desk->folder, &what, NULL, &x->moved,
                            &x->path, x->text, sizeof x->text);
}

static int remove_session(struct kvq__transfer *x, struct kvq_remote *remote)
{
    return kvq_remote_forget(remote, x->far_ns, x->far, x->text, sizeof x->text);
}

// What is absent, where it is the session itself: another thing that is has its sentence.
static void say_absent(struct kvq__transfer *x)
{
    struct kvq_store_session session;
    bool push = x->kind == KVQ__TRANSFER_PUSH;
    if (push && kvq_store_find(x->desk->jobs->store, x->ns, x->name, 0, &session, NULL, 0) !=
                    KVQ_E_NO_SESSION)
        return;
    snprintf(x->text, sizeof x->text,
             push ? "session \"%s\" of \"%s\" is neither in memory nor saved"
                  : "the remote store has no session \"%s\" of \"%s\"; kvqctl remote list shows "
                    "what it has",
             x->far, x->far_ns);
}

// ---- Its thread ----

static void has_talked(struct kvq__mail *mail)
{
    struct kvq__transfer *x =
        (struct kvq__transfer *)((char *)mail - offsetof(struct kvq__transfer, mail));
    kvq__task_wake(&x->task);
}

static void talk(void *context)
{
    struct kvq__transfer *x = context;
    struct kvq__server *server = x->desk->jobs->server;
    struct kvq_remote *remote = NULL;
    static int (*const jobs[])(struct kvq__transfer *, struct kvq_remote *) = {
        [KVQ__TRANSFER_PUSH] = push_session,
        [KVQ__TRANSFER_PULL] = fetch_session,
        [KVQ__TRANSFER_REMOVE] = remove_session,
        [KVQ__TRANSFER_LIST] = kvq__transfer_list,
    };
    x->rc = kvq__remote_connect(&server->config, x, &remote, x->text);
    if (x->rc == 0)
        x->rc = jobs[x->kind](x, remote);
    kvq_remote_close(&remote);
    x->left |= x->rc != KVQ_E_NO_SESSION;
    if (x->rc == KVQ_E_NO_SESSION)
        say_absent(x);
    if (x->rc == KVQ_E_PERMISSION) // it is the daemon who may not, not who asked
        x->rc = KVQ_E_REMOTE;
    kvq__mailbox_post(&server->box, &x->mail, has_talked);
}

static int talk_to_remote(struct kvq__transfer *x)
{
    x->phase = KVQ__TRANSFER_TALKING;
    int error = uv_thread_create(&x->thread, talk, x);
    if (error != 0) {
        snprintf(x->text, sizeof x->text, "a thread for the transfer cannot be made: %s",
                 uv_strerror(error));
        return KVQ_E_SYSTEM;
    }
    kvq__task_wait(&x->task);
    uv_thread_join(&x->thread);
    return x->rc;
}

// ---- From beginning to end: its task ----

// What is in memory and not saved. If it is not in memory, what was saved before is what there is.
static int save_first(struct kvq__transfer *x)
{
    struct kvq__task *t = &x->task;
    x->phase = KVQ__TRANSFER_SAVING;
    kvq__jobs_save(t);
    kvq__task_end_turn(t);
    if (t->rc == KVQ_E_NO_SESSION)
        t->rc = 0;
    if (t->rc < 0)
        snprintf(x->text, sizeof x->text, "%s", t->text);
    return t->rc;
}

// Waits for one of the threads that talk.
static int stand_in_line(struct kvq__transfer *x)
{
    x->phase = KVQ__TRANSFER_QUEUED;
    x->in_line = true;
    start_next_transfer(x->desk);
    if (x->in_line)
        kvq__task_wait(&x->task);
    assert(!x->in_line && (x->talks || is_cancelled(x)));
    return x->talks ? 0 : KVQ_E_CANCELLED;
}

// The same, once more where a full disk had no room for the file, and some could be made.
static int talk_with_room(struct kvq__transfer *x)
{
    int rc = talk_to_remote(x);
    if (rc == KVQ_E_NO_SPACE && clear_leftovers(&x->task, x, UINT64_MAX / 2))
        rc = talk_to_remote(x);
    return rc;
}

// Poller's thread, with the name held alone.
static void refuse_to_replace(struct kvq__task *t)
{
    t->rc = kvq__jobs_refuse_here(t);
}

static void import(struct kvq__task *t)
{
    struct kvq__transfer *x = of_task(t);
    struct kvq_remote_pull what = what_of(x);
    const struct kvq_remote_watch looks_on = {watch, x};
    struct kvq_store *store = t->jobs->store;
    t->rc = kvq_remote_take(store, &what, x->path, &looks_on, t->text, sizeof t->text);
    if (kvq__jobs_help(t, x->moved.bytes))
        t->rc = kvq_remote_take(store, &what, x->path, &looks_on, t->text, sizeof t->text);
}

// What was fetched becomes one of the store's sessions.
static int import_fetched(struct kvq__transfer *x)
{
    struct kvq__task *t = &x->task;
    stop_talking(x);
    x->phase = KVQ__TRANSFER_WAITING;
    start_next_transfer(x->desk);
    t->doing = "importing";
    kvq__task_take_name(t, KVQ__HOLD_ALONE);
    x->phase = KVQ__TRANSFER_IMPORTING;
    kvq__task_at_poller(t, refuse_to_replace);
    if (t->rc == 0) {
        kvq__task_take_turn(t);
        kvq__task_at_work(t, import);
        if (t->rc == KVQ_E_NO_SPACE && clear_leftovers(t, x, x->moved.bytes))
            kvq__task_at_work(t, import);
    }
    if (t->rc == 0)
        kvq__task_at_poller(t, kvq__jobs_keep);
    kvq__task_end_turn(t);
    if (t->rc < 0)
        snprintf(x->text, sizeof x->text, "%s", t->text);
    return t->rc;
}

static void transfer(struct kvq__task *t)
{
    struct kvq__transfer *x = of_task(t);
    int rc = is_cancelled(x) ? KVQ_E_CANCELLED : 0;
    if (rc == 0 && x->kind == KVQ__TRANSFER_PUSH)
        rc = save_first(x);
    if (rc == 0)
        rc = stand_in_line(x);
    if (rc == 0)
        rc = talk_with_room(x);
    if (rc == 0 && x->kind == KVQ__TRANSFER_PULL)
        rc = is_cancelled(x) ? KVQ_E_CANCELLED : import_fetched(x);
    x->rc = rc;
}

// ---- Sweeping ----

static void sweep(uv_work_t *work)
{
    const struct kvq__desk *desk = work->data;
    kvq_remote_sweep(desk->folder, NULL, KVQ__LEFT_SECONDS, KVQ__LEFT_FILES);
}

static void swept(uv_work_t *work, int status)
{
    struct kvq__desk *desk = work->data;
    (void)status;
    desk->sweeping = false;
    desk->jobs->n_tasks--;
    start_next_transfer(desk);
}

// Nothing but perhaps this transfer uses the folder: neither threads, from when they are given out,
// nor imports.
static bool is_folder_free(const struct kvq__desk *desk, const struct kvq__transfer *but)
{
    const struct kvq__transfer *x;
    TAILQ_FOREACH (x, &desk->transfers, link)
        if (x != but && has_ticket(x) &&
            (x->talks || x->phase == KVQ__TRANSFER_WAITING || x->phase == KVQ__TRANSFER_IMPORTING))
            return false;
    return true;
}

static void start_sweep(struct kvq__desk *desk)
{
    desk->sweeping = true;
    desk->failed = 0;
    desk->jobs->n_tasks++;
    desk->sweep.data = desk;
    uv_queue_work(&desk->jobs->server->loop, &desk->sweep, sweep, swept);
}

// On a thread of libuv's. What is left may spare a later try a transfer, so it stays where the disk
// has the room, and it is the store's cap that a save has met.
static void sweep_for_room(struct kvq__task *t)
{
    struct kvq__desk *desk = t->jobs->desk;
    struct statvfs st;
    if (statvfs(desk->folder, &st) == 0 && (uint64_t)st.f_bavail * st.f_frsize < desk->wanted)
        desk->swept = kvq_remote_sweep(desk->folder, desk->kept, 0, 0);
}

// own: a transfer whose task this is, which goes on with the file that it has; NULL: none.
static bool clear_leftovers(struct kvq__task *t, const struct kvq__transfer *own, uint64_t bytes)
{
    struct kvq__desk *desk = t->jobs->desk;
    char quoted[sizeof desk->folder + 16];
    if (!desk || desk->sweeping || !is_folder_free(desk, own))
        return false;
    desk->sweeping = true;
    desk->wanted = bytes + KVQ__SPARE_BYTES;
    desk->kept = own ? own->path : NULL;
    desk->swept = 0;
    kvq__task_at_work(t, sweep_for_room);
    bool swept = desk->swept > 0;
    if (swept) {
        desk->failed = 0;
        kvq__log(KVQ_LOG_INFO, "leftovers_removed", "folder=%s bytes=%llu",
                 kvq__log_quote(quoted, sizeof quoted, desk->folder),
                 (unsigned long long)desk->swept);
    }
    desk->sweeping = false;
    start_next_transfer(desk);
    return swept;
}

bool kvq__transfers_make_room(struct kvq__task *t, uint64_t bytes)
{
    return clear_leftovers(t, NULL, bytes);
}

// ---- Who talks next ----

static bool may_begin(const struct kvq__desk *desk, const struct kvq__transfer *x)
{
    if (!x->in_line)
        return false;
    if (is_cancelled(x))
        return true;
    if (!has_ticket(x))
        return desk->n_asking < ASK_AT_ONCE;
    return desk->n_talking < TALK_AT_ONCE && !desk->sweeping && desk->failed < KVQ__LEFT_FILES;
}

// One that is cancelled leaves the line without a thread.
static void leave_line(struct kvq__transfer *x)
{
    x->in_line = false;
    x->talks = !is_cancelled(x);
    if (x->talks)
        *(has_ticket(x) ? &x->desk->n_talking : &x->desk->n_asking) += 1;
    if (x->task.fiber.state == KVQ__FIBER_WAITING)
        kvq__task_wake(&x->task);
}

// Whether one talks already of who asked for this one.
static bool asker_talks(const struct kvq__desk *desk, const struct kvq__transfer *x)
{
    const struct kvq__transfer *other;
    TAILQ_FOREACH (other, &desk->transfers, link)
        if (other->talks && has_ticket(other) && is_asked_by(other, x->uid, x->key))
            return true;
    return false;
}

// The first of somebody of whom none talks, or else the first: whoever has many leaves others their
// turn.
static struct kvq__transfer *next_to_begin(struct kvq__desk *desk)
{
    struct kvq__transfer *x, *first = NULL;
    TAILQ_FOREACH (x, &desk->transfers, link) {
        if (!may_begin(desk, x))
            continue;
        if (!asker_talks(desk, x))
            return x;
        first = first ? first : x;
    }
    return first;
}

static void start_next_transfer(struct kvq__desk *desk)
{
    struct kvq__transfer *x;
    if (desk->failed >= KVQ__LEFT_FILES && !desk->sweeping && is_folder_free(desk, NULL))
        start_sweep(desk);
    while ((x = next_to_begin(desk)))
        leave_line(x);
}

static bool transfers_clash(const struct kvq__transfer *a, const struct kvq__transfer *b)
{
    bool here = a->ns[0] && strcmp(a->ns, b->ns) == 0 && strcmp(a->name, b->name) == 0;
    bool there = strcmp(a->far_ns, b->far_ns) == 0 && strcmp(a->far, b->far) == 0;
    return here || there;
}

// Whether there is room for one more, so that one user or key leaves some to the others.
static int check_room(const struct kvq__desk *desk, const struct kvq__transfer *x, char *text)
{
    const struct kvq__transfer *other;
    uint32_t all = 0, own = 0, most = has_ticket(x) ? MOST : MOST_ASKS;
    uint32_t most_own = has_ticket(x) ? MOST_OF_ONE : MOST_ASKS_OF_ONE;
    TAILQ_FOREACH (other, &desk->transfers, link) {
        bool alike = other->phase != KVQ__TRANSFER_ENDED && has_ticket(other) == has_ticket(x);
        all += alike;
        own += alike && is_asked_by(other, x->uid, x->key);
    }
    if (all < most && own < most_own)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "%u requests to the remote store are under way, %u of them yours; at most %u and %u "
             "may be: wait until some have ended",
             all, own, most, most_own);
    return KVQ_E_LIMIT;
}

int kvq__transfer_add(struct kvq__desk *desk, struct kvq__transfer *x, char *text)
{
    const struct kvq__transfer *other;
    TAILQ_FOREACH (other, &desk->transfers, link) {
        if (x->kind == KVQ__TRANSFER_LIST || other->kind == KVQ__TRANSFER_LIST ||
            other->phase == KVQ__TRANSFER_ENDED || !transfers_clash(x, other))
            continue;
        snprintf(text, KVQ_TEXT_BYTES,
                 "a %s of session \"%s\" is under way (%s); wait until it has ended",
                 kvq__transfer_kind(other), x->name[0] ? x->name : x->far,
                 kvq__transfer_phase(other));
        return KVQ_E_BUSY;
    }
    int rc = check_room(desk, x, text);
    rc = rc ? rc : kvq__task_make(desk->jobs, &x->task);
    if (rc == KVQ_E_NO_MEMORY)
        snprintf(text, KVQ_TEXT_BYTES, "no memory for a transfer");
    if (rc < 0)
        return rc;
    x->desk = desk;
    x->task.peer = &self;
    x->task.done = conclude;
    snprintf(x->task.ns, sizeof x->task.ns, "%s", x->ns);
    snprintf(x->task.name, sizeof x->task.name, "%s", x->name);
    x->id = ++desk->last_id;
    x->phase = KVQ__TRANSFER_QUEUED;
    x->begun = kvq_now_ns();
    TAILQ_INSERT_TAIL(&desk->transfers, x, link);
    kvq__task_start(&x->task, transfer);
    return 0;
}

void kvq__transfers_stop(struct kvq__jobs *jobs)
{
    struct kvq__desk *desk = jobs->desk;
    if (!desk || kvq_word_load(&desk->stop))
        return;
    kvq_word_store(&desk->stop, 1);
    start_next_transfer(desk); // those that are queued end now
}
