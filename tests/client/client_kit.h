// SPDX-License-Identifier: Apache-2.0
//
// For tests of libkvq against the scripted daemon of fake_daemon.h.
#ifndef KVQ_TESTS_CLIENT_KIT_H
#define KVQ_TESTS_CLIENT_KIT_H

#include "client/kvq.h"
#include "tests/kits/fake_daemon.h"

// The daemon's runtime directory. Once in a program, before and after its tests.
extern char client_dir[];
void client_prepare(void);
void client_cleanup(void);

// Descriptors that are open.
int client_fds(void);
// Starts a daemon and connects to it: what kvq_connect returns.
int connect_to(struct fake_script script, uint32_t timeout_ms, struct fake_daemon **daemon,
               kvq_client **client);
// Fails the test unless the error's text has these words.
void expect_text(const char *part);

#endif
