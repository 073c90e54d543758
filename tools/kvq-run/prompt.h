// SPDX-License-Identifier: Apache-2.0
//
// Token ids from text, files and lists; text from token ids.
#ifndef KVQ_RUN_PROMPT_H
#define KVQ_RUN_PROMPT_H

#include <stdint.h>

#include "tools/kvq-run/config.h"
#include "tools/kvq-run/options.h"

struct ids {
    uint32_t *list;
    uint64_t count;
    bool begins; // with the model's BOS
};

// From --prompt, --prompt-file or --ids, the model's BOS first where it has one (lists are taken
// as they are). Release with ids_free.
int ids_from_options(const struct options *o, const struct config *c, struct ids *ids,
                     struct problem *p);
void ids_free(struct ids *ids);

// Without the BOS, for a session that has tokens already. A prompt that is empty then is refused.
int ids_go_on(struct ids *ids, struct problem *p);

// At most `most` bytes (0: all) of a file. *data is the caller's to free.
int file_read(const char *path, uint64_t most, uint8_t **data, uint64_t *bytes, struct problem *p);

#endif
