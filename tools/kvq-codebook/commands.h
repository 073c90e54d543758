// SPDX-License-Identifier: Apache-2.0
//
// kvq-codebook's commands.
#ifndef KVQ_TOOLS_CODEBOOK_COMMANDS_H
#define KVQ_TOOLS_CODEBOOK_COMMANDS_H

#include "tools/kvq-codebook/train.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct options {
    const char *capture, *format, *out, *resume; // make
    const char *file;                            // show, verify
    uint32_t flags;                              // KVQ_CODEBOOK_GLOBAL, ..
    struct train_options train;
    bool json, quiet;
};

// Exit statuses; what went wrong stands on standard error by then.
int command_make(const struct options *o);
int command_show(const struct options *o);
int command_verify(const struct options *o);

#endif
