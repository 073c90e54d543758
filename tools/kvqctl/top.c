// SPDX-License-Identifier: Apache-2.0
// kvqctl top: the daemon's status and its largest sessions, anew every few seconds, with the
// rates between two looks. Plain ANSI; where output is no terminal it just prints.
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "tools/kvqctl/kvqctl.h"

static volatile sig_atomic_t stopped;

static void stop(int signal_number)
{
    (void)signal_number;
    stopped = 1;
}

// What is compared between two looks.
struct look {
    uint64_t uptime_ms, steps, attends, appended;
};

static struct look look_of(const Kvq__StatusReply *s)
{
    return (struct look){s->uptime_ms, kvq__ctl_counter(s, "steps"), kvq__ctl_counter(s, "attends"),
                         kvq__ctl_counter(s, "appended_tokens")};
}

static double rate(uint64_t now, uint64_t before, uint64_t ms)
{
    return ms && now >= before ? (double)(now - before) * 1000.0 / (double)ms : 0;
}

static int by_memory(const void *a, const void *b)
{
    const Kvq__Session *x = *(Kvq__Session *const *)a, *y = *(Kvq__Session *const *)b;
    uint64_t mx = x->packed_bytes + x->window_bytes, my = y->packed_bytes + y->window_bytes;
    return mx < my ? 1 : mx > my ? -1 : 0;
}

static size_t rows_for_sessions(void)
{
    struct winsize size;
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0)
        return 20;
    return size.ws_row > 9 ? size.ws_row - 9u : 1;
}

static void print_evictions(const Kvq__StatusReply *s)
{
    uint64_t gone = kvq__ctl_counter(s, "parked_room") + kvq__ctl_counter(s, "parked_quota") +
                    kvq__ctl_counter(s, "parked_idle") + kvq__ctl_counter(s, "demoted");
    uint64_t back = kvq__ctl_counter(s, "fetched") + kvq__ctl_counter(s, "promoted");
    printf("evicted %" PRIu64 "   came back %" PRIu64 "   on disk %" PRIu64 "   demoted %" PRIu64
           "   waiting %" PRIu64 "\n",
           gone, back, kvq__ctl_counter(s, "offloaded_now"), kvq__ctl_counter(s, "demoted_now"),
           kvq__ctl_counter(s, "waiting_for_room_now"));
}

static void print_look(const Kvq__StatusReply *s, const struct kvq__ctl_list *list,
                       const struct look *before)
{
    struct look now = look_of(s);
    uint64_t ms = now.uptime_ms - before->uptime_ms;
    double share = s->pool_bytes ? 100.0 * (double)s->pool_used_bytes / (double)s->pool_bytes : 0;
    if (isatty(STDOUT_FILENO))
        printf("\033[H\033[J");
    printf("kvqd %s  pid %" PRIu64 "  up %s  %s  workers %" PRIu32 "%s\n",
           kvq__ctl_clean(s->version), s->pid, kvq__ctl_duration(s->uptime_ms),
           kvq__ctl_clean(s->isa), s->workers, s->draining ? "  shutting down" : "");
    printf("memory %s of %s (%.1f%%)   sessions %" PRIu32 "   clients %" PRIu32 "   tokens %" PRIu64
           "\n",
           kvq__ctl_bytes(s->pool_used_bytes), kvq__ctl_bytes(s->pool_bytes), share, s->sessions,
           s->clients, s->tokens);
    printf("steps/s %.1f   attentions/s %.1f   tokens/s %.1f   refused %" PRIu64 "\n",
           rate(now.steps, before->steps, ms), rate(now.attends, before->attends, ms),
           rate(now.appended, before->appended, ms), kvq__ctl_counter(s, "refused_requests"));
    print_evictions(s);
    printf("\n");
    size_t rows = rows_for_sessions();
    qsort(list->elements, list->n, sizeof(ProtobufCMessage *), by_memory);
    kvq__ctl_print_sessions((Kvq__Session *const *)list->elements, list->n < rows ? list->n : rows);
    if (list->truncated)
        printf("(of the first %zu sessions; there are more)\n", list->n);
    fflush(stdout);
}

static int look_once(struct kvq__ctl *ctl, struct look *before)
{
    struct kvq__ctl_list status, sessions;
    int result = kvq__ctl_ask_status(ctl, &status);
    if (result)
        return result;
    result = kvq__ctl_ask_sessions(ctl, &sessions);
    if (result == 0) {
        const Kvq__StatusReply *s = kvq__ctl_status_of(&status);
        if (ctl->json)
            kvq__ctl_print_json_line(&s->base, sessions.elements, sessions.n);
        else
            print_look(s, &sessions, before);
        *before = look_of(s);
        kvq__ctl_list_free(&sessions);
    }
    kvq__ctl_list_free(&status);
    return result;
}

int kvq__ctl_top(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    struct sigaction action = {.sa_handler = stop};
    struct timespec pause = {.tv_sec = (time_t)ctl->interval};
    struct look before = {0};
    int result = KVQ_EXIT_OK;
    pause.tv_nsec = (long)((ctl->interval - (double)pause.tv_sec) * 1e9);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    for (unsigned long i = 0; !stopped && result == 0; i++) {
        result = look_once(ctl, &before);
        if (ctl->count && i + 1 >= ctl->count)
            break;
        if (result == 0)
            nanosleep(&pause, NULL);
    }
    return stopped ? KVQ_EXIT_OK : result;
}
