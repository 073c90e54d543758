// SPDX-License-Identifier: Apache-2.0
//
// Reading safetensors. The format: 8 bytes little-endian header length, a JSON object that maps
// names to {dtype, shape, data_offsets}, then the data; offsets count from the end of the header.
#include "tools/kvq-run/tensors.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

struct mapping {
    void *base;
    size_t bytes;
};

struct tensors {
    struct tensor *list; // sorted by name once all files are parsed
    size_t count, room;
    struct mapping maps[TENSORS_MAX_SHARDS];
    uint32_t n_maps;
    uint64_t bytes;
};

struct tensors *tensors_new(void)
{
    return calloc(1, sizeof(struct tensors));
}

void tensors_close(struct tensors **t)
{
    if (!t || !*t)
        return;
    for (uint32_t i = 0; i < (*t)->n_maps; i++)
        munmap((*t)->maps[i].base, (*t)->maps[i].bytes);
    free((*t)->list);
    free(*t);
    *t = NULL;
}

uint64_t tensors_bytes(const struct tensors *t)
{
    return t->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

const struct tensor *tensors_find(const struct tensors *t, const char *name)
{
    struct tensor key = {0};
    if (strlen(name) >= sizeof key.name || !t->count)
        return NULL;
    memcpy(key.name, name, strlen(name) + 1);
    return bsearch(&key, t->list, t->count, sizeof *t->list, by_name);
}

// A whole number in [0, 2^53] from JSON; false for anything else.
static bool json_count(const cJSON *item, uint64_t *out)
{
    if (!cJSON_IsNumber(item))
        return false;
    double d = item->valuedouble;
    if (!(d >= 0 && d <= 9007199254740992.0) || d != (double)(uint64_t)d)
        return false;
    *out = (uint64_t)d;
    return true;
}

static int parse_dtype(const cJSON *item, const char *file, const char *name, uint8_t *out,
                       struct problem *p)
{
    const char *text = cJSON_IsString(item) ? item->valuestring : "(none)";
    if (!strcmp(text, "F32"))
        *out = TENSOR_F32;
    else if (!strcmp(text, "F16"))
        *out = TENSOR_F16;
    else if (!strcmp(text, "BF16"))
        *out = TENSOR_BF16;
    else
        return problem_set(p, RUN_FAILED,
                           "%s: tensor %s has dtype %.20s; F32, F16 and BF16 are read", file, name,
                           text);
    return 0;
}

static int parse_shape(const cJSON *item, const char *file, struct tensor *t, uint64_t *values,
                       struct problem *p)
{
    int dims = cJSON_IsArray(item) ? cJSON_GetArraySize(item) : -1;
    if (dims < 0 || dims > TENSORS_MAX_DIMS)
        return problem_set(p, RUN_FAILED, "%s: tensor %s has %d dimensions; 0 to %d are read", file,
                           t->name, dims, TENSORS_MAX_DIMS);
    *values = 1;
    for (int i = 0; i < dims; i++) {
        uint64_t n;
        if (!json_count(cJSON_GetArrayItem(item, i), &n) || (n && *values > UINT64_C(1) << 53) ||
            __builtin_mul_overflow(*values, n, values))
            return problem_set(p, RUN_FAILED, "%s: tensor %s: dimension %d is not a usable size",
                               file, t->name, i);
        t->shape[i] = n;
    }
    t->dims = (uint8_t)dims;
    return 0;
}

static int parse_place(const cJSON *item, const char *file, struct tensor *t, uint64_t values,
                       const uint8_t *data, uint64_t data_bytes, struct problem *p)
{
    uint64_t from, to, want;
    uint64_t size = t->dtype == TENSOR_F32 ? 4 : 2;
    if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 2 ||
        !json_count(cJSON_GetArrayItem(item, 0), &from) ||
        !json_count(cJSON_GetArrayItem(item, 1), &to))
        return problem_set(p, RUN_FAILED, "%s: tensor %s: data_offsets are not two sizes", file,
                           t->name);
    if (from > to || to > data_bytes)
        return problem_set(p, RUN_FAILED,
                           "%s: tensor %s lies at bytes %llu to %llu, but the file holds %llu "
                           "bytes of data; the file is cut short or damaged",
                           file, t->name, (unsigned long long)from, (unsigned long long)to,
                           (unsigned long long)data_bytes);
    if (__builtin_mul_overflow(values, size, &want) || to - from != want)
        return problem_set(p, RUN_FAILED,
                           "%s: tensor %s: its shape asks for %llu bytes, its place "
                           "has %llu",
                           file, t->name, (unsigned long long)want,
                           (unsigned long long)(to - from));
    if ((uintptr_t)(data + from) % size)
        return problem_set(p, RUN_FAILED, "%s: tensor %s is not aligned to its elements", file,
                           t->name);
    t->data = data + from;
    return 0;
}

