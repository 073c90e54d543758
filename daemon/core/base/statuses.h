// SPDX-License-Identifier: Apache-2.0
//
// How many requests a door has refused, by the status that it answered with. One thread owns them.
#ifndef KVQ_DAEMON_CORE_BASE_STATUSES_H
#define KVQ_DAEMON_CORE_BASE_STATUSES_H

#include <assert.h>
#include <stdint.h>

#include "proto/status.h"

#define KVQ__ONE_OF(name, value, text) KVQ__ONE_##name,
enum { KVQ_STATUS_LIST(KVQ__ONE_OF) KVQ__STATUSES };
#undef KVQ__ONE_OF
#define KVQ__INSIDE(name, value, text)                                                             \
    static_assert((value) <= 0 && (value) > -KVQ__STATUSES, "values of statuses have no gap");
KVQ_STATUS_LIST(KVQ__INSIDE)
#undef KVQ__INSIDE

struct kvq__refused {
    uint64_t count[KVQ__STATUSES]; // of status -i at i; 0 is none
};

// A value that no status has counts as KVQ_E_INTERNAL.
static inline void kvq__refused_add(struct kvq__refused *refused, int status)
{
    assert(status < 0);
    refused->count[status > -KVQ__STATUSES ? -status : -KVQ_E_INTERNAL]++;
}

#endif
