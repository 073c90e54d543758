// SPDX-License-Identifier: Apache-2.0
//
// See watchdog.h.
#include "daemon/runtime/watchdog.h"

#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

static struct kvq__watchdog *watchdog_of(struct kvq__mail *mail)
{
    return (struct kvq__watchdog *)((char *)mail - offsetof(struct kvq__watchdog, mail));
}

static void come_back(struct kvq__mail *mail)
{
    struct kvq__watchdog *w = watchdog_of(mail);
    assert(w->away);
    w->away = false;
}

// The watched thread.
static void turn_round(struct kvq__mail *mail)
{
    kvq__mailbox_post(watchdog_of(mail)->here, mail, come_back);
}

static void send_out(struct kvq__watchdog *w)
{
    assert(!w->away);
    w->away = true;
    kvq__mailbox_post(w->there, &w->mail, turn_round);
}

void kvq__watchdog_begin(struct kvq__watchdog *w, struct kvq__mailbox *there,
                         struct kvq__mailbox *here)
{
    *w = (struct kvq__watchdog){.there = there, .here = here};
    send_out(w);
}

bool kvq__watchdog_look(struct kvq__watchdog *w)
{
    if (w->away)
        return false;
    send_out(w);
    return true;
}

static uint64_t whole_number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    return errno || *text < '0' || *text > '9' || *end ? 0 : number;
}

uint64_t kvq__watchdog_usec(const char *usec, const char *pid)
{
    if (!usec || (pid && whole_number(pid) != (uint64_t)getpid()))
        return 0;
    return whole_number(usec);
}
