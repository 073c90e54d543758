// SPDX-License-Identifier: Apache-2.0
//
// A kvqd of the bench's own. What goes wrong is complained about on stderr, and -1 returned.
#ifndef KVQ_TOOLS_BENCH_DAEMON_H
#define KVQ_TOOLS_BENCH_DAEMON_H

#include <sys/types.h>

struct bench_daemon {
    char folder[64], kvqd[4096];
    pid_t pid; // 0: none
};

// Makes its folder. kvqd NULL: the program beside this one.
int bench_daemon_open(struct bench_daemon *daemon, const char *kvqd);
// Starts it and waits until it listens. options: its command line, ended by NULL, besides where it
// runs and what it logs (warnings).
int bench_daemon_start(struct bench_daemon *daemon, const char *const *options);
int bench_daemon_stop(struct bench_daemon *daemon);
// Stops it if need be, and removes the folder.
void bench_daemon_close(struct bench_daemon *daemon);

#endif
