// SPDX-License-Identifier: Apache-2.0
// See openmp.h.
#include "tools/kvqctl/openmp.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum {
    PIECE_BYTES = 64 * 1024,       // of maps; far longer than a line, whose path has 4 KiB
    MAPS_BYTES = 32 * 1024 * 1024, // a process may have 65,530 mappings unless told otherwise
    ENVIRON_BYTES = 1024 * 1024,   // more, and we know nothing
    STATUS_BYTES = 16 * 1024,
};

enum { GOMP, IOMP, LLVM, RUNTIMES };
static const char *const runtimes[RUNTIMES] = {
    [GOMP] = "libgomp", [IOMP] = "libiomp5", [LLVM] = "libomp"};

static bool begins(const char *text, size_t bytes, const char *with)
{
    size_t n = strlen(with);
    return bytes >= n && memcmp(text, with, n) == 0;
}

// ---- What a process maps ----

// "libgomp.so.1.0.0", "libgomp-a34b3233.so.1" of a wheel; not "libompl.so", which is no OpenMP.
static bool is_library(const char *name, size_t bytes, const char *stem)
{
    size_t n = strlen(stem);
    return begins(name, bytes, stem) && bytes > n && (name[n] == '.' || name[n] == '-');
}

static void take_line(struct kvq__ctl_process *p, const char *line, size_t bytes)
{
    const char *path = memchr(line, '/', bytes); // nothing before the path has one
    if (!path)
        return;
    bytes -= (size_t)(path - line);
    p->asks |= begins(path, bytes, "/memfd:kvq-requests");
    p->attends |= begins(path, bytes, "/memfd:kvq-extent");
    const char *slash = memrchr(path, '/', bytes), *name = slash + 1;
    bytes -= (size_t)(name - path);
    for (int i = 0; i < RUNTIMES; i++)
        if (is_library(name, bytes, runtimes[i]))
            p->runtimes |= 1u << i;
}

void kvq__ctl_process_maps(struct kvq__ctl_process *p, const char *text, size_t bytes)
{
    while (bytes) {
        const char *end = memchr(text, '\n', bytes);
        size_t n = end ? (size_t)(end - text) : bytes;
        take_line(p, text, n);
        n += end ? 1 : 0;
        text += n;
        bytes -= n;
    }
}

// ---- What its environment asks for ----

static const char *without_blanks(const char *value)
{
    while (isspace((unsigned char)*value))
        value++;
    return value;
}

static uint8_t spin_of_policy(const char *value)
{
    value = without_blanks(value);
    if (strncasecmp(value, "passive", 7) == 0)
        return *without_blanks(value + 7) ? KVQ__CTL_SPIN_UNSAID : KVQ__CTL_SPIN_NEVER;
    return KVQ__CTL_SPIN_UNSAID;
}

// A number, maybe with a unit, or "infinite"; what is neither counts for nothing, as with them.
static uint8_t spin_of_number(const char *value)
{
    value = without_blanks(value);
    if (strncasecmp(value, "infinit", 7) == 0)
        return KVQ__CTL_SPIN_LONG;
    if (!isdigit((unsigned char)*value))
        return KVQ__CTL_SPIN_UNSAID;
    return strtoull(value, NULL, 10) == 0 ? KVQ__CTL_SPIN_NEVER : KVQ__CTL_SPIN_LONG;
}

// The first of a list, as "4,2" for nested regions.
static uint32_t threads_of(const char *value)
{
    value = without_blanks(value);
    unsigned long long n = isdigit((unsigned char)*value) ? strtoull(value, NULL, 10) : 0;
    return n > UINT32_MAX ? UINT32_MAX : (uint32_t)n;
}

enum { POLICY = 1, SPINCOUNT = 2, BLOCKTIME = 4, NUMBER = 8 };

// Of a name that is there twice the first counts, as for getenv.
static void take_variable(struct kvq__ctl_process *p, unsigned *seen, const char *variable)
{
    static const struct {
        const char *name;
        unsigned which;
    } names[] = {{"OMP_WAIT_POLICY=", POLICY},
                 {"GOMP_SPINCOUNT=", SPINCOUNT},
                 {"KMP_BLOCKTIME=", BLOCKTIME},
                 {"OMP_NUM_THREADS=", NUMBER}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n = strlen(names[i].name);
        if (strncmp(variable, names[i].name, n) != 0 || *seen & names[i].which)
            continue;
        *seen |= names[i].which;
        if (names[i].which == POLICY)
            p->policy = spin_of_policy(variable + n);
        else if (names[i].which == SPINCOUNT)
            p->gomp = spin_of_number(variable + n);
        else if (names[i].which == BLOCKTIME)
            p->kmp = spin_of_number(variable + n);
        else
            p->most = threads_of(variable + n);
    }
}

