// SPDX-License-Identifier: Apache-2.0
//
// What packing loses, measured while the daemon serves: every config.pack_error_ns one unit of what
// a job packs is read back and compared with its values, which are still there. The poller chooses
// the unit when it prepares the job, and keeps the figures when the job has ended; who packs the
// unit measures it. GPUs' packing is not measured: the values would have to be copied to the host.
#ifndef KVQ_DAEMON_CORE_REQUEST_PACK_ERROR_H
#define KVQ_DAEMON_CORE_REQUEST_PACK_ERROR_H

#include "daemon/core/state.h"

// Poller's thread, before a job that packs tokens [first, end) of a layer: takes the sample for one
// of its units, if it is time and nobody has it. What *sample had before is given back.
void kvq__pack_sample_begin(const struct kvq__session *session, uint32_t layer, uint64_t first,
                            uint64_t end, struct kvq__pack_sample **sample);
// Poller's thread, once the job has ended: keeps what was measured. *sample NULL is fine.
void kvq__pack_sample_end(struct kvq__core *core, struct kvq__pack_sample **sample);
// Any thread: the unit was packed into the page of number `page`.
void kvq__pack_sample_measure(struct kvq__pack_sample *sample, const struct kvq__core *core,
                              const struct kvq__layer *l, const struct kvq_unit *unit,
                              void *workspace);

#endif
