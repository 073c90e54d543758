// SPDX-License-Identifier: Apache-2.0
//
// Formats of sessions' layers: found by name, kept as long as the session, told (formats.c).
#ifndef KVQ_DAEMON_CORE_SESSION_FORMATS_H
#define KVQ_DAEMON_CORE_SESSION_FORMATS_H

#include "daemon/core/base/base.h"

struct kvq__session;

// The format of the configuration of that name, maybe with "@CODEBOOK" behind it; NULL = none.
const struct kvq__own_format *kvq__own_format(const struct kvq__core *core, const char *name);
// What a layer's row is under the name of a format. 0 or KVQ_E_FORMAT with a sentence in why.
int kvq__format_of_layer(const struct kvq__core *core, const char *name, uint32_t layer,
                         struct kvq_format *row, char *why, size_t n);
// The row that the session's layers point to: the one in the table if it has the same stages, or
// the session's copy. NULL as kvq__ns_allocate.
const struct kvq_format *kvq__format_keep(struct kvq__session *session,
                                          const struct kvq_format *row, int *rc);
// The row of that name in the configuration. NULL = none.
const struct kvq_format *kvq__format_configured(const struct kvq__core *core, const char *name);
// Gives all layers of a new session the formats of another. 0, or as kvq__ns_allocate.
int kvq__formats_copy(struct kvq__session *to, const struct kvq__session *from);
size_t kvq__formats_bytes(const struct kvq__session *session);
void kvq__formats_free(struct kvq__session *session);
// As kvq_format_hint, with the names of the configuration; without a name as kvq_format_choices.
void kvq__formats_hint(const struct kvq__core *core, const char *name, char *out, size_t room);
// As layer_formats of struct kvq__session_info.
void kvq__formats_text(const struct kvq__session *session, char *out, size_t room);

#endif
