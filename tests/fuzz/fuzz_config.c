// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the configuration file. Whatever it holds: no crash, a complaint with place and words
// when it is refused, and when it is taken, values that print as a configuration. A form feed ends
// a first file, and a second one follows.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/config.h"
#include "proto/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvq_config config;
    static char out[65536];
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
        kvq__config_print(&config, out, sizeof out);
    else if (!text[0] || config.n_namespaces > KVQ_MAX_NAMESPACES)
        abort();
    free(contents);
    return 0;
}
