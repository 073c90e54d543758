// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the configuration file. Whatever it holds: no crash, a complaint with place and words
// when it is refused, and when it is taken, values that print as a configuration with the same
// values. A form feed ends a first file, and a second one follows.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/config.h"
#include "proto/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 1 << 20 };

// Takes the lines out that say where each value is from.
static void without_comments(char *text)
{
    char *to = text;
    for (const char *line = text, *next; *line; line = next) {
        next = line + strcspn(line, "\n");
        next += *next == '\n';
        size_t n = *line == '#' ? 0 : (size_t)(next - line);
        memmove(to, line, n);
        to += n;
    }
    *to = 0;
}

// What is printed is taken as a file, and prints the same again.
static void goes_round(const struct kvq_config *config)
{
    static struct kvq_config back;
    static char out[MOST], again[MOST];
    char *none[] = {NULL}, text[KVQ_TEXT_BYTES] = "";
    kvq__config_print(config, out, sizeof out);
    if (strlen(out) + 1 == sizeof out) // it is cut off
        return;
    kvq__config_defaults(&back, none);
    if (kvq__config_parse(&back, "printed", "", out, text) || kvq__config_resolve(&back, text)) {
        fprintf(stderr, "%s\n", text);
        abort();
    }
    kvq__config_print(&back, again, sizeof again);
    without_comments(out);
    without_comments(again);
    if (strcmp(out, again) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvq_config config;
    char *none[] = {NULL}, text[KVQ_TEXT_BYTES] = "";
    char *contents = malloc(size + 1);
    if (!contents || memchr(data, 0, size)) { // the reader of files refuses NUL characters
        free(contents);
        return 0;
    }
    memcpy(contents, data, size);
    contents[size] = 0;
    kvq__config_defaults(&config, none);
    char *second = strchr(contents, '\f');
    if (second)
        *second++ = 0;
    int error = kvq__config_parse(&config, "fuzz", "", contents, text);
    if (error == 0 && second)
        error = kvq__config_parse(&config, "second", "second", second, text);
    if (error == 0)
        error = kvq__config_resolve(&config, text);
    if (error == 0)
        goes_round(&config);
    else if (!text[0] || config.n_namespaces > KVQ_MAX_NAMESPACES)
        abort();
    free(contents);
    return 0;
}
