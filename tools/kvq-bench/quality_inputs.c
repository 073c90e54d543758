// SPDX-License-Identifier: Apache-2.0
//
// What a measurement was made of, by contents: files of the same name may hold something else.
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality_model.h"
#include "tools/kvq-run/fingerprint.h"

static int add_file(uint64_t *h, const char *path, struct problem *p)
{
    enum { PIECE = 1 << 20 };
    FILE *f = fopen(path, "re");
    if (!f)
        return problem_set(p, RUN_FAILED, "cannot open %s: %s", path, strerror(errno));
    uint8_t *piece = malloc(PIECE);
    for (size_t n = PIECE; piece && n == PIECE;) {
        n = fread(piece, 1, PIECE, f);
        *h = fingerprint_bytes(*h, piece, n);
    }
    int rc = !piece      ? problem_set(p, RUN_FAILED, "out of memory")
             : ferror(f) ? problem_set(p, RUN_FAILED, "cannot read %s", path)
                         : 0;
    free(piece);
    fclose(f);
    return rc;
}

static int add_model(uint64_t *h, const char *dir, struct problem *p)
{
    struct model m;
    int rc = model_open(&m, dir, 1, p);
    *h = fingerprint_bytes(*h, m.fingerprint, strlen(m.fingerprint));
    model_close(&m);
    return rc;
}

// As quality_books_make trains them.
static int add_books(uint64_t *h, const struct quality_options *o, struct problem *p)
{
    uint32_t from = o->book_text ? 0 : o->book_from;
    *h = fingerprint_bytes(*h, &from, sizeof from);
    *h = fingerprint_bytes(*h, &o->tokens, sizeof o->tokens);
    return add_model(h, o->model, p) || add_file(h, o->book_text ? o->book_text : o->text, p) ? -1
                                                                                              : 0;
}

int quality_inputs_read(struct quality_inputs *in, const struct quality_options *o, bool model,
                        const char *path, struct problem *p)
{
    *in = (struct quality_inputs){0};
    if ((model && add_model(&in->data, o->model, p)) || add_file(&in->data, path, p))
        return -1;
    for (uint32_t i = 0; i < o->n_methods && o->model && (o->book_text || o->text); i++)
        if (quality_wants_book(&o->method[i]))
            return add_books(&in->books, o, p);
    return 0;
}

uint64_t quality_inputs_of(const struct quality_inputs *in, const struct quality_method *m)
{
    return quality_wants_book(m) ? fingerprint_bytes(in->data, &in->books, sizeof in->books)
                                 : in->data;
}

void quality_inputs_put(const struct quality_inputs *in, cJSON *line)
{
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)in->data);
    cJSON_AddStringToObject(line, "inputs", text);
}
