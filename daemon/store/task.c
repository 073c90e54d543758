// SPDX-License-Identifier: Apache-2.0
//
// How a task runs, waits (for another thread, its name, its turn, time to pass) and ends.
#include <assert.h>
#include <stdio.h>

#include "daemon/commands/dispatch.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

// ---- From beginning to end ----

int kvq__task_make(struct kvq__jobs *jobs, struct kvq__task *t)
{
    t->jobs = jobs;
    int rc = kvq__fiber_make(&jobs->fibers, &t->fiber);
    if (rc < 0)
        snprintf(t->text, sizeof t->text, "no memory to do it: the daemon has none for a stack");
    return rc;
}

static void run_task(void *context)
{
    struct kvq__task *t = context;
    t->run(t);
    kvq__task_end_turn(t);
}

static void end_task(void *context)
{
    struct kvq__task *t = context;
    assert(!t->hold.queued && !t->turns && !t->at_poller && t->jobs->n_tasks > 0);
    t->jobs->n_tasks--;
    if (t->reply && t->rc < 0)
        kvq__reply_status(t->reply, t->arena, t->rc, t->text);
    t->done(t);
}

void kvq__task_start(struct kvq__task *t, void (*run)(struct kvq__task *task))
{
    assert(t->jobs && t->done && !t->turns && !t->hold.queued);
    t->run = run;
    t->jobs->n_tasks++;
    kvq__fiber_run(&t->jobs->fibers, &t->fiber, run_task, end_task, t);
}

void kvq__task_wait(struct kvq__task *t)
{
    assert(t->jobs->fibers.now == &t->fiber); // only the task itself can wait
    kvq__fiber_wait(&t->jobs->fibers);
}

void kvq__task_wake(struct kvq__task *t)
{
    kvq__fiber_wake(&t->jobs->fibers, &t->fiber);
}

// ---- Waiting for another thread ----

static struct kvq__task *of_mail(struct kvq__mail *mail)
{
    return (struct kvq__task *)((char *)mail - offsetof(struct kvq__task, mail));
}

static void is_back(struct kvq__mail *mail)
{
    struct kvq__task *t = of_mail(mail);
    t->at_poller = false;
    kvq__task_wake(t);
}

static void send_back(struct kvq__task *t)
{
    kvq__mailbox_post(&t->jobs->server->box, &t->mail, is_back);
}

static void call_at_poller(struct kvq__mail *mail)
{
    struct kvq__task *t = of_mail(mail);
    t->call(t);
    send_back(t);
}

static void call_piece(struct kvq__mail *mail)
{
    struct kvq__task *t = of_mail(mail);
    if (t->piece(t))
        send_back(t);
    else
        kvq__mailbox_post(kvq__poller_box(t->jobs->server->poller), &t->mail, call_piece);
}

static void go_to_poller(struct kvq__task *t, void (*deliver)(struct kvq__mail *mail))
{
    assert(!t->at_poller);
    t->at_poller = true;
    kvq__mailbox_post(kvq__poller_box(t->jobs->server->poller), &t->mail, deliver);
    kvq__task_wait(t);
    assert(!t->at_poller);
}

void kvq__task_at_poller(struct kvq__task *t, void (*call)(struct kvq__task *task))
{
    t->call = call;
    go_to_poller(t, call_at_poller);
}

void kvq__task_at_poller_in_pieces(struct kvq__task *t, bool (*piece)(struct kvq__task *task))
{
    t->piece = piece;
    go_to_poller(t, call_piece);
}

static void call_at_work(uv_work_t *work)
{
    struct kvq__task *t = work->data;
    t->call(t);
}

static void has_worked(uv_work_t *work, int status)
{
    (void)status; // nobody cancels it
    kvq__task_wake(work->data);
}

void kvq__task_at_work(struct kvq__task *t, void (*call)(struct kvq__task *task))
{
    t->call = call;
    t->work.data = t;
    int error = uv_queue_work(&t->jobs->server->loop, &t->work, call_at_work, has_worked);
    assert(error == 0); // only for what is none of libuv's
    (void)error;
    kvq__task_wait(t);
}

