// SPDX-License-Identifier: Apache-2.0
//
// What goes wrong on purpose, what went wrong, and what every call asks before it begins.
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
static const char *const names[CALLS] = {
#define NAME(field, symbol, args) #field,
    KVQ_GPU_CALLS(NAME)
#undef NAME
        "kernel"};

// What was asked for one row.
struct plan {
    uint64_t calls = 0, at = 0; // made so far; the one to fail, 0: none
    bool every_later = false;
    int result = 0;
};

static std::mutex lock; // of plans and fault_text
static plan plans[CALLS];
static std::map<int, uint64_t> slow_calls; // of each thread; under the lock, too
static char fault_text[1280];
static thread_local char own_text[512];
static thread_local bool in_function;
static struct kvq_soft_control nowhere, *control = &nowhere;

static uint32_t load(const uint32_t *at)
{
    return ((const std::atomic<uint32_t> *)at)->load();
}

// ---- Text ----

void refuse(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(own_text, sizeof(own_text), format, list);
    va_end(list);
}

const char *last_text(int result)
{
    if (result != KVQ_GPU_OK && result == m.sticky)
        return fault_text;
    return result == KVQ_GPU_INVALID_VALUE && own_text[0] ? own_text : NULL;
}

void fault(int result, const char *why)
{
    guard g(lock);
    if (m.sticky)
        return;
    snprintf(fault_text, sizeof(fault_text), "%s", why);
    m.sticky = result;
}

// ---- Before every call ----

// Calls that say the same whatever happened to the context.
static bool needs_nothing(call row)
{
    return row == CALL_init || row == CALL_version || row == CALL_error_name ||
           row == CALL_error_text;
}

static bool survives_faults(call row)
{
    switch (row) {
    case CALL_device_count:
    case CALL_device_get:
    case CALL_device_name:
    case CALL_device_attribute:
    case CALL_device_memory:
    case CALL_device_uuid:
    case CALL_context_set:
    case CALL_context_get:
    case CALL_context_device:
    case CALL_context_release:
        return true;
    default:
        return needs_nothing(row);
    }
}

// Calls that take the driver's locks for long, or wait until the device has done something: never
// for whoever must go on.
static bool takes_time(call row)
{
    switch (row) {
    case CALL_context_sync:
    case CALL_limit_set:
    case CALL_stream_sync:
    case CALL_event_sync:
    case CALL_memory_alloc:
    case CALL_memory_free:
    case CALL_host_alloc:
    case CALL_host_free:
    case CALL_host_register:
    case CALL_host_unregister:
    case CALL_memory_create:
    case CALL_memory_release:
    case CALL_memory_export:
    case CALL_memory_import:
    case CALL_address_reserve:
    case CALL_address_free:
    case CALL_memory_map:
    case CALL_memory_unmap:
    case CALL_memory_access:
    case CALL_ipc_memory_open:
    case CALL_ipc_memory_close:
        return true;
    default:
        return false;
    }
}

static void count_slow(call row)
{
    if (!takes_time(row))
        return;
    guard g(lock);
    slow_calls[gettid()]++;
}

int broken()
{
    if (m.ended)
        return KVQ_GPU_DEINITIALIZED;
    const uint32_t wanted = load(&control->fault);
    if (wanted && !m.sticky)
        fault((int)wanted, "a fault that the control file asked for");
    return m.sticky;
}

int count(call row)
{
    guard g(lock);
    plan &p = plans[row];
    p.calls++;
    if (p.at == 0 || p.calls < p.at || (p.calls > p.at && !p.every_later))
        return KVQ_GPU_OK;
    return p.result;
}

int enter(call row)
{
    ((std::atomic<uint32_t> *)&control->calls)->fetch_add(1);
    count_slow(row);
    own_text[0] = row == CALL_error_name || row == CALL_error_text ? own_text[0] : '\0';
    if (!needs_nothing(row)) {
        if (m.ended)
            return KVQ_GPU_DEINITIALIZED;
        if (m.pid != getpid()) // also after a fork
            return KVQ_GPU_NOT_INITIALIZED;
        if (in_function)
            return KVQ_GPU_NOT_PERMITTED;
        if (m.seed || m.in_steps)
            delay(mix(m.seed, load(&control->calls)) & ~(uint64_t)1);
    }
    if (!survives_faults(row) && broken())
        return broken();
    const int result = count(row);
    if (result)
        refuse("a failure that was asked for");
    return result;
}

bool in_host_function()
{
    return in_function;
}

void run_host_function(void (*function)(void *), void *data)
{
    in_function = true;
    function(data);
    in_function = false;
}

// ---- What was asked for ----

static int find_call(const char *name, size_t length)
{
    for (int i = 0; i < CALLS; i++)
        if (strlen(names[i]) == length && memcmp(names[i], name, length) == 0)
            return i;
    return -1;
}

// "memory_alloc:3:2,kernel:5+:719"
int parse_failures(const char *list, char *text, size_t n)
{
    for (const char *s = list; *s;) {
        const size_t length = strcspn(s, ":");
        const int row = find_call(s, length);
        char *end = (char *)s + length;
        plan p;
        if (row >= 0 && *end == ':')
            p.at = strtoull(end + 1, &end, 10);
        p.every_later = *end == '+';
        end += p.every_later;
        if (p.at > 0 && *end == ':')
            p.result = (int)strtol(end + 1, &end, 10);
        if (p.result <= 0 || (*end && *end != ',')) {
            snprintf(text, n,
                     "KVQ_EMU_FAIL has \"%.64s\": it must be CALL:N:RESULT, or CALL:N+:RESULT "
                     "for all from the N-th on, with names of KVQ_GPU_CALLS or \"kernel\"",
                     s);
            return KVQ_GPU_INVALID_VALUE;
        }
        plans[row] = p;
        s = end + (*end == ',');
    }
    return KVQ_GPU_OK;
}

int open_control(const char *path)
{
    struct stat st;
    if (!path)
        return 0;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    void *at = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof(*control))
        at = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return -1;
    control = (struct kvq_soft_control *)at;
    return 0;
}
} // namespace soft

using namespace soft;

int kvq_soft_fail(const char *call, uint64_t n, bool every_later, int result)
{
    const int row = find_call(call, strlen(call));
    if (row < 0)
        return -1;
    guard g(soft::lock);
    plans[row].at = n ? plans[row].calls + n : 0;
    plans[row].every_later = every_later;
    plans[row].result = result;
    return 0;
}

uint64_t kvq_soft_slow(int thread)
{
    guard g(soft::lock);
    const auto found = slow_calls.find(thread);
    return found == slow_calls.end() ? 0 : found->second;
}

uint64_t kvq_soft_calls(const char *call)
{
    const int row = find_call(call, strlen(call));
    guard g(soft::lock);
    return row < 0 ? 0 : plans[row].calls;
}

struct kvq_soft_control *kvq_soft_control(void)
{
    return control;
}

uint64_t kvq_soft_brought(void)
{
    return m.brought;
}

void kvq_soft_seed(uint64_t seed)
{
    m.seed = seed;
}
