// SPDX-License-Identifier: Apache-2.0
//
// The file in which limits that were set at run time outlive the daemon: quotas.ini in storage_dir.
// It looks like the configuration:
//
//     [namespace team-a]
//     host_bytes = 4gb
//     max_sessions = 10
//
// The daemon reads it at start and writes it whole whenever one is set, under another name, which
// then takes its place, so that a loss of power leaves the one or the other. What is read back is
// foreign: all of it is checked, and what is wrong is told with its line and value.
#ifndef KVQ_DAEMON_STORE_QUOTA_FILE_H
#define KVQ_DAEMON_STORE_QUOTA_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/core/core.h"
#include "storage/io.h"

#define KVQ__QUOTA_FILE "quotas.ini"

// Reads it, KVQ_MAX_OVERRIDES of them at most; none if there is no such file. `out` has room for as
// many. 0, KVQ_E_INVALID, KVQ_E_SYSTEM or KVQ_E_NO_MEMORY.
int kvq__quota_file_read(struct kvq_io *io, const char *folder, struct kvq__override *out,
                         uint32_t *n, char *text);
// Writes those that set any limit. Durable when it has returned 0; else what was there stays, and
// a code says why: KVQ_E_NO_SPACE, KVQ_E_READ_ONLY, KVQ_E_SYSTEM or KVQ_E_NO_MEMORY.
int kvq__quota_file_write(struct kvq_io *io, const char *folder, const struct kvq__override *all,
                          uint32_t n, char *text);
// Its contents, which end with a NUL; `name` stands for the file in complaints.
int kvq__quota_file_parse(const char *name, const char *contents, struct kvq__override *out,
                          uint32_t *n, char *text);

#endif
