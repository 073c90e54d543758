// SPDX-License-Identifier: Apache-2.0
// Runs a fuzzer's entry point over every file of its corpus, so that builds without libFuzzer
// still prove that known inputs do no harm. Fails when the corpus is missing or empty.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Reads a whole file into exact-size heap memory, so that a sanitizer sees any overrun.
static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = NULL;
    if (!file)
        return NULL;
    if (fseek(file, 0, SEEK_END) == 0) {
        long end = ftell(file);
        rewind(file);
        data = end >= 0 ? malloc(end ? (size_t)end : 1) : NULL;
        *size = data ? fread(data, 1, (size_t)end, file) : 0;
    }
    fclose(file);
    return data;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
        return 1;
    }
    struct dirent **entries;
    int count = scandir(argv[1], &entries, NULL, alphasort);
    int inputs = 0;
    for (int i = 0; i < count; i++) {
        char path[4096];
        size_t size = 0;
        snprintf(path, sizeof path, "%s/%s", argv[1], entries[i]->d_name);
        uint8_t *data = entries[i]->d_name[0] == '.' ? NULL : read_file(path, &size);
        if (data) {
            LLVMFuzzerTestOneInput(data, size);
            inputs++;
        }
        free(data);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
    printf("%d inputs of %s replayed\n", inputs, argv[1]);
    return inputs > 0 ? 0 : 1;
}
