// SPDX-License-Identifier: Apache-2.0
//
// Whether an engine's OpenMP threads spin while they wait, as far as /proc tells: from what the
// process maps and the environment that it was started with. All of it is what another process
// wants it to be: read up to a limit, and none of it is printed.
#ifndef KVQ_TOOLS_KVQCTL_OPENMP_H
#define KVQ_TOOLS_KVQCTL_OPENMP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

// A variable that says for how long threads spin.
enum kvq__ctl_spin { KVQ__CTL_SPIN_UNSAID, KVQ__CTL_SPIN_NEVER, KVQ__CTL_SPIN_LONG };

// All 0 before anything was read.
struct kvq__ctl_process {
    bool asks;         // maps a ring of requests to a daemon: it is a client, and no namesake
    bool attends;      // maps the daemon's pool: it attends in its own context
    uint32_t runtimes; // OpenMP's that it maps, bits
    uint32_t threads;  // of all kinds
    uint32_t most;     // OpenMP threads that its environment asks for; 0: says nothing
    uint8_t policy, gomp, kmp; // enum kvq__ctl_spin: OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME
};

// Takes whole lines of /proc/PID/maps; may be called for one piece after the other.
void kvq__ctl_process_maps(struct kvq__ctl_process *p, const char *text, size_t bytes);
// Takes /proc/PID/environ, behind which a NUL stands. False: no variable is there, as of a process
// that has written its title over them.
bool kvq__ctl_process_environ(struct kvq__ctl_process *p, const char *text, size_t bytes);
// Takes /proc/PID/status, behind which a NUL stands.
void kvq__ctl_process_status(struct kvq__ctl_process *p, const char *text);

// Reads all three below `proc`, a directory like /proc. 0; or a negative errno: this user may not
// (-EACCES), the process is gone (-ENOENT, -ESRCH), nothing stands there (-ENODATA), or more does
// than is read (-E2BIG).
int kvq__ctl_process_read(struct kvq__ctl_process *p, const char *proc, uint64_t pid);

// The name of an OpenMP runtime whose threads may spin; NULL: none of which that is known.
const char *kvq__ctl_process_spins(const struct kvq__ctl_process *p);
// So many threads may be that runtime's, in a process that may use `cpus` CPUs.
uint32_t kvq__ctl_process_team(const struct kvq__ctl_process *p, uint32_t cpus);

#endif
