// SPDX-License-Identifier: Apache-2.0
//
// Starting threads of a library, or of a daemon whose signals one thread handles.
#ifndef KVQ_KERNELS_THREAD_H
#define KVQ_KERNELS_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

// Starts a thread that no signal is delivered to but those that its own faults raise (SIGSEGV, ..):
// the others are for the program's threads. 0 or an errno.
static inline int kvq_thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg)
{
    static const int own[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP};
    sigset_t others, before;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&others, own[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int error = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
