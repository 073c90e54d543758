// SPDX-License-Identifier: Apache-2.0
//
// See quota_file.h.
#include "daemon/store/quota_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/config/grammar.h"
#include "proto/status.h"

static const char *const keys[KVQ__LIMITS] = {
    [KVQ__HOST_BYTES] = "host_bytes",   [KVQ__DEVICE_BYTES] = "device_bytes",
    [KVQ__DISK_BYTES] = "disk_bytes",   [KVQ__SESSIONS] = "max_sessions",
    [KVQ__TABLE_BYTES] = "table_bytes",
};
static const char header[] =
    "# Limits of namespaces that were set at run time, in place of the configuration's (kvqctl\n"
    "# quota). kvqd reads this file when it starts and writes it whenever a limit is set.\n";

enum { LONGEST_ENTRY = 400 }; // of one namespace, as it is written

// ---- Reading ----

struct parse {
    struct kvq__override *out;
    uint32_t n;
    char *text;
    int error;
};

// Complaints are written without their place, which kvq__quota_file_parse puts in front.
static const char nowhere[] = "";

static struct kvq__override *entry_of(struct parse *p, const char *name)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (strcmp(p->out[i].ns, name) == 0)
            return &p->out[i];
    if (!kvq__config_is_namespace(name)) {
        p->error =
            kvq__config_refuse(p->text, nowhere, "[namespace %.48s]: that is no name of one", name);
        return NULL;
    }
    if (p->n == KVQ_MAX_OVERRIDES) {
        p->error =
            kvq__config_refuse(p->text, nowhere, "more than %d namespaces", KVQ_MAX_OVERRIDES);
        return NULL;
    }
    struct kvq__override *o = &p->out[p->n++];
    memset(o, 0, sizeof *o);
    snprintf(o->ns, sizeof o->ns, "%s", name);
    return o;
}

static void take(struct parse *p, struct kvq__override *o, const char *key, const char *value)
{
    int i = 0;
    while (i < KVQ__LIMITS && strcmp(keys[i], key) != 0)
        i++;
    if (i == KVQ__LIMITS) {
        p->error = kvq__config_refuse(p->text, nowhere,
                                      "%.64s is not known; known are host_bytes, device_bytes, "
                                      "disk_bytes, max_sessions, table_bytes",
                                      key);
        return;
    }
    if (o->set >> i & 1) {
        p->error = kvq__config_refuse(p->text, nowhere, "%s is set twice for %.48s", key, o->ns);
        return;
    }
    uint64_t most = i == KVQ__SESSIONS ? UINT32_MAX : KVQ_MAX_QUOTA_BYTES;
    o->set |= 1u << i;
    p->error = kvq__parse_size(nowhere, key, value, &o->quota.limit[i], p->text);
    if (p->error == 0 && o->quota.limit[i] > most)
        p->error = kvq__config_refuse(p->text, nowhere, "%s is \"%.64s\"; at most %llu is allowed",
                                      key, value, (unsigned long long)most);
}

static bool handle(void *context, const char *section, const char *name, const char *value)
{
    static const char prefix[] = "namespace ";
    struct parse *p = context;
    if (!name) // a header
        return true;
    if (strncmp(section, prefix, strlen(prefix)) != 0) {
        p->error = kvq__config_refuse(p->text, nowhere,
                                      "%.64s stands below [%.48s]; known is [namespace NAME]", name,
                                      section);
        return false;
    }
    struct kvq__override *o = entry_of(p, section + strlen(prefix));
    if (o)
        take(p, o, name, value);
    return p->error == 0;
}

int kvq__quota_file_parse(const char *name, const char *contents, struct kvq__override *out,
                          uint32_t *n, char *text)
{
    char complaint[KVQ_TEXT_BYTES] = "", where[KVQ_CONFIG_PATH + 48];
    struct parse p = {.out = out, .text = complaint};
    const char *what = NULL;
    *n = 0;
    int line = kvq__ini_read(contents, handle, &p, &what);
    if (line == 0) {
        *n = p.n;
        return 0;
    }
    what = what ? what : complaint + strlen(": ");
    snprintf(where, sizeof where, "%s:%d", name, line);
    return kvq__config_refuse(text, where,
                              "%.300s; mend it, or remove the file, and the configuration's limits "
                              "hold again",
                              what);
}