// ---- Waiting for time to pass ----

static void wake_sleepers(uv_timer_t *timer)
{
    struct kvq__jobs *jobs = timer->data;
    struct kvq__tasks due = TAILQ_HEAD_INITIALIZER(due);
    struct kvq__task *t = TAILQ_FIRST(&jobs->sleepers), *next;
    uint64_t now = kvq_now_ns(), first = UINT64_MAX;
    for (; t; t = next) {
        next = TAILQ_NEXT(t, sleep_link);
        if (t->wake_at > now) {
            first = t->wake_at < first ? t->wake_at : first;
            continue;
        }
        TAILQ_REMOVE(&jobs->sleepers, t, sleep_link);
        TAILQ_INSERT_TAIL(&due, t, sleep_link);
    }
    if (first != UINT64_MAX)
        uv_timer_start(timer, wake_sleepers, (first - now) / 1000000 + 1, 0);
    while ((t = TAILQ_FIRST(&due))) { // which may sleep again
        TAILQ_REMOVE(&due, t, sleep_link);
        kvq__task_wake(t);
    }
}

void kvq__task_sleep(struct kvq__task *t, uint64_t ms)
{
    struct kvq__jobs *jobs = t->jobs;
    assert(jobs->timers);
    t->wake_at = kvq_now_ns() + ms * 1000000;
    TAILQ_INSERT_TAIL(&jobs->sleepers, t, sleep_link);
    if (!uv_is_active((const uv_handle_t *)&jobs->alarm) || uv_timer_get_due_in(&jobs->alarm) > ms)
        uv_timer_start(&jobs->alarm, wake_sleepers, ms, 0);
    kvq__task_wait(t);
}

// ---- Waiting for a name, or a turn ----

static void has_name(struct kvq__hold *hold)
{
    struct kvq__task *t = (struct kvq__task *)((char *)hold - offsetof(struct kvq__task, hold));
    if (t->fiber.state == KVQ__FIBER_WAITING) // else it need not wait
        kvq__task_wake(t);
}

void kvq__task_take_name(struct kvq__task *t, enum kvq__hold_kind kind)
{
    assert(!t->turns); // a name is taken before a turn is waited for
    t->hold.kind = kind;
    kvq__name_take(&t->jobs->names, &t->hold, t->ns, t->name, has_name);
    if (!t->hold.held)
        kvq__task_wait(t);
    assert(t->hold.held);
}

static void has_turn(struct kvq__write_turn *turn)
{
    struct kvq__task *t = kvq__task_of_turn(turn);
    t->has_turn = true;
    if (t->fiber.state == KVQ__FIBER_WAITING)
        kvq__task_wake(t);
}

void kvq__task_take_turn_of(struct kvq__task *t, struct kvq__turns *turns, const char *ns)
{
    assert(!t->turns && !t->has_turn);
    t->turns = turns;
    kvq__turn_wait(turns, &t->turn, ns, has_turn);
    if (!t->has_turn)
        kvq__task_wait(t);
    assert(t->has_turn || t->along);
}

void kvq__task_take_turn(struct kvq__task *t)
{
    t->writes = true;
    kvq__task_take_turn_of(t, &t->jobs->turns, t->ns);
}

void kvq__task_go_along(struct kvq__task *t)
{
    assert(t->turns && !t->has_turn && t->hold.held);
    kvq__turn_leave(t->turns, &t->turn);
    t->turns = NULL;
    t->writes = false; // whoever writes it counts that
    t->along = true;
}

void kvq__task_end_turn(struct kvq__task *t)
{
    if (t->writes)
        kvq__jobs_count(t);
    t->jobs->untidy |= t->writes;
    kvq__task_step_aside(t);
}

void kvq__task_step_aside(struct kvq__task *t)
{
    t->writes = false; // nothing was
    kvq__name_give(&t->jobs->names, &t->hold);
    if (t->turns)
        kvq__turn_end(t->turns, &t->turn);
    t->turns = NULL;
    t->has_turn = false;
}
