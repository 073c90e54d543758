// SPDX-License-Identifier: Apache-2.0
//
// What the tests of parking stand on, besides save_kit.h: a session is parked to the end, and
// brought back by a request.
#ifndef KVQ_TESTS_PARK_KIT_H
#define KVQ_TESTS_PARK_KIT_H

#include "daemon/core/residency/park.h"
#include "tests/core/save_kit.h"

int setup_saves(void **state);
int teardown_saves(void **state);
#define SAVING_TEST(name) TEST_BETWEEN(name, setup_saves, teardown_saves)
const struct kvq__session *session_of(uint64_t handle);
void settle(void);
struct kvq__move_info ask(uint64_t id);

// Parks it to the end. Returns how that went.
int park(uint64_t handle);
void away(uint64_t handle);

// A request that brings it back.
void wake(uint64_t handle);
void refused(uint64_t handle, int code, const char *why);

// It is asked for, and what the core wants to be read is found.
struct kvq__restore *begin_fetch(uint64_t handle, struct kvq__store_job *job);

// It is asked to be parked, and what the core wants to be written is copied.
struct kvq__save *begin_writing(uint64_t handle, struct kvq__store_job *job, uint64_t *ticket);
void end_writing(struct kvq__save *save, const struct kvq__store_job *job);

#endif
