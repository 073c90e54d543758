// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes the file of limits that were set at run time. Whatever it holds: no crash, a complaint in
// words when it is refused, and when it is taken, limits that are written and read back the same.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/quota_file.h"
#include "proto/status.h"
#include "tests/kits/fault_io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(uint32_t n, const struct kvq__override *all)
{
    for (uint32_t i = 0; i < n; i++) {
        size_t length = strnlen(all[i].ns, sizeof all[i].ns);
        if (length == 0 || length >= sizeof all[i].ns || all[i].set == 0 ||
            all[i].set >> KVQ__LIMITS)
            abort();
        for (int j = 0; j < KVQ__LIMITS; j++)
            if (all[i].quota.limit[j] > KVQ_MAX_QUOTA_BYTES)
                abort();
    }
}

// Written and read back they are the same.
static void goes_round(uint32_t n, const struct kvq__override *all)
{
    static struct kvq__override back[KVQ_MAX_OVERRIDES];
    static struct fault_io disk;
    char text[KVQ_TEXT_BYTES] = "";
    uint32_t n_back = 0;
    fault_open(&disk, 1);
    if (kvq__quota_file_write(&disk.io, "/limits", all, n, text) ||
        kvq__quota_file_read(&disk.io, "/limits", back, &n_back, text) || n_back != n)
        abort();
    for (uint32_t i = 0; i < n; i++) {
        if (strcmp(back[i].ns, all[i].ns) != 0 || back[i].set != all[i].set)
            abort();
        for (int j = 0; j < KVQ__LIMITS; j++)
            if (all[i].set >> j & 1 && back[i].quota.limit[j] != all[i].quota.limit[j])
                abort();
    }
    fault_close(&disk);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvq__override all[KVQ_MAX_OVERRIDES];
    char text[KVQ_TEXT_BYTES] = "";
    uint32_t n;
    char *contents = malloc(size + 1);
    if (!contents || memchr(data, 0, size)) { // the reader of files refuses NUL characters
        free(contents);
        return 0;
    }
    memcpy(contents, data, size);
    contents[size] = 0;
    int error = kvq__quota_file_parse("fuzz", contents, all, &n, text);
    if (error == 0 && n <= KVQ_MAX_OVERRIDES) {
        check(n, all);
        goes_round(n, all);
    } else if (error == 0 || !text[0] || n) {
        abort();
    }
    free(contents);
    return 0;
}