static struct tensor *new_tensor(struct tensors *t)
{
    if (t->count == t->room) {
        size_t room = t->room ? 2 * t->room : 256;
        struct tensor *list = realloc(t->list, room * sizeof *list);
        if (!list)
            return NULL;
        t->list = list;
        t->room = room;
    }
    memset(&t->list[t->count], 0, sizeof t->list[0]);
    return &t->list[t->count];
}

static int parse_tensor(struct tensors *t, const char *file, const cJSON *item, const uint8_t *data,
                        uint64_t data_bytes, struct problem *p)
{
    if (t->count >= TENSORS_MAX_COUNT)
        return problem_set(p, RUN_FAILED, "%s: more than %d tensors", file, TENSORS_MAX_COUNT);
    if (!item->string || strlen(item->string) >= TENSORS_NAME_BYTES)
        return problem_set(p, RUN_FAILED, "%s: a tensor's name is longer than %d bytes", file,
                           TENSORS_NAME_BYTES - 1);
    struct tensor *e = new_tensor(t);
    if (!e)
        return problem_set(p, RUN_FAILED, "%s: out of memory", file);
    memcpy(e->name, item->string, strlen(item->string) + 1);

    uint64_t values = 0;
    if (!cJSON_IsObject(item))
        return problem_set(p, RUN_FAILED, "%s: tensor %s is not described by an object", file,
                           e->name);
    if (parse_dtype(cJSON_GetObjectItemCaseSensitive(item, "dtype"), file, e->name, &e->dtype, p) ||
        parse_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), file, e, &values, p) ||
        parse_place(cJSON_GetObjectItemCaseSensitive(item, "data_offsets"), file, e, values, data,
                    data_bytes, p))
        return -1;
    t->count++;
    return 0;
}

static int sort_names(struct tensors *t, const char *file, struct problem *p)
{
    if (t->count)
        qsort(t->list, t->count, sizeof *t->list, by_name);
    for (size_t i = 1; i < t->count; i++)
        if (!strcmp(t->list[i - 1].name, t->list[i].name))
            return problem_set(p, RUN_FAILED, "%s: tensor %s is there twice", file,
                               t->list[i].name);
    return 0;
}

int tensors_parse(struct tensors *t, const char *file, const uint8_t *data, uint64_t bytes,
                  struct problem *p)
{
    if (bytes < 8)
        return problem_set(p, RUN_FAILED, "%s: %llu bytes are too few for a safetensors file", file,
                           (unsigned long long)bytes);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--)
        header = header << 8 | data[i];
    if (header > bytes - 8 || header > TENSORS_MAX_HEADER)
        return problem_set(p, RUN_FAILED,
                           "%s: the header claims %llu bytes, the file has %llu (and %d MiB is the "
                           "most); it is cut short or no safetensors file",
                           file, (unsigned long long)header, (unsigned long long)bytes,
                           TENSORS_MAX_HEADER >> 20);
    cJSON *json = cJSON_ParseWithLength((const char *)data + 8, header);
    int rc = 0;
    if (!cJSON_IsObject(json))
        rc = problem_set(p, RUN_FAILED, "%s: the header is not a JSON object", file);
    const cJSON *item;
    if (!rc)
        cJSON_ArrayForEach(item, json)
        {
            if (item->string && !strcmp(item->string, "__metadata__"))
                continue;
            rc = parse_tensor(t, file, item, data + 8 + header, bytes - 8 - header, p);
            if (rc)
                break;
        }
    cJSON_Delete(json);
    return rc ? rc : sort_names(t, file, p);
}

