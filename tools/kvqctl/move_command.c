// SPDX-License-Identifier: Apache-2.0
// Moving a session to another place, to disk and back, and how far that is.
#include <inttypes.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "proto/status.h"
#include "tools/kvqctl/kvqctl.h"

enum { LOOK_NS = 20000000 }; // between two looks

static int start_move(struct kvq__ctl *ctl, char **args, Kvq__Reply **reply)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__MoveSession command = KVQ__MOVE_SESSION__INIT;
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_MOVE_SESSION;
    request.move_session = &command;
    command.which_case = KVQ__MOVE_SESSION__WHICH_REF;
    command.ref = &ref;
    command.place = args[1];
    command.one_shard = ctl->shard >= 0;
    command.shard = ctl->shard >= 0 ? (uint32_t)ctl->shard : 0;
    command.wait_ms = ctl->wait_ms;
    ref.name = args[0];
    if (ctl->ns)
        ref.namespace_ = (char *)ctl->ns;
    return kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_MOVE, reply);
}

static int ask_move(struct kvq__ctl *ctl, uint64_t id, Kvq__Reply **reply)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__AskMove command = KVQ__ASK_MOVE__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_ASK_MOVE;
    request.ask_move = &command;
    command.id = id;
    return kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_MOVE, reply);
}

// On a terminal, one line that is written over.
static void show_progress(const Kvq__Move *m)
{
    fprintf(stderr, "\r%-10s %s of %s   ", kvq__ctl_clean(m->phase), kvq__ctl_bytes(m->moved_bytes),
            kvq__ctl_bytes(m->bytes));
}

static void print_moved(const Kvq__Move *m)
{
    printf("moved %s to %s: %s", kvq__ctl_clean(m->session), kvq__ctl_clean(m->place),
           kvq__ctl_bytes(m->moved_bytes));
    if (m->shared_bytes)
        printf(", of which %s are shared with forks or a prefix and stay where they were as well",
               kvq__ctl_bytes(m->shared_bytes));
    printf("\n");
}

// Follows it to its end.
static int follow(struct kvq__ctl *ctl, int result, Kvq__Reply **reply)
{
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    bool terminal = !ctl->json && isatty(STDERR_FILENO);
    while (result == KVQ_EXIT_OK && !(*reply)->move->finished) {
        if (terminal)
            show_progress((*reply)->move);
        nanosleep(&pause, NULL);
        result = ask_move(ctl, (*reply)->move->id, reply);
    }
    if (terminal)
        fprintf(stderr, "\r%60s\r", "");
    return result;
}

static int tell(struct kvq__ctl *ctl, int result, const Kvq__Reply *reply,
                void (*print)(const Kvq__Move *m))
{
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&reply->move->base);
    else if (reply->move->status == KVQ_OK)
        print(reply->move);
    return reply->move->status ? kvq__ctl_refused(reply->move->status, reply->move->text) : result;
}

int kvq__ctl_session_move(struct kvq__ctl *ctl, char **args)
{
    Kvq__Reply *reply;
    int result = start_move(ctl, args, &reply);
    result = follow(ctl, result, &reply);
    return tell(ctl, result, reply, print_moved);
}

// ---- To disk and back ----

static void print_parked(const Kvq__Move *m)
{
    printf("parked %s: %s of memory are free\n", kvq__ctl_clean(m->session),
           kvq__ctl_bytes(m->moved_bytes));
}

static void print_fetched(const Kvq__Move *m)
{
    printf("%s is in memory, on %s\n", kvq__ctl_clean(m->session), kvq__ctl_clean(m->place));
}

int kvq__ctl_session_park(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ParkSession command = KVQ__PARK_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, args[0]);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_PARK_SESSION;
    request.park_session = &command;
    command.which_case = KVQ__PARK_SESSION__WHICH_REF;
    command.ref = &ref;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_MOVE, &reply);
    result = follow(ctl, result, &reply);
    return tell(ctl, result, reply, print_parked);
}

int kvq__ctl_session_prefetch(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__PrefetchSession command = KVQ__PREFETCH_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, args[0]);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_PREFETCH_SESSION;
    request.prefetch_session = &command;
    command.which_case = KVQ__PREFETCH_SESSION__WHICH_REF;
    command.ref = &ref;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_MOVE, &reply);
    result = follow(ctl, result, &reply);
    return tell(ctl, result, reply, print_fetched);
}

static int pin(struct kvq__ctl *ctl, char *name, bool pinned)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__PinSession command = KVQ__PIN_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, name);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_PIN_SESSION;
    request.pin_session = &command;
    command.which_case = KVQ__PIN_SESSION__WHICH_REF;
    command.ref = &ref;
    command.pin = pinned;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
    if (result == KVQ_EXIT_OK)
        kvq__ctl_print_done(ctl, pinned ? "pinned" : "unpinned", name);
    return result;
}

int kvq__ctl_session_pin(struct kvq__ctl *ctl, char **args)
{
    return pin(ctl, args[0], true);
}

int kvq__ctl_session_unpin(struct kvq__ctl *ctl, char **args)
{
    return pin(ctl, args[0], false);
}
