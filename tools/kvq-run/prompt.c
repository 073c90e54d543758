// SPDX-License-Identifier: Apache-2.0
//
// Prompts. A byte vocabulary has its bytes as ids 0 to 255.
#include "tools/kvq-run/prompt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_IDS = 1 << 24 };

void ids_free(struct ids *ids)
{
    free(ids->list);
    *ids = (struct ids){0};
}

static int from_text(const uint8_t *text, uint64_t bytes, const struct config *c, struct ids *ids,
                     struct problem *p)
{
    if (!c->bytes)
        return problem_set(p, RUN_USAGE,
                           "this model's vocabulary of %u tokens is not bytes; give "
                           "token ids with --ids",
                           c->vocab);
    if (bytes > MOST_IDS)
        return problem_set(p, RUN_USAGE, "the prompt has %llu bytes; %d are the most",
                           (unsigned long long)bytes, MOST_IDS);
    ids->list = malloc((bytes + 1) * sizeof *ids->list);
    if (!ids->list)
        return problem_set(p, RUN_FAILED, "out of memory");
    ids->count = 0;
    ids->begins = c->bos >= 0;
    if (ids->begins)
        ids->list[ids->count++] = (uint32_t)c->bos;
    for (uint64_t i = 0; i < bytes; i++)
        ids->list[ids->count++] = text[i];
    return 0;
}

static int from_list(const char *text, const struct config *c, struct ids *ids, struct problem *p)
{
    ids->list = malloc((strlen(text) / 2 + 1) * sizeof *ids->list);
    if (!ids->list)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (const char *s = text; *s;) {
        char *end;
        errno = 0;
        unsigned long id = strtoul(s, &end, 10);
        if (errno || end == s || *s == '-' || *s == '+' || id >= c->vocab || (*end && *end != ','))
            return problem_set(p, RUN_USAGE, "--ids: '%.20s' is no token id below %u", s, c->vocab);
        ids->list[ids->count++] = (uint32_t)id;
        s = *end ? end + 1 : end;
    }
    return 0;
}

int file_read(const char *path, uint64_t most, uint8_t **data, uint64_t *bytes, struct problem *p)
{
    enum { PIECE = 1 << 20 };
    FILE *f = fopen(path, "re");
    if (!f)
        return problem_set(p, RUN_FAILED, "cannot open %s: %s", path, strerror(errno));
    uint8_t *all = NULL;
    uint64_t n = 0, got = 1;
    while (got && (!most || n < most)) {
        uint64_t want = most && most - n < PIECE ? most - n : PIECE;
        uint8_t *more = realloc(all, n + want);
        if (!more)
            break;
        all = more;
        got = fread(all + n, 1, want, f);
        n += got;
    }
    int rc = ferror(f) || !all ? problem_set(p, RUN_FAILED, "cannot read %s", path) : 0;
    fclose(f);
    if (rc) {
        free(all);
        all = NULL;
    }
    *data = all;
    *bytes = n;
    return rc;
}

int ids_go_on(struct ids *ids, struct problem *p)
{
    if (ids->begins) {
        ids->begins = false;
        memmove(ids->list, ids->list + 1, --ids->count * sizeof *ids->list);
    }
    return ids->count ? 0
                      : problem_set(p, RUN_USAGE,
                                    "the prompt is empty, and the session goes on behind its "
                                    "tokens; give --prompt or --ids");
}

int ids_from_options(const struct options *o, const struct config *c, struct ids *ids,
                     struct problem *p)
{
    *ids = (struct ids){0};
    int rc;
    if (o->ids) {
        rc = from_list(o->ids, c, ids, p);
    } else if (o->prompt_file) {
        uint8_t *text;
        uint64_t bytes;
        if (file_read(o->prompt_file, 0, &text, &bytes, p))
            return -1;
        rc = from_text(text, bytes, c, ids, p);
        free(text);
    } else {
        const char *text = o->prompt ? o->prompt : "";
        rc = from_text((const uint8_t *)text, strlen(text), c, ids, p);
    }
    if (!rc && !ids->count)
        rc = problem_set(p, RUN_USAGE,
                         "the prompt is empty, and the model has no token to begin "
                         "with; give --prompt or --ids");
    if (rc)
        ids_free(ids);
    return rc;
}
