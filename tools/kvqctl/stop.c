// SPDX-License-Identifier: Apache-2.0
// Ending a command that goes on: SIGINT, SIGTERM, SIGHUP and SIGQUIT make a descriptor readable, so
// that whatever waits can wait for them as well, and none comes between a look and a wait.
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>

#include "tools/kvqctl/kvqctl.h"

int kvq__ctl_catch_stop(struct kvq__ctl *ctl)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGQUIT);
    if (sigprocmask(SIG_BLOCK, &set, NULL) == 0)
        ctl->stop_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return ctl->stop_fd < 0 ? KVQ_EXIT_FAILED : KVQ_EXIT_OK;
}

bool kvq__ctl_wait(const struct kvq__ctl *ctl, double seconds)
{
    struct pollfd stop = {.fd = ctl->stop_fd, .events = POLLIN};
    return poll(&stop, 1, (int)(seconds * 1000)) > 0;
}
