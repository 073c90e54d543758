// SPDX-License-Identifier: Apache-2.0
//
// A fixed number of event mails; a word in each says whose it is.
#include "daemon/runtime/events.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/log/log.h"
#include "daemon/runtime/history.h"
#include "daemon/runtime/server.h"
#include "proto/sync.h"

// Of these mails the last ones are kept for what is a warning or worse, and half of all for what is
// more than a detail.
enum { EVENTS = 256, KEPT = 32, KEPT_FROM_DETAILS = EVENTS / 2 };

struct event_mail {
    struct kvq__mail mail;
    struct kvq__server *server;
    uint32_t taken; // 1 from the poller's posting until the loop is done with it
    uint32_t lost;  // events that were dropped since the one before
    enum kvq__event_kind kind;
    uint64_t client;
    char ns[KVQ_NAME_BYTES], session[KVQ_NAME_BYTES], text[256];
};

static struct event_mail events[EVENTS];

static const struct {
    const char *name;
    enum kvq_log_level level;
} kinds[KVQ__EVENTS] = {
#define ROW(KIND, name, level, what) {#name, KVQ_LOG_##level},
    KVQ__EVENT_TABLE(ROW)
#undef ROW
};

static void log_event(const struct event_mail *e)
{
    char ns[160], session[160], text[300];
    kvq__log(kinds[e->kind].level, kinds[e->kind].name,
             "client=%llu namespace=%s session=%s text=%s", (unsigned long long)e->client,
             kvq__log_quote(ns, sizeof ns, e->ns),
             kvq__log_quote(session, sizeof session, e->session),
             kvq__log_quote(text, sizeof text, e->text));
}

// Details are told in the log alone: they come at any rate, and would push out of the history what
// somebody has to know of.
static bool is_detail(enum kvq__event_kind kind)
{
    return kinds[kind].level == KVQ_LOG_DEBUG;
}

// Loop's thread.
static void tell_event(const struct event_mail *e)
{
    struct timespec now;
    Kvq__Event message;
    assert(e->kind < KVQ__EVENTS);
    log_event(e);
    if (is_detail(e->kind))
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    kvq__event__init(&message);
    message.kind = (char *)(uintptr_t)kinds[e->kind].name;
    message.unix_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    message.namespace_ = (char *)(uintptr_t)e->ns; // packing only reads
    message.session = (char *)(uintptr_t)e->session;
    message.client = e->client;
    message.text = (char *)(uintptr_t)e->text;
    if (e->server->history)
        kvq__history_add(e->server->history, &message);
}

// Loop's thread.
static void deliver_event(struct kvq__mail *mail)
{
    struct event_mail *e = (struct event_mail *)mail; // its first member
    assert(kvq_word_load(&e->taken));
    if (e->lost)
        kvq__log(KVQ_LOG_WARN, "events_dropped", "count=%u", e->lost);
    if (e->lost && e->server->history)
        kvq__history_lose(e->server->history, e->lost);
    tell_event(e);
    kvq_word_store_release(&e->taken, 0);
}

static void fill_event(struct event_mail *e, struct kvq__server *server,
                       const struct kvq__event *event)
{
    assert(event->kind < KVQ__EVENTS && event->ns && event->session && event->text);
    e->server = server;
    e->kind = event->kind;
    e->client = event->client;
    snprintf(e->ns, sizeof e->ns, "%s", event->ns);
    snprintf(e->session, sizeof e->session, "%s", event->session);
    snprintf(e->text, sizeof e->text, "%s", event->text);
}

void kvq__event_tell(struct kvq__server *server, const struct kvq__event *event)
{
    struct event_mail e;
    fill_event(&e, server, event);
    tell_event(&e);
}

// How many mails ahead have to be free.
static uint32_t kept_from(enum kvq_log_level level)
{
    if (level <= KVQ_LOG_WARN)
        return 0;
    return level == KVQ_LOG_DEBUG ? KEPT_FROM_DETAILS : KEPT;
}

void kvq__event_from_core(void *context, const struct kvq__event *event)
{
    static uint32_t next, lost;
    struct event_mail *e = &events[next % EVENTS];
    // Mails come free in the order in which they were posted, so one ahead tells of all up to it.
    assert(event->kind < KVQ__EVENTS);
    bool detail = is_detail(event->kind);
    if (detail && !kvq__log_has(KVQ_LOG_DEBUG)) // that nobody has asked for
        return;
    uint32_t ahead = kept_from(kinds[event->kind].level);
    if (kvq_word_load_acquire(&events[(next + ahead) % EVENTS].taken)) {
        lost += !detail; // which has no number that would be missing
        return;
    }
    next++;
    e->lost = lost;
    lost = 0;
    kvq_word_store(&e->taken, 1);
    fill_event(e, context, event);
    kvq__mailbox_post(&e->server->box, &e->mail, deliver_event);
}

bool kvq__events_idle(void)
{
    for (int i = 0; i < EVENTS; i++)
        if (kvq_word_load_acquire(&events[i].taken))
            return false;
    return true;
}
