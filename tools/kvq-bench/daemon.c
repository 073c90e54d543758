// SPDX-License-Identifier: Apache-2.0
//
// A kvqd of the bench's own: started in a folder that goes with it, and ended.
#include "tools/kvq-bench/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { START_MS = 10000, MOST_ARGS = 40 };

extern char **environ;

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "kvq-bench: %s: %s\n", what, why);
    return -1;
}

// The one that was named, else the one beside this program.
static void find_kvqd(struct bench_daemon *d, const char *kvqd)
{
    if (kvqd) {
        snprintf(d->kvqd, sizeof d->kvqd, "%s", kvqd);
        return;
    }
    ssize_t n = readlink("/proc/self/exe", d->kvqd, sizeof d->kvqd - sizeof "/kvqd");
    d->kvqd[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(d->kvqd, '/');
    memcpy(slash ? slash : d->kvqd, "/kvqd", sizeof "/kvqd");
}

int bench_daemon_open(struct bench_daemon *d, const char *kvqd)
{
    *d = (struct bench_daemon){.folder = "/tmp/kvq-bench-XXXXXX"};
    if (!mkdtemp(d->folder))
        return complain(d->folder, strerror(errno));
    find_kvqd(d, kvqd);
    return 0;
}

// Waits for the daemon's line on the descriptor.
static int wait_ready(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char line[64];
    int n = poll(&p, 1, START_MS);
    if (n == 0)
        return complain("kvqd", "not ready after 10 seconds");
    if (n < 0 || read(fd, line, sizeof line) <= 0)
        return complain("kvqd", "ended before it was ready; its log stands above");
    return 0;
}

int bench_daemon_start(struct bench_daemon *d, const char *const *options)
{
    char fd[16], *argv[MOST_ARGS] = {d->kvqd, "--runtime-dir", d->folder, "--log-level",
                                     "warn",  "--ready-fd",    fd};
    int ready[2], rc = -1, n = 7;
    while (*options && n < MOST_ARGS - 1)
        argv[n++] = (char *)(uintptr_t)*options++;
    if (pipe(ready))
        return complain("pipe", strerror(errno));
    fcntl(ready[0], F_SETFD, FD_CLOEXEC);
    snprintf(fd, sizeof fd, "%d", ready[1]);
    int error = posix_spawn(&d->pid, d->kvqd, NULL, NULL, argv, environ);
    close(ready[1]);
    if (error) {
        d->pid = 0;
        complain(d->kvqd, strerror(error));
    } else {
        rc = wait_ready(ready[0]);
    }
    close(ready[0]);
    return rc;
}

int bench_daemon_stop(struct bench_daemon *d)
{
    int status = 0;
    if (!d->pid)
        return 0;
    kill(d->pid, SIGTERM);
    while (waitpid(d->pid, &status, 0) < 0 && errno == EINTR)
        ;
    d->pid = 0;
    return status ? complain("kvqd", "did not end well; its log stands above") : 0;
}

static int remove_entry(const char *path, const struct stat *s, int kind, struct FTW *at)
{
    (void)s;
    (void)kind;
    (void)at;
    return remove(path);
}

void bench_daemon_close(struct bench_daemon *d)
{
    bench_daemon_stop(d);
    nftw(d->folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}
