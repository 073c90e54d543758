// SPDX-License-Identifier: Apache-2.0
//
// A whole step in one request: begin, append of all layers, commit, packing of what is due, and the
// page tables of the client, if it has any of these sessions.
#include "daemon/state.h"

enum kvq__progress kvq__op_step(struct kvq__queue *q)
{
    return kvq__request_end(q, KVQ_E_UNSUPPORTED);
}
