// SPDX-License-Identifier: Apache-2.0
//
// How near two words are, so that a misspelt one can be answered with the one that was meant.
#ifndef KVQ_PROTO_NEAREST_H
#define KVQ_PROTO_NEAREST_H

#include <stdbool.h>
#include <stddef.h>

// Letters to insert, delete, replace, or swap with the next one. Words of up to 63 letters; longer
// ones are far from all others.
size_t kvq_word_distance(const char *a, const char *b);
// Whether `given` may have been meant for `name`.
bool kvq_word_resembles(const char *given, const char *name);

#endif
