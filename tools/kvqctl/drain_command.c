// SPDX-License-Identifier: Apache-2.0
// Commands that end the daemon: drain, shutdown.
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/shm.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/transport.h"

enum { LOOK_MS = 50, FAREWELL_MS = 5000, OVER = 2 }; // phase of DrainReply

// ---- The daemon's process ----

// A pidfd of who listens there, by its pid as it is here; -1: it has none that is known here, as in
// a container of its own or on another machine.
static int daemon_process(const struct kvq__ctl *ctl)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    struct kvq__transport_at at;
    char path[4096];
    int process = -1;
    kvq__ctl_at(ctl, &at, path, sizeof path);
    if (at.far)
        return -1;
    if (strlen(path) >= sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0)
        process = (int)syscall(SYS_pidfd_open, peer.pid, 0);
    close(fd);
    return process;
}

// Waits some milliseconds, or until the daemon has ended. Whether it has.
static bool has_ended(const struct kvq__ctl *ctl, int process, int ms)
{
    char path[4096], text[KVQ_TEXT_BYTES];
    struct kvq__transport_at at;
    struct pollfd wait = {.fd = process, .events = POLLIN};
    if (poll(&wait, process >= 0 ? 1 : 0, ms) > 0)
        return true;
    if (process >= 0)
        return false;
    kvq__ctl_at(ctl, &at, path, sizeof path);
    int result = kvq__transport_try(&at, ctl->timeout_ms, text);
    return result == -ENOENT || result == -ECONNREFUSED || (at.far && result < 0);
}

// ---- Asking ----

// *epoch: of the daemon that is meant; 0: whichever, and then it is set.
static int ask_drain(struct kvq__ctl *ctl, uint64_t *epoch, const Kvq__DrainReply **drain)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Drain command = KVQ__DRAIN__INIT;
    Kvq__Reply *reply;
    command.now = ctl->now;
    command.epoch = *epoch;
    request.command_case = KVQ__REQUEST__COMMAND_DRAIN;
    request.drain = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_DRAIN, &reply);
    if (result == KVQ_EXIT_OK) {
        *drain = reply->drain;
        *epoch = reply->epoch;
    }
    return result;
}

static int still_ends(const Kvq__DrainReply *drain)
{
    if (drain->phase == 0)
        fprintf(stderr, "kvqctl: steps have not ended yet;");
    else
        fprintf(stderr, "kvqctl: %s saved, and %" PRIu32 " not yet;",
                kvq__ctl_count(drain->saved, "session"), drain->unsaved);
    fprintf(stderr, " the daemon goes on ending, and kvqctl drain waits for it again\n");
    return KVQ_EXIT_TIMEOUT;
}

static int ended_early(void)
{
    fprintf(stderr, "kvqctl: the daemon ended before it was drained (a second signal, or a "
                    "fault); its log says more\n");
    return KVQ_EXIT_FAILED;
}

// Asks until the drain is over: the reply says how it went. An exit status.
static int wait_drained(struct kvq__ctl *ctl, int process, int64_t until,
                        const Kvq__DrainReply **drain)
{
    uint64_t epoch = 0;
    ctl->stop_fd = process; // nobody waits for an answer of a process that has ended
    int result = ask_drain(ctl, &epoch, drain);
    bool asked = result == KVQ_EXIT_OK;
    ctl->ends_it = asked;
    while (result == KVQ_EXIT_OK && (*drain)->phase < OVER) {
        if (has_ended(ctl, process, LOOK_MS))
            return ended_early();
        if (kvq__ctl_now_ms() >= until)
            return still_ends(*drain);
        result = ask_drain(ctl, &epoch, drain);
    }
    return result == KVQ_EXIT_STOPPED || (asked && result == KVQ_EXIT_NO_DAEMON) ? ended_early()
                                                                                 : result;
}

static int say_end(const struct kvq__ctl *ctl, const Kvq__DrainReply *drain)
{
    if (ctl->json) {
        kvq__ctl_print_json(&drain->base);
    } else {
        printf("kvqd has ended; %s; %s saved",
               drain->complete ? "all steps have ended" : "steps that took too long were cut off",
               kvq__ctl_count(drain->saved, "session"));
        if (drain->not_saved)
            printf(", and %" PRIu32 " COULD NOT BE: its log says why", drain->not_saved);
        printf("\n");
    }
    return drain->complete && drain->not_saved == 0 ? KVQ_EXIT_OK : KVQ_EXIT_FAILED;
}

int kvq__ctl_drain(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    const Kvq__DrainReply *drain = NULL;
    int64_t until = ctl->wait_ms ? kvq__ctl_now_ms() + ctl->wait_ms : INT64_MAX;
    int process = daemon_process(ctl);
    int result = wait_drained(ctl, process, until, &drain);
    if (result == KVQ_EXIT_OK) {
        kvq__transport_close(&ctl->transport); // the daemon waits for this
        // On another machine a new one may listen there already; what the last answer said is true.
        int64_t patience = ctl->connect ? kvq__ctl_now_ms() + FAREWELL_MS : INT64_MAX;
        while (result == KVQ_EXIT_OK && kvq__ctl_now_ms() < patience &&
               !has_ended(ctl, process, LOOK_MS))
            if (kvq__ctl_now_ms() >= until)
                result = still_ends(drain);
    }
    if (process >= 0)
        close(process);
    return result == KVQ_EXIT_OK ? say_end(ctl, drain) : result;
}

int kvq__ctl_shutdown(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    const Kvq__DrainReply *drain;
    uint64_t epoch = 0;
    int result = ask_drain(ctl, &epoch, &drain);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&drain->base);
    else if (ctl->now)
        printf("kvqd ends at once\n");
    else
        printf("kvqd is ending; kvqctl drain waits for the end\n");
    return KVQ_EXIT_OK;
}
