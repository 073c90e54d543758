// SPDX-License-Identifier: Apache-2.0
//
// Builds log lines on the stack and writes each with one call; see log.h.
#include "daemon/log/log.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/ring.h"
#include "proto/status.h"

// The number of the descriptor stays the same once it is open; what it stands for may change.
static struct {
    int fd;
    uint32_t level; // enum kvq_log_level
} sink = {STDERR_FILENO, KVQ_LOG_INFO};

static const char *level_name(enum kvq_log_level level)
{
    static const char *const names[] = {"error", "warn", "info",
                                        "debug", [KVQ_LOG_ALWAYS] = "info"};
    assert((size_t)level < sizeof names / sizeof *names);
    return names[level];
}

static bool is_left_out(enum kvq_log_level level)
{
    return level != KVQ_LOG_ALWAYS && level > kvq_word_load(&sink.level);
}

bool kvq__log_has(enum kvq_log_level level)
{
    return !is_left_out(level);
}

int kvq__log_prepare(const char *path, char *text)
{
    bool file = path && *path;
    // A pipe that nobody reads must not make the daemon wait here; writes may wait, as to a file.
    const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    int fd =
        file ? open(path, flags, 0640) : fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (fd >= 0 && file)
        fcntl(fd, F_SETFL, O_APPEND);
    if (fd >= 0)
        return fd;
    snprintf(text, KVQ_TEXT_BYTES, "cannot open the log file %s: %s", file ? path : "(stderr)",
             strerror(errno));
    return KVQ_E_SYSTEM;
}

int kvq__log_check(const char *path, char *text)
{
    char folder[PATH_MAX];
    if (!path || !*path)
        return 0;
    int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return 0;
    }
    int error = errno; // a file that is not there is made
    snprintf(folder, sizeof folder, "%s", path);
    if (error == ENOENT && access(dirname(folder), W_OK | X_OK) == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "cannot open the log file %s: %s", path,
             strerror(error == ENOENT ? errno : error));
    return KVQ_E_SYSTEM;
}

void kvq__log_use(int fd, enum kvq_log_level level)
{
    assert(fd > STDERR_FILENO && fd != sink.fd && level < KVQ_LOG_ALWAYS);
    kvq_word_store(&sink.level, level);
    if (sink.fd == STDERR_FILENO) { // it was not opened
        sink.fd = fd;
        return;
    }
    dup3(fd, sink.fd, O_CLOEXEC); // at once, for whoever writes at the same time
    close(fd);
}

int kvq__log_open(const char *path, enum kvq_log_level level, char *text)
{
    int fd = kvq__log_prepare(path, text);
    if (fd >= 0)
        kvq__log_use(fd, level);
    return fd < 0 ? fd : 0;
}

void kvq__log_close(void)
{
    if (sink.fd != STDERR_FILENO)
        close(sink.fd);
    sink.fd = STDERR_FILENO;
}

const char *kvq__log_quote(char *out, size_t size, const char *text)
{
    size_t used = 0;
    out[used++] = '"';
    for (; *text && used + 6 < size; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            used += (size_t)snprintf(out + used, size - used, "\\%c", c);
        else if (c < 0x20 || c == 0x7f)
            used += (size_t)snprintf(out + used, size - used, "\\x%02x", c);
        else
            out[used++] = *text;
    }
    out[used++] = '"';
    out[used] = 0;
    return out;
}

static size_t clamp(int written, size_t room)
{
    size_t length = written < 0 ? 0 : (size_t)written;
    return length < room ? length : room - 1;
}

static void emit(enum kvq_log_level level, const char *event, uint32_t held_back,
                 const char *format, va_list arguments)
{
    char line[KVQ_LOG_LINE];
    const size_t room = sizeof line - 1; // for the newline
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t used = strftime(line, room, "ts=%Y-%m-%dT%H:%M:%S", &utc);
    used += clamp(snprintf(line + used, room - used, ".%03ldZ level=%s event=%s ",
                           now.tv_nsec / 1000000, level_name(level), event),
                  room - used);
    used += clamp(vsnprintf(line + used, room - used, format, arguments), room - used);
    if (held_back)
        used += clamp(snprintf(line + used, room - used, " held_back=%u", held_back), room - used);
    line[used++] = '\n';
    // Nobody could be told about a log that cannot be written.
    while (write(sink.fd, line, used) < 0 && errno == EINTR)
        ;
}

void kvq__log(enum kvq_log_level level, const char *event, const char *format, ...)
{
    if (is_left_out(level))
        return;
    va_list arguments;
    va_start(arguments, format);
    emit(level, event, 0, format, arguments);
    va_end(arguments);
}

// When the budget would be whole again after one more line; 0: there is none for a line now.
static uint64_t full_after_line(const struct kvq_log_budget *budget)
{
    const uint64_t second = 1000000000;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ns = (uint64_t)now.tv_sec * second + (uint64_t)now.tv_nsec;
    uint64_t full_at = (budget->full_at_ns > ns ? budget->full_at_ns : ns) + second;
    return full_at > ns + KVQ_LOG_BURST * second ? 0 : full_at;
}

bool kvq__log_allows(struct kvq_log_budget *budget, enum kvq_log_level level)
{
    if (is_left_out(level))
        return false;
    bool allowed = full_after_line(budget) != 0;
    budget->held_back += !allowed;
    return allowed;
}

void kvq__log_client(struct kvq_log_budget *budget, enum kvq_log_level level, const char *event,
                     const char *format, ...)
{
    if (!kvq__log_allows(budget, level))
        return;
    budget->full_at_ns = full_after_line(budget);
    va_list arguments;
    va_start(arguments, format);
    emit(level, event, budget->held_back, format, arguments);
    va_end(arguments);
    budget->held_back = 0;
}
