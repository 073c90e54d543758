// SPDX-License-Identifier: Apache-2.0
//
// Stands in for functions of the C library, also for libkvq.so.
#include "tests/client/own_clock.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Thread_local struct own_clock own_clock;
_Thread_local void (*own_wait)(void);
_Thread_local void (*own_turn_wait)(void);
_Thread_local void (*own_late_turn)(void);
_Thread_local bool own_wait_fails;
_Thread_local uint32_t own_loss;

#define SEEN_BY_LIBKVQ __attribute__((visibility("default")))

SEEN_BY_LIBKVQ int clock_gettime(clockid_t id, struct timespec *now)
{
    if (!own_clock.on || id != CLOCK_MONOTONIC)
        return (int)syscall(SYS_clock_gettime, id, now);
    *now = (struct timespec){(time_t)(own_clock.now_ns / 1000000000u),
                             (long)(own_clock.now_ns % 1000000000u)};
    return 0;
}

SEEN_BY_LIBKVQ int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *limit,
                         const sigset_t *mask)
{
    uint64_t ns = limit ? (uint64_t)limit->tv_sec * 1000000000u + (uint64_t)limit->tv_nsec : 0;
    struct timespec left = limit ? *limit : (struct timespec){0}; // the kernel changes it
    void (*wait)(void) = own_wait;
    own_wait = NULL;
    if (wait)
        wait();
    if (own_wait_fails) {
        errno = ENOMEM;
        return -1;
    }
    if (!own_clock.on || own_clock.n == own_clock.skips)
        return (int)syscall(SYS_ppoll, fds, n, limit ? &left : NULL, mask, (size_t)8);
    if (own_clock.n < sizeof own_clock.waited_ms / sizeof *own_clock.waited_ms)
        own_clock.waited_ms[own_clock.n] = ns / 1000000;
    own_clock.n++;
    own_clock.now_ns += ns;
    return 0;
}

static int wait_on(pthread_cond_t *cond, pthread_mutex_t *mutex, void (**first)(void),
                   const struct timespec *until)
{
    const struct timespec never = {.tv_sec = INT32_MAX};
    void (*wait)(void) = *first;
    *first = NULL;
    if (wait)
        wait();
    return pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, wait || !until ? &never : until);
}

SEEN_BY_LIBKVQ int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    return wait_on(cond, mutex, &own_turn_wait, NULL);
}

// The conditions of libkvq are of the monotonic clock.
SEEN_BY_LIBKVQ int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                                          const struct timespec *until)
{
    bool late = own_late_turn != NULL;
    int rc = wait_on(cond, mutex, &own_late_turn, until);
    if (late)
        own_clock.now_ns = (uint64_t)until->tv_sec * 1000000000u + (uint64_t)until->tv_nsec;
    return rc;
}

SEEN_BY_LIBKVQ ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    struct rlimit old, none;
    if (own_loss == 0 || --own_loss > 0)
        return syscall(SYS_recvmsg, fd, message, flags);
    if (getrlimit(RLIMIT_NOFILE, &old))
        abort();
    none = (struct rlimit){0, old.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    ssize_t n = syscall(SYS_recvmsg, fd, message, flags);
    setrlimit(RLIMIT_NOFILE, &old);
    return n;
}
