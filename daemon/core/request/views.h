// SPDX-License-Identifier: Apache-2.0
//
// Views of a request: whether what it says about memory is so (views.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_VIEWS_H
#define KVQ_DAEMON_CORE_REQUEST_VIEWS_H

#include "daemon/core/state.h"

uint32_t kvq__dtype_bytes(uint8_t dtype); // 0 if unknown
// Checks what no entry changes: the buffer, dtype, alignment, reserved bytes. 0, KVQ_E_BUFFER,
// KVQ_E_DTYPE, KVQ_E_INVALID, KVQ_E_BOUNDS.
int kvq__view_open(struct kvq__queue *q, uint32_t view);
// Rows [row, row + n) of heads x dim: strides of at least one row where there are several, every
// byte inside the buffer. 0, KVQ_E_INVALID, KVQ_E_BOUNDS.
int kvq__view_rows(const struct kvq__queue *q, uint32_t view, uint32_t heads, uint32_t dim,
                   uint64_t row, uint64_t n);
// The address of the row, on the place of the wave's sessions.
uint8_t *kvq__view_data(const struct kvq__queue *q, uint32_t view, uint64_t row);
// Whether the place of the session can reach the view's buffer: 0, KVQ_E_BUFFER, or KVQ_E_INVALID
// if it is a GPU and the buffer does not start at a multiple of the view's dtype.
int kvq__view_reach(const struct kvq__queue *q, uint32_t view, const struct kvq__session *s);
const struct kvq_wire_view *kvq__view(const struct kvq__queue *q, uint32_t view);
// For ATTEND, APPEND_ATTEND and READ: checks that the entry writes no output row that an earlier
// entry writes. Call it once for each entry, in their order. 0 or KVQ_E_INVALID.
int kvq__outputs_entry(struct kvq__queue *q, uint32_t i);
// Then, for all entries: checks that the bytes that the request writes overlap neither each other
// nor those that it reads. The engine's pages are not checked. 0 or KVQ_E_INVALID.
int kvq__outputs_check(const struct kvq__queue *q);
// Paged K and V: the number of pages of the entry's tokens; and a check that all of them lie inside
// the buffers. The list is the daemon's own copy.
uint32_t kvq__paged_count(const struct kvq_request *r, const struct kvq_entry_wire *e);
int kvq__paged_check(const struct kvq__queue *q, const struct kvq_entry_wire *e,
                     const struct kvq_shape *s, const int32_t *list);
// The list view: list_open checks it as kvq__view_open does; list_at returns n elements, or NULL if
// they reach outside. Clients may write there at any time: copy first, then check.
int kvq__list_open(struct kvq__queue *q);
const int32_t *kvq__list_at(const struct kvq__queue *q, uint64_t element, uint64_t n);

#endif
