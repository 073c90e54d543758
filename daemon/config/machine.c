// SPDX-License-Identifier: Apache-2.0
//
// See machine.h.
#include "daemon/config/machine.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config/internal.h"
#include "proto/status.h"

enum { FILE_BYTES = 8192, PATH = 1024, LONGEST_GROUP = 512 };

// A file as text. False: it cannot be read.
static bool read_text(const char *root, const char *path, char *out)
{
    char whole[PATH];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    int fd = open(whole, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, out, FILE_BYTES - 1);
    if (fd >= 0)
        close(fd);
    out[got > 0 ? got : 0] = 0;
    return got > 0;
}

// The number behind the word that the line begins with.
static uint64_t number_of(const char *text, const char *word)
{
    const char *at = text;
    char *end;
    while ((at = strstr(at, word)) && at != text && at[-1] != '\n')
        at++;
    if (!at)
        return KVQ__UNKNOWN;
    uint64_t number = strtoull(at + strlen(word), &end, 10);
    return end == at + strlen(word) ? KVQ__UNKNOWN : number;
}

// A file that holds one number, or "max".
static uint64_t number_in(const char *root, const char *group, const char *name)
{
    char path[PATH], text[FILE_BYTES];
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/%s", group, name);
    if (!read_text(root, path, text) || text[0] < '0' || text[0] > '9')
        return KVQ__UNKNOWN;
    return strtoull(text, NULL, 10);
}

static void read_machine(const char *root, struct kvq__machine *m)
{
    char text[FILE_BYTES];
    uint64_t kib =
        read_text(root, "/proc/meminfo", text) ? number_of(text, "MemTotal:") : KVQ__UNKNOWN;
    m->total = kib == KVQ__UNKNOWN
                   ? (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE)
                   : kib << 10;
    kib = number_of(text, "MemAvailable:");
    m->free = kib == KVQ__UNKNOWN ? KVQ__UNKNOWN : kib << 10;
}

// Pages of files that nobody has used lately make room.
static void read_group(const char *root, const char *group, struct kvq__machine *m)
{
    char path[PATH], text[FILE_BYTES];
    uint64_t limit = number_in(root, group, "memory.max");
    uint64_t used = number_in(root, group, "memory.current");
    if (limit == KVQ__UNKNOWN)
        return;
    if (limit < m->group) {
        m->group = limit;
        snprintf(m->group_name, sizeof m->group_name, "%s", *group ? group : "/");
    }
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", group);
    uint64_t cold = read_text(root, path, text) ? number_of(text, "inactive_file") : KVQ__UNKNOWN;
    if (used == KVQ__UNKNOWN)
        return;
    if (cold != KVQ__UNKNOWN)
        used -= cold < used ? cold : used;
    uint64_t left = limit > used ? limit - used : 0;
    m->group_free = left < m->group_free ? left : m->group_free;
}

void kvq__machine_read(const char *root, struct kvq__machine *m)
{
    char text[FILE_BYTES], group[LONGEST_GROUP] = "";
    *m = (struct kvq__machine){.group = KVQ__UNKNOWN, .group_free = KVQ__UNKNOWN};
    read_machine(root, m);
    const char *line = read_text(root, "/proc/self/cgroup", text) ? strstr(text, "0::/") : NULL;
    if (line && (line == text || line[-1] == '\n'))
        snprintf(group, sizeof group, "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
    for (;;) { // from its own up to the one at the top
        size_t length = strlen(group);
        while (length && group[length - 1] == '/')
            group[--length] = 0;
        read_group(root, group, m);
        if (length == 0)
            break;
        *strrchr(group, '/') = 0;
    }
}

uint64_t kvq__machine_most(const struct kvq__machine *m)
{
    return m->group < m->total ? m->group : m->total;
}

static unsigned long long mib(uint64_t bytes)
{
    return (unsigned long long)(bytes >> 20);
}

int kvq__machine_check(const struct kvq__machine *m, const char *option, uint64_t bytes,
                       uint64_t set_aside, char *text)
{
    assert(set_aside <= bytes);
    if (bytes > m->total)
        return kvq__config_refuse(text, option,
                                  "%llu MiB are more than the %llu MiB that this machine has; "
                                  "lower %s, or set it to 0, and kvqd chooses",
                                  mib(bytes), mib(m->total), option);
    if (bytes - set_aside > m->group)
        return kvq__config_refuse(text, option,
                                  "%llu MiB are more than the %llu MiB that the control group "
                                  "%.100s allows (memory.max); lower %s, or raise that limit "
                                  "(MemoryMax= of the service)",
                                  mib(bytes - set_aside), mib(m->group), m->group_name, option);
    return 0;
}

bool kvq__machine_is_tight(const struct kvq__machine *m, const char *option, uint64_t bytes,
                           uint64_t set_aside, char *text)
{
    bool by_group = m->group_free < m->free;
    uint64_t left = by_group ? m->group_free : m->free;
    assert(set_aside <= bytes);
    if (left == KVQ__UNKNOWN || bytes - set_aside <= left)
        return false;
    snprintf(text, KVQ_TEXT_BYTES,
             "%s allows %llu MiB, and %llu MiB are free %s now; lower it, or end what takes the "
             "rest before caches need it",
             option, mib(bytes - set_aside), mib(left), by_group ? "in the control group" : "here");
    return true;
}

bool kvq__machine_is_promised_twice(const struct kvq__machine *m, uint64_t pool_bytes,
                                    uint64_t set_aside, uint64_t buffer_bytes, char *text)
{
    bool group = m->group < m->total;
    uint64_t most = kvq__machine_most(m), pool = group ? pool_bytes - set_aside : pool_bytes;
    assert(set_aside <= pool_bytes);
    if (buffer_bytes <= most && pool <= most - buffer_bytes)
        return false;
    snprintf(text, KVQ_TEXT_BYTES,
             "pool_bytes allows %llu MiB and buffer_bytes %llu MiB, together more than the %llu "
             "MiB that the %s has; lower one of them, or the kernel ends kvqd when caches and "
             "clients' buffers fill both",
             mib(pool), mib(buffer_bytes), mib(most), group ? "control group" : "machine");
    return true;
}
