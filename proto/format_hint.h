// SPDX-License-Identifier: Apache-2.0
//
// What helps whoever has misspelt a format's name, the same words from the daemon and the tools.
#ifndef KVQ_PROTO_FORMAT_HINT_H
#define KVQ_PROTO_FORMAT_HINT_H

#include <stddef.h>
#include <stdint.h>

// Writes what goes behind a refusal of the name: "; did you mean 'kvq2'?", or names to begin with
// if none is near. "" if every part of the name begins with a name of the table, or if it is one of
// the configuration: the refusal then says what is wrong with that. `own`: n names of a
// configuration, of which those are listed that fit into the room.
void kvq_format_hint(const char *name, const char *const *own, uint32_t n, char *out, size_t room);

// Appends the recommended names and those of the configuration: "kvq2, .. or NAME".
void kvq_format_choices(const char *const *own, uint32_t n, char *out, size_t room);

#endif
