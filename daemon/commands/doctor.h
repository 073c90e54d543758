// SPDX-License-Identifier: Apache-2.0
//
// Findings about the machine and the configuration.
#ifndef KVQ_DAEMON_COMMANDS_DOCTOR_H
#define KVQ_DAEMON_COMMANDS_DOCTOR_H

#include "daemon/runtime/server.h"
#include "proto/wire.h"

// Findings for people (doctor.c); all in the arena.
void kvq__doctor(const struct kvq__server *server, struct kvq_arena *arena, Kvq__Reply *reply);

#endif