static int refuse_file(const char *path, int error, const char *what, char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "%.256s cannot be %s: %s", path, what, strerror(-error));
    if (kvq_io_is_full(error))
        return KVQ_E_NO_SPACE;
    return error == -EROFS || error == -EACCES || error == -EPERM ? KVQ_E_READ_ONLY : KVQ_E_SYSTEM;
}

// Of a file that is open; contents has KVQ_MAX_CONFIG + 1 zeros.
static int read_whole_file(struct kvq_io *io, int file, const char *path, char *contents,
                           char *text)
{
    size_t length = 0;
    int rc = kvq_io_read(io, file, contents, KVQ_MAX_CONFIG, 0, &length);
    if (rc < 0)
        return refuse_file(path, rc, "read", text);
    if (length == KVQ_MAX_CONFIG)
        return kvq__config_refuse(text, path, "longer than %d bytes; remove the file",
                                  KVQ_MAX_CONFIG - 1);
    if (memchr(contents, 0, length))
        return kvq__config_refuse(text, path, "holds NUL characters; remove the file");
    return 0;
}

int kvq__quota_file_read(struct kvq_io *io, const char *folder, struct kvq__override *out,
                         uint32_t *n, char *text)
{
    char path[KVQ_CONFIG_PATH + 32];
    *n = 0;
    snprintf(path, sizeof path, "%s/" KVQ__QUOTA_FILE, folder);
    int file = kvq_io_open(io, path, KVQ_IO_READ);
    if (file == -ENOENT)
        return 0;
    if (file < 0)
        return refuse_file(path, file, "opened", text);
    char *contents = calloc(1, KVQ_MAX_CONFIG + 1);
    int rc = contents ? read_whole_file(io, file, path, contents, text) : KVQ_E_NO_MEMORY;
    if (!contents)
        snprintf(text, KVQ_TEXT_BYTES, "no memory to read %.256s", path);
    io->close(io, file);
    if (rc == 0)
        rc = kvq__quota_file_parse(path, contents, out, n, text);
    free(contents);
    return rc;
}

// ---- Writing ----

static size_t put(char *at, size_t room, const struct kvq__override *o)
{
    size_t used = (size_t)snprintf(at, room, "\n[namespace %s]\n", o->ns);
    for (int i = 0; i < KVQ__LIMITS; i++)
        if (o->set >> i & 1)
            used += (size_t)snprintf(at + used, room - used, "%s = %llu\n", keys[i],
                                     (unsigned long long)o->quota.limit[i]);
    return used;
}

int kvq__quota_file_write(struct kvq_io *io, const char *folder, const struct kvq__override *all,
                          uint32_t n, char *text)
{
    char path[KVQ_CONFIG_PATH + 32];
    bool placed;
    size_t room = sizeof header + n * (size_t)LONGEST_ENTRY, length;
    char *contents = malloc(room);
    if (!contents) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory to write " KVQ__QUOTA_FILE);
        return KVQ_E_NO_MEMORY;
    }
    length = (size_t)snprintf(contents, room, "%s", header);
    for (uint32_t i = 0; i < n; i++)
        if (all[i].set)
            length += put(contents + length, room - length, &all[i]);
    snprintf(path, sizeof path, "%s/" KVQ__QUOTA_FILE, folder);
    int rc = kvq_io_replace(io, path, contents, length, &placed);
    free(contents);
    if (rc && !placed)
        return refuse_file(path, rc, "written, and so no limit was changed", text);
    return rc ? refuse_file(path, rc,
                            "synced in its folder: it has the new limits, which do not hold before "
                            "kvqd starts again, and may be lost with the power; set them again",
                            text)
              : 0;
}