static int map_file(struct tensors *t, const char *path, struct problem *p)
{
    if (t->n_maps == TENSORS_MAX_SHARDS)
        return problem_set(p, RUN_FAILED, "%s: more than %d shards", path, TENSORS_MAX_SHARDS);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return problem_set(p, RUN_FAILED, "cannot open %s: %s", path, strerror(errno));
    struct stat st;
    int rc = 0;
    void *base = MAP_FAILED;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size <= 0)
        rc = problem_set(p, RUN_FAILED, "%s is not a file with content", path);
    else
        base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (!rc && base == MAP_FAILED)
        rc = problem_set(p, RUN_FAILED, "cannot map %s: %s", path, strerror(errno));
    if (rc)
        return rc;
    t->maps[t->n_maps++] = (struct mapping){base, (size_t)st.st_size};
    t->bytes += (uint64_t)st.st_size;
    return tensors_parse(t, path, base, (uint64_t)st.st_size, p);
}

// A shard's name is foreign too: it must stay inside the directory.
static bool plain_name(const char *name)
{
    return name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) < NAME_MAX;
}

static int open_shards(struct tensors *t, const char *dir, const char *index, struct problem *p)
{
    char *text = NULL;
    cJSON *json = NULL;
    int rc = -1;
    FILE *f = fopen(index, "re");
    long size = -1;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || size > TENSORS_MAX_HEADER ||
        fseek(f, 0, SEEK_SET) || !(text = malloc((size_t)size + 1)) ||
        fread(text, 1, (size_t)size, f) != (size_t)size) {
        problem_set(p, RUN_FAILED, "cannot read %s", index);
        goto out;
    }
    json = cJSON_ParseWithLength(text, (size_t)size);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map"), *item;
    if (!cJSON_IsObject(map)) {
        problem_set(p, RUN_FAILED, "%s: no object weight_map in it", index);
        goto out;
    }
    const char *seen[TENSORS_MAX_SHARDS];
    uint32_t n = 0;
    cJSON_ArrayForEach(item, map)
    {
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        uint32_t i = 0;
        while (i < n && strcmp(seen[i], name))
            i++;
        if (i < n)
            continue;
        char path[PATH_MAX];
        if (!plain_name(name) || n == TENSORS_MAX_SHARDS ||
            (size_t)snprintf(path, sizeof path, "%s/%s", dir, name) >= sizeof path) {
            problem_set(p, RUN_FAILED, "%s: '%.64s' is no usable shard name", index, name);
            goto out;
        }
        seen[n++] = name;
        if (map_file(t, path, p))
            goto out;
    }
    rc = 0;
out:
    cJSON_Delete(json);
    free(text);
    if (f)
        fclose(f);
    return rc;
}

int tensors_open(const char *dir, struct tensors **out, struct problem *p)
{
    char path[PATH_MAX];
    struct stat st;
    struct tensors *t = tensors_new();
    int rc = -1;
    if (!t) {
        problem_set(p, RUN_FAILED, "out of memory");
        goto out;
    }
    if ((size_t)snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir) >=
        sizeof path) {
        problem_set(p, RUN_FAILED, "the model's path is too long");
        goto out;
    }
    if (!stat(path, &st)) {
        rc = open_shards(t, dir, path, p);
        goto out;
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (stat(path, &st)) {
        problem_set(p, RUN_FAILED,
                    "%s holds neither model.safetensors nor model.safetensors.index.json", dir);
        goto out;
    }
    rc = map_file(t, path, p);
out:
    if (rc)
        tensors_close(&t);
    *out = t;
    return rc;
}
