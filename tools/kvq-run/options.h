// SPDX-License-Identifier: Apache-2.0
//
// The command line of kvq-run.
#ifndef KVQ_RUN_OPTIONS_H
#define KVQ_RUN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/kvq-run/problem.h"

enum command {
    COMMAND_GENERATE,
    COMMAND_PERPLEXITY,
    COMMAND_LOGITS,
    COMMAND_HELP,
    COMMAND_VERSION
};

struct options {
    uint8_t command;
    const char *model, *runtime_dir, *format, *against, *session, *ns;
    const char *prompt, *prompt_file, *ids, *text, *capture;
    uint8_t attention, v_rotation;
    uint32_t tokens, step, context, top, pause_at;
    uint64_t bytes, seed, capture_tokens, wait_room; // wait_room: seconds
    double temperature, top_p;
    bool json, quiet, keep, prefix, in_context;
};

// Fills o from the arguments; -1 with a sentence and the way to the help.
int options_parse(int argc, char **argv, struct options *o, struct problem *p);

// Whether V is to be rotated in the weights: where that is asked for or, if nothing is, where the
// paper of the format does (of both formats, if one model serves two that are not raw), and heads
// are stored as they are. Captures are of V as the model makes it, so with one the daemon rotates.
bool options_fold(const struct options *o, uint32_t head_dim);

// Help of one command, or of all (COMMAND_HELP); to standard output.
void options_help(uint8_t command);

#endif
