// SPDX-License-Identifier: Apache-2.0
//
// How a task goes from thread to thread, waits (for its name, its turn, room) and ends.
#include <assert.h>

#include "daemon/commands/dispatch.h"
#include "daemon/store/internal.h"

// ---- Tasks ----

static struct kvq__task *of_mail(struct kvq__mail *mail)
{
    return (struct kvq__task *)((char *)mail - offsetof(struct kvq__task, mail));
}

static void deliver(struct kvq__mail *mail)
{
    struct kvq__task *t = of_mail(mail);
    t->step(t);
}

static void deliver_back(struct kvq__mail *mail)
{
    of_mail(mail)->at_poller = false;
    deliver(mail);
}

void kvq__task_to_poller(struct kvq__task *t, void (*step)(struct kvq__task *task))
{
    t->at_poller = true;
    t->step = step;
    kvq__mailbox_post(kvq__poller_box(t->jobs->server->poller), &t->mail, deliver);
}

void kvq__task_to_loop(struct kvq__task *t, void (*step)(struct kvq__task *task))
{
    t->step = step;
    kvq__mailbox_post(&t->jobs->server->box, &t->mail, deliver_back);
}

static void work(uv_work_t *work)
{
    struct kvq__task *t = kvq__task_of(work);
    t->step(t);
}

void kvq__task_to_work(struct kvq__task *t, void (*step)(struct kvq__task *task),
                       uv_after_work_cb after)
{
    t->step = step;
    t->work.data = t;
    int error = uv_queue_work(&t->jobs->server->loop, &t->work, work, after);
    assert(error == 0); // only for what is none of libuv's
    (void)error;
}

// ---- Waiting for room in memory ----

enum { ROOM_MS = 3 }; // so often a session that waits for room is tried again

static void look_for_room_again(uv_timer_t *timer)
{
    struct kvq__jobs *jobs = timer->data;
    struct kvq__task *t;
    while ((t = TAILQ_FIRST(&jobs->roomless))) {
        TAILQ_REMOVE(&jobs->roomless, t, room_link);
        kvq__task_to_poller(t, t->later);
    }
}

static void wait_for_room(struct kvq__task *t)
{
    TAILQ_INSERT_TAIL(&t->jobs->roomless, t, room_link);
    if (!uv_is_active((const uv_handle_t *)&t->jobs->room))
        uv_timer_start(&t->jobs->room, look_for_room_again, ROOM_MS, 0);
}

void kvq__task_later(struct kvq__task *t, void (*step)(struct kvq__task *task))
{
    t->later = step;
    kvq__task_to_loop(t, wait_for_room);
}

// ---- Whose turn it is ----

static void has_turn(struct kvq__write_turn *turn)
{
    struct kvq__task *t = kvq__task_of_turn(turn);
    t->step(t);
}

void kvq__task_queue(struct kvq__task *t, void (*step)(struct kvq__task *task))
{
    t->writes = true;
    t->counted = false;
    t->step = step;
    kvq__turn_wait(&t->jobs->turns, &t->turn, t->ns, has_turn);
}

static void has_name(struct kvq__hold *hold)
{
    struct kvq__task *t = (struct kvq__task *)((char *)hold - offsetof(struct kvq__task, hold));
    t->step(t);
}

void kvq__task_name(struct kvq__task *t, enum kvq__hold_kind kind,
                    void (*step)(struct kvq__task *task))
{
    t->hold.kind = kind;
    t->step = step;
    kvq__name_take(&t->jobs->names, &t->hold, t->ns, t->name, has_name);
}

void kvq__task_step_aside(struct kvq__task *t)
{
    t->writes = false; // nothing was
    kvq__name_give(&t->jobs->names, &t->hold);
    if (t->turn.queued)
        kvq__turn_end(&t->jobs->turns, &t->turn);
}

void kvq__task_end(struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    if (t->writes && !t->counted) {
        kvq__jobs_count(t);
        return;
    }
    jobs->untidy |= t->writes;
    kvq__task_step_aside(t);
    jobs->n_tasks--;
    if (t->reply && t->rc < 0)
        kvq__reply_status(t->reply, t->arena, t->rc, t->text);
    t->done(t);
}
