// SPDX-License-Identifier: Apache-2.0
//
// What the core wants so that sessions can be parked (saved.h): the poller takes its jobs and
// sends each to the loop as a task, which writes, reads or deletes as commands do.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log/log.h"
#include "daemon/store/internal.h"

enum { SWEEP_MOST = 512 }; // unnamed sessions that one transaction deletes

// A task that carries a job out, allocated.
struct job_task {
    struct kvq__task task;
    struct kvq__store_job job;
};

static const struct kvq__peer self = {.admin = true};

static struct kvq__jobs *of_wants(struct kvq__mail *mail)
{
    return (struct kvq__jobs *)((char *)mail - offsetof(struct kvq__jobs, wants_mail));
}

// ---- Jobs ----

static void job_done(struct kvq__task *t)
{
    free((struct job_task *)t); // its first member
}

// Poller's thread: it is not carried out.
static void refuse_job(struct kvq__core *core, const struct kvq__store_job *o, int status,
                       const char *text)
{
    switch (o->kind) {
    case KVQ__JOB_SAVE:
        kvq__park_saved(core, o->id, status, text);
        break;
    case KVQ__JOB_FETCH:
        kvq__fetch_failed(core, o->id, status, text);
        break;
    case KVQ__JOB_FORGET:
        kvq__park_forgot(core, o, KVQ__FORGET_FAILED);
        break;
    }
}

static void refuse_late(struct kvq__task *t)
{
    refuse_job(t->jobs->server->core, t->job, KVQ_E_DRAINING, "the daemon is shutting down");
}

// ---- Saving ----

// What counts as stored may have been replaced or damaged since.
static void look_at_parked(struct kvq__task *t)
{
    t->again =
        !kvq__jobs_is_whole(t, t->job->stamp) || (t->name[0] == '#' && kvq__jobs_read_back(t) != 0);
    t->text[0] = 0;
}

// Poller's thread.
static void is_stored(struct kvq__task *t)
{
    kvq__park_saved(t->jobs->server->core, t->job->id, 0, "");
}

static void save_parked(struct kvq__task *t)
{
    if (t->job->stored) {
        kvq__task_at_work(t, look_at_parked);
        if (!t->again) {
            kvq__task_at_poller(t, is_stored);
            return;
        }
    }
    kvq__jobs_save(t);
}

// ---- Forgetting ----

// Only what was stored to be parked: another save of that name may have taken its place.
static void delete_parked(struct kvq__task *t)
{
    struct kvq_store_freed freed;
    uint64_t stamp = 0;
    t->rc = kvq__jobs_stamp(t, &stamp);
    if (t->rc < 0 || stamp != t->job->stamp)
        return;
    t->rc = kvq_store_delete(t->jobs->store, t->ns, t->name, t->text, sizeof t->text);
    if (t->rc == 0)
        kvq_store_gc(t->jobs->store, &freed, NULL, 0);
}

// Poller's thread.
static void forgot(struct kvq__task *t)
{
    const bool gone = t->rc == 0 || t->rc == KVQ_E_NO_SESSION;
    t->quiet = !kvq__park_forgot(t->jobs->server->core, t->job,
                                 gone ? KVQ__FORGET_GONE : KVQ__FORGET_FAILED);
}

// Poller's thread.
static void say_in_use(struct kvq__task *t)
{
    kvq__park_forgot(t->jobs->server->core, t->job, KVQ__FORGET_IN_USE);
}

// Poller's thread, with the name held alone: whoever has imported a copy since has called it off.
static void look_at_order(struct kvq__task *t)
{
    assert(t->hold.held && t->job->kind == KVQ__JOB_FORGET);
    t->quiet = !kvq__park_forgotten(t->jobs->server->core, t->job->ns, t->job->name, t->job->stamp);
}

// An order that waits for a name keeps no other one waiting. There are no more of these than names
// in use.
static void forget_parked(struct kvq__task *t)
{
    char quoted[KVQ_TEXT_BYTES + 16], name[KVQ_NAME_BYTES + 16];
    if (!kvq__name_is_free(&t->jobs->names, t->ns, t->name))
        kvq__task_at_poller(t, say_in_use);
    kvq__task_take_name(t, KVQ__HOLD_ALONE);
    kvq__task_at_poller(t, look_at_order);
    if (t->quiet)
        return;
    kvq__task_take_turn(t);
    kvq__task_at_work(t, delete_parked);
    kvq__task_at_poller(t, forgot);
    if (!t->quiet)
        kvq__log(KVQ_LOG_WARN, "not_forgotten", "session=%s text=%s",
                 kvq__log_quote(name, sizeof name, t->name),
                 kvq__log_quote(quoted, sizeof quoted, t->text));
}

void kvq__jobs_forget_last(struct kvq__jobs *jobs)
{
    char name[KVQ_NAME_BYTES + 16];
    struct job_task *e = jobs && jobs->store ? calloc(1, sizeof *e) : NULL;
    while (e && kvq__park_last_forget(jobs->server->core, &e->job)) {
        e->task = (struct kvq__task){.jobs = jobs, .job = &e->job};
        snprintf(e->task.ns, sizeof e->task.ns, "%s", e->job.ns);
        snprintf(e->task.name, sizeof e->task.name, "%s", e->job.name);
        delete_parked(&e->task);
        if (e->task.rc < 0 && e->task.rc != KVQ_E_NO_SESSION)
            kvq__log(KVQ_LOG_WARN, "not_forgotten", "session=%s status=%s",
                     kvq__log_quote(name, sizeof name, e->task.name), kvq_status_name(e->task.rc));
    }
    free(e);
}

// ---- From the poller to the loop ----