bool kvq__ctl_process_environ(struct kvq__ctl_process *p, const char *text, size_t bytes)
{
    unsigned seen = 0;
    bool any = false;
    assert(text[bytes] == 0);
    for (const char *at = text; at < text + bytes; at += strlen(at) + 1) {
        const char *equals = strchr(at, '=');
        any |= equals && equals > at;
        take_variable(p, &seen, at);
    }
    return any;
}

void kvq__ctl_process_status(struct kvq__ctl_process *p, const char *text)
{
    const char *line = strstr(text, "\nThreads:"); // names cannot have it: their \n is escaped
    p->threads = line ? threads_of(line + strlen("\nThreads:")) : 0;
}

// ---- Reading ----

// Up to `size` bytes of an open file. Fewer: it has ended. A negative errno.
static ssize_t fill(int fd, char *to, size_t size)
{
    size_t at = 0;
    while (at < size) {
        ssize_t n = read(fd, to + at, size - at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        at += (size_t)n;
    }
    return (ssize_t)at;
}

// A whole file with a NUL behind it. Its bytes, or a negative errno.
static ssize_t read_all(int dir, const char *name, char *to, size_t size)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return -errno;
    ssize_t n = fill(fd, to, size);
    close(fd);
    if (n == (ssize_t)size)
        return -E2BIG;
    if (n >= 0)
        to[n] = 0;
    return n;
}

// Piece by piece, each up to its last line's end. What has no end in a whole piece is no line.
static int read_maps(struct kvq__ctl_process *p, int dir, char *piece)
{
    size_t kept = 0;
    ssize_t n = 1;
    int fd = openat(dir, "maps", O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return -errno;
    for (size_t all = 0; n > 0 && all < MAPS_BYTES; all += (size_t)n) {
        n = fill(fd, piece + kept, PIECE_BYTES - kept);
        if (n < 0)
            break;
        size_t bytes = kept + (size_t)n;
        const char *end = memrchr(piece, '\n', bytes);
        size_t whole = end ? (size_t)(end + 1 - piece) : bytes;
        kvq__ctl_process_maps(p, piece, whole);
        kept = bytes - whole;
        memmove(piece, piece + whole, kept);
    }
    close(fd);
    return n < 0 ? (int)n : n > 0 ? -E2BIG : 0;
}

int kvq__ctl_process_read(struct kvq__ctl_process *p, const char *proc, uint64_t pid)
{
    char path[256];
    *p = (struct kvq__ctl_process){0};
    snprintf(path, sizeof path, "%s/%" PRIu64, proc, pid);
    // Files of one process, also if its number is given to another one meanwhile.
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return -errno;
    char *memory = malloc(ENVIRON_BYTES);
    ssize_t rc = memory ? read_all(dir, "status", memory, STATUS_BYTES) : -ENOMEM;
    if (rc >= 0) {
        kvq__ctl_process_status(p, memory);
        rc = read_all(dir, "environ", memory, ENVIRON_BYTES);
    }
    if (rc >= 0)
        rc = kvq__ctl_process_environ(p, memory, (size_t)rc) ? 0 : -ENODATA;
    if (rc >= 0)
        rc = read_maps(p, dir, memory);
    free(memory);
    close(dir);
    return (int)rc;
}

// ---- What follows ----

// Each runtime's own variable goes before OMP_WAIT_POLICY.
static bool may_spin(uint8_t own, uint8_t policy)
{
    return own == KVQ__CTL_SPIN_UNSAID ? policy != KVQ__CTL_SPIN_NEVER : own == KVQ__CTL_SPIN_LONG;
}

const char *kvq__ctl_process_spins(const struct kvq__ctl_process *p)
{
    for (int i = 0; i < RUNTIMES; i++)
        if (p->runtimes & 1u << i && may_spin(i == GOMP ? p->gomp : p->kmp, p->policy))
            return runtimes[i];
    return NULL;
}

uint32_t kvq__ctl_process_team(const struct kvq__ctl_process *p, uint32_t cpus)
{
    uint32_t team = p->most ? p->most : cpus;
    return team < p->threads ? team : p->threads;
}
