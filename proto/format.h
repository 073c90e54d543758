// SPDX-License-Identifier: Apache-2.0
//
// A format's row as a message: what a store keeps of it, and what clients in in-context mode are
// told. The only place that knows both the fields of the message and those of the row.
#ifndef KVQ_PROTO_FORMAT_H
#define KVQ_PROTO_FORMAT_H

#include "kernels/kernels.h"
#include "proto/wire.h"

// In the arena, without the row's name and source; NULL when the arena is full.
Kvq__TableFormat *kvq_format_message(struct kvq_arena *arena, const struct kvq_format *format);

// Back, from foreign bytes; leaves name and source as they are. False: the message or one of its
// sides is missing (m may be NULL), a number is none of its enumeration's or too large for its
// field, or one side is raw and the other is not. Whether the stages go together is for
// kvq_format_check.
bool kvq_format_of_message(const Kvq__TableFormat *m, struct kvq_format *format);

#endif