static void carry_out(struct kvq__task *t)
{
    if (t->jobs->ended)
        kvq__task_at_poller(t, refuse_late);
    else if (t->job->kind == KVQ__JOB_SAVE)
        save_parked(t);
    else if (t->job->kind == KVQ__JOB_FETCH)
        kvq__jobs_fetch(t);
    else
        forget_parked(t);
}

static void has_come(struct kvq__mail *mail)
{
    struct kvq__task *t = (struct kvq__task *)((char *)mail - offsetof(struct kvq__task, mail));
    kvq__task_start(t, carry_out);
}

static void send_on(struct kvq__jobs *jobs, const struct kvq__store_job *job)
{
    struct job_task *e = calloc(1, sizeof *e);
    if (!e || kvq__task_make(jobs, &e->task) < 0) {
        refuse_job(jobs->server->core, job, KVQ_E_NO_MEMORY, "no memory to do what it takes");
        free(e);
        return;
    }
    e->job = *job;
    e->task.peer = &self;
    e->task.done = job_done;
    e->task.job = &e->job;
    snprintf(e->task.ns, sizeof e->task.ns, "%s", job->ns);
    snprintf(e->task.name, sizeof e->task.name, "%s", job->name);
    kvq__mailbox_post(&jobs->server->box, &e->task.mail, has_come);
}

// Poller's thread.
static void take_orders(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_wants(mail);
    struct kvq__store_job job;
    jobs->wanted = false;
    while (!jobs->deaf && kvq__park_next(jobs->server->core, &job))
        send_on(jobs, &job);
}

void kvq__jobs_wants(struct kvq__jobs *jobs)
{
    if (!jobs || jobs->deaf || jobs->wanted)
        return;
    jobs->wanted = true;
    kvq__mailbox_post(kvq__poller_box(jobs->server->poller), &jobs->wants_mail, take_orders);
}

// ---- The end: what was sent before arrives before ----

static struct kvq__jobs *of_stop(struct kvq__mail *mail)
{
    return (struct kvq__jobs *)((char *)mail - offsetof(struct kvq__jobs, stop_mail));
}

static void stopped(struct kvq__mail *mail)
{
    of_stop(mail)->n_tasks--;
}

// Poller's thread.
static void stop(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_stop(mail);
    jobs->deaf = true;
    kvq__mailbox_post(&jobs->server->box, mail, stopped);
}

void kvq__jobs_stop_orders(struct kvq__jobs *jobs)
{
    if (!jobs->server->poller)
        return;
    jobs->n_tasks++;
    kvq__mailbox_post(kvq__poller_box(jobs->server->poller), &jobs->stop_mail, stop);
}

// ---- What a run before has left ----

// Any thread, in the turn of a task that writes. How many; none that cannot be deleted. ns NULL: of
// all namespaces.
static uint32_t sweep_some(struct kvq__jobs *jobs, const char *ns, char *text, int *rc)
{
    uint32_t n = 0;
    *rc = kvq_store_sweep(jobs->store, ns, SWEEP_MOST, &n, text, KVQ_TEXT_BYTES);
    jobs->swept += n;
    return n;
}

uint32_t kvq__jobs_sweep_all(struct kvq__jobs *jobs, const char *ns)
{
    char text[KVQ_TEXT_BYTES];
    uint32_t sum = 0, n;
    int rc;
    while (!kvq__jobs_look_for_end(jobs, 0, 0) && (n = sweep_some(jobs, ns, text, &rc)) > 0)
        sum += n;
    return sum;
}

struct sweep {
    struct kvq__task task;
    uint32_t n, all; // just now, and since the store was opened
};

static struct sweep *sweep_of(struct kvq__task *t)
{
    return (struct sweep *)t; // its first member
}

// On a thread of libuv's.
static void sweep_at_work(struct kvq__task *t)
{
    struct kvq_store_freed freed;
    sweep_of(t)->n = sweep_some(t->jobs, NULL, t->text, &t->rc);
    sweep_of(t)->all = t->jobs->swept;
    if (sweep_of(t)->n == 0 && t->rc == 0 && sweep_of(t)->all)
        kvq_store_gc(t->jobs->store, &freed, NULL, 0);
}

static void sweep_parked(struct kvq__task *t)
{
    kvq__task_take_turn(t);
    kvq__task_at_work(t, sweep_at_work);
}

// They take room, and do no harm: what cannot be deleted stays until the next start.
static void sweep_done(struct kvq__task *t)
{
    char quoted[KVQ_TEXT_BYTES + 16];
    struct kvq__jobs *jobs = t->jobs;
    jobs->sweeping = false;
    jobs->unswept = sweep_of(t)->n > 0;
    if (t->rc < 0 && t->rc != KVQ_E_READ_ONLY)
        kvq__log(KVQ_LOG_WARN, "storage", "text=%s",
                 kvq__log_quote(quoted, sizeof quoted, t->text));
    if (!jobs->unswept && sweep_of(t)->all)
        kvq__log(KVQ_LOG_INFO, "storage", "unnamed_sessions_deleted=%u", sweep_of(t)->all);
    free(sweep_of(t));
    kvq__jobs_sweep(jobs);
}

void kvq__jobs_sweep(struct kvq__jobs *jobs)
{
    if (!jobs->unswept || jobs->sweeping || jobs->ended || jobs->draining)
        return;
    struct sweep *s = calloc(1, sizeof *s);
    if (!s || kvq__task_make(jobs, &s->task) < 0) {
        free(s);
        return;
    }
    jobs->sweeping = true;
    s->task.peer = &self;
    s->task.done = sweep_done;
    s->task.doing = "deleting what an earlier run has parked";
    kvq__task_start(&s->task, sweep_parked);
}
