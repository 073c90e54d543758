// SPDX-License-Identifier: Apache-2.0
//
// Tasks whose sessions wait for room in memory: every few milliseconds they look again.
#include "daemon/store/internal.h"

enum { ROOM_MS = 3 };

static void look_for_room_again(uv_timer_t *timer)
{
    struct kvq__jobs *jobs = timer->data;
    struct kvq__task *t;
    while ((t = TAILQ_FIRST(&jobs->roomless))) {
        TAILQ_REMOVE(&jobs->roomless, t, room_link);
        kvq__task_to_poller(t, t->later);
    }
}

static void wait(struct kvq__task *t)
{
    TAILQ_INSERT_TAIL(&t->jobs->roomless, t, room_link);
    if (!uv_is_active((const uv_handle_t *)&t->jobs->room))
        uv_timer_start(&t->jobs->room, look_for_room_again, ROOM_MS, 0);
}

void kvq__task_later(struct kvq__task *t, void (*step)(struct kvq__task *task))
{
    t->later = step;
    kvq__task_to_loop(t, wait);
}
