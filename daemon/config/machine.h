// SPDX-License-Identifier: Apache-2.0
//
// How much memory this machine has, and how much of it this process may take. Any thread.
#ifndef KVQ_DAEMON_CONFIG_MACHINE_H
#define KVQ_DAEMON_CONFIG_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

enum { KVQ__GROUP_NAME = 128 };

// In bytes; KVQ__UNKNOWN where the kernel does not say, or sets no limit.
#define KVQ__UNKNOWN UINT64_MAX
struct kvq__machine {
    uint64_t total, free; // of the machine; free: what can be had without swapping
    // The lowest memory.max of this process's control group (cgroup v2) and those above it, and the
    // least that one of them has left.
    uint64_t group, group_free;
    char group_name[KVQ__GROUP_NAME]; // of that with the lowest limit, cut to fit
};

// root: "", or a folder that stands for / in a test.
void kvq__machine_read(const char *root, struct kvq__machine *machine);
// What this process may have at most.
uint64_t kvq__machine_most(const struct kvq__machine *machine);

// Whether an option may give so much memory away: KVQ_E_INVALID with a text if there is never so
// much. Of these bytes, those that were set aside (huge pages) count neither as the control group's
// nor as free.
int kvq__machine_check(const struct kvq__machine *machine, const char *option, uint64_t bytes,
                       uint64_t set_aside, char *text);
// Whether there is less now, with a text.
bool kvq__machine_is_tight(const struct kvq__machine *machine, const char *option, uint64_t bytes,
                           uint64_t set_aside, char *text);
// Whether both options together allow more than this process may ever have, with a text.
bool kvq__machine_is_promised_twice(const struct kvq__machine *machine, uint64_t pool_bytes,
                                    uint64_t set_aside, uint64_t buffer_bytes, char *text);

#endif
