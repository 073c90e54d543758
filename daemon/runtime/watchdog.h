// SPDX-License-Identifier: Apache-2.0
//
// Whether another thread still takes its mail. A mail goes to that thread's box and back; who looks
// at it at fixed times learns whether it has come back since.
#ifndef KVQ_DAEMON_RUNTIME_WATCHDOG_H
#define KVQ_DAEMON_RUNTIME_WATCHDOG_H

#include "daemon/runtime/mailbox.h"

struct kvq__watchdog {
    struct kvq__mailbox *there, *here; // of the thread that is watched, and of who watches
    struct kvq__mail mail;
    bool away;
};

// How often systemd wants to hear that this process is well, out of WATCHDOG_USEC and WATCHDOG_PID,
// NULL where the environment has none. In microseconds; 0: never, or it means another process.
uint64_t kvq__watchdog_usec(const char *usec, const char *pid);

// Who watches. Sends the first mail.
void kvq__watchdog_begin(struct kvq__watchdog *watchdog, struct kvq__mailbox *there,
                         struct kvq__mailbox *here);
// Whether the mail has come back; then it is sent again.
bool kvq__watchdog_look(struct kvq__watchdog *watchdog);

#endif
