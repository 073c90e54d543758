// SPDX-License-Identifier: Apache-2.0
//
// For tests with kvqd as another process: starts and ends it, and fails the test with a call's own
// words.
#ifndef KVQ_TESTS_DAEMON_KIT_H
#define KVQ_TESTS_DAEMON_KIT_H

#include <sys/types.h>

#include "client/kvq.h"

struct daemon {
    char directory[64];       // its runtime directory: daemon_prepare makes it
    const char *const *flags; // besides --runtime-dir, --log-level and --ready-fd; NULL ends them
    void (*before)(void);     // called in the new process before it becomes kvqd; or NULL
    pid_t pid;                // 0: none runs
};

// Once in a program, before and after its tests: the directory, below /tmp. The second one returns
// 0, or 1 if there is more left in the directory than kvqd's lock.
void daemon_prepare(struct daemon *d);
int daemon_cleanup(const struct daemon *d);

// Starts $KVQ_BIN_DIR/kvqd and waits until it serves. It is killed if this process dies first.
void daemon_start(struct daemon *d);

// Sends the signal and waits for the daemon's end, which must be in good order after SIGTERM.
void daemon_end(struct daemon *d, int signal);

// Fails the test with the error's text unless the code is 0; unless the code is this one and the
// error's text has these words.
void fine(int code);
void refused(int code, int got, const char *words);

#endif
