// SPDX-License-Identifier: Apache-2.0
//
// The results file: one JSON object a line, each with a key that says what was measured.
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool remember(struct quality_results *r, const char *key)
{
    char **more = realloc(r->done, (r->n_done + 1) * sizeof *more);
    if (!more)
        return false;
    r->done = more;
    r->done[r->n_done] = strdup(key);
    return r->done[r->n_done] != NULL && ++r->n_done;
}

// What a run that was killed while writing left of a line is made a line of its own.
static void end_last_line(FILE *f)
{
    if (fseek(f, -1, SEEK_END) == 0 && fgetc(f) != '\n') {
        fseek(f, 0, SEEK_END);
        fputc('\n', f);
    }
}

// Lines that are no JSON are passed over.
static bool read_keys(struct quality_results *r)
{
    char *line = NULL;
    size_t room = 0;
    bool fine = true;
    end_last_line(r->file);
    rewind(r->file);
    while (fine && getline(&line, &room, r->file) > 0) {
        cJSON *j = cJSON_Parse(line);
        const char *key = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(j, "key"));
        fine = !key || remember(r, key);
        cJSON_Delete(j);
    }
    free(line);
    if (r->n_done)
        qsort(r->done, r->n_done, sizeof *r->done, by_text);
    return fine;
}

bool quality_results_open(struct quality_results *r, const char *path)
{
    *r = (struct quality_results){.file = fopen(path, "a+")};
    if (!r->file) {
        fprintf(stderr, "kvq-bench: cannot open %s for results\n", path);
        return false;
    }
    if (!read_keys(r)) {
        fprintf(stderr, "kvq-bench: no memory for what %s holds\n", path);
        quality_results_close(r);
        return false;
    }
    return true;
}

void quality_results_close(struct quality_results *r)
{
    for (size_t i = 0; i < r->n_done; i++)
        free(r->done[i]);
    free(r->done);
    if (r->file)
        fclose(r->file);
    *r = (struct quality_results){0};
}

bool quality_results_has(const struct quality_results *r, const char *key)
{
    return r->n_done && bsearch(&key, r->done, r->n_done, sizeof *r->done, by_text);
}

bool quality_results_put(struct quality_results *r, const char *key, cJSON *line)
{
    cJSON_AddStringToObject(line, "key", key);
    char *text = cJSON_PrintUnformatted(line);
    bool fine = text && fprintf(r->file, "%s\n", text) > 0 && fflush(r->file) == 0;
    if (!fine)
        fprintf(stderr, "kvq-bench: cannot write results\n");
    cJSON_free(text);
    cJSON_Delete(line);
    return fine;
}

const char *quality_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}
