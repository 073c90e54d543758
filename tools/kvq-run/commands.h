// SPDX-License-Identifier: Apache-2.0
//
// The commands of kvq-run. Each returns 0 or -1 with a sentence.
#ifndef KVQ_RUN_COMMANDS_H
#define KVQ_RUN_COMMANDS_H

#include <stdatomic.h>

#include "tools/kvq-run/options.h"

int run_generate(const struct options *o, struct problem *p);
int run_perplexity(const struct options *o, struct problem *p);
int run_logits(const struct options *o, struct problem *p);

// Set by SIGINT and SIGTERM: the command ends at the next token and says what it has.
extern atomic_bool run_interrupted;

double run_seconds(void); // monotonic

#endif
