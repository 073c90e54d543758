// SPDX-License-Identifier: Apache-2.0
//
// What the environment says about the software driver; docs/emulator.md lists the variables.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
// A number with K, M or G behind it if `units`. False if it is not one, or out of range.
static bool number(const char *s, bool units, uint64_t least, uint64_t most, uint64_t *value)
{
    char *end;
    if (*s < '0' || *s > '9')
        return false;
    *value = strtoull(s, &end, 10);
    const char *unit = units && *end ? strchr("KMG", *end) : NULL;
    if (unit) {
        const int shift = 10 * (int)(unit - "KMG" + 1);
        *value = *value <= UINT64_MAX >> shift ? *value << shift : UINT64_MAX;
        end++;
    }
    return *end == '\0' && *value >= least && *value <= most;
}

// A variable that is not set leaves *value as it is.
static bool variable(const char *name, bool units, uint64_t least, uint64_t most, uint64_t *value,
                     char *text, size_t n)
{
    const char *s = getenv(name);
    if (!s || number(s, units, least, most, value))
        return true;
    snprintf(text, n, "%s is \"%.32s\": it must be a number from %llu to %llu", name, s,
             (unsigned long long)least, (unsigned long long)most);
    return false;
}

// Numbers of the machine's devices in the order of this process's ordinals: "1,0".
static bool read_visible(const char *s, int all, char *text, size_t n)
{
    m.set.devices = 0;
    for (const char *at = s; *at;) {
        const int one = *at - '0';
        if (one < 0 || one >= all || m.set.devices >= all || (at[1] && at[1] != ',')) {
            snprintf(text, n,
                     "KVQ_EMU_VISIBLE is \"%.32s\": it must be a list of device numbers "
                     "below %d, such as 1,0",
                     s, all);
            return false;
        }
        m.set.number[m.set.devices++] = one;
        at += at[1] ? 2 : 1;
    }
    return true;
}

static bool read_lacks(const char *s, char *text, size_t n)
{
    const struct {
        const char *name;
        unsigned bit;
    } all[] = {{"mapping", NO_MAPPING},       {"fd", NO_FD},
               {"memory_ops", NO_MEMORY_OPS}, {"ipc_events", NO_IPC_EVENTS},
               {"register", NO_REGISTER},     {"legacy_ipc", NO_LEGACY}};
    while (*s) {
        const size_t length = strcspn(s, ",");
        unsigned bit = 0;
        for (const auto &one : all)
            if (strlen(one.name) == length && memcmp(one.name, s, length) == 0)
                bit = one.bit;
        if (!bit) {
            snprintf(text, n,
                     "KVQ_EMU_LACKS has \"%.*s\": it can have mapping, fd, memory_ops, "
                     "ipc_events, register and legacy_ipc",
                     (int)length, s);
            return false;
        }
        m.set.lacks |= bit;
        s += length + (s[length] == ',');
    }
    return true;
}

static const char *text_of(const char *name)
{
    const char *s = getenv(name);
    return s ? s : "";
}

int read_settings(char *text, size_t n)
{
    uint64_t devices = 1, multiprocessors = 8, pid = (uint64_t)getpid(), seed = 0, capability = 90,
             connections = 8, depth = 1024, shared = 227 << 10;
    kvq_emu_options gpu = {};
    gpu.memory = (uint64_t)4 << 30;
    if (!variable("KVQ_EMU_DEVICES", false, 0, MAX_DEVICES, &devices, text, n) ||
        !variable("KVQ_EMU_MEMORY", true, BLOCK, (uint64_t)1 << 40, &gpu.memory, text, n) ||
        !variable("KVQ_EMU_MULTIPROCESSORS", false, 1, 1024, &multiprocessors, text, n) ||
        !variable("KVQ_EMU_CAPABILITY", false, 80, 129, &capability, text, n) ||
        !variable("KVQ_EMU_SHARED", true, 48 << 10, 227 << 10, &shared, text, n) ||
        !variable("KVQ_EMU_SEED", false, 0, UINT64_MAX, &seed, text, n) ||
        !variable("CUDA_DEVICE_MAX_CONNECTIONS", false, 1, 32, &connections, text, n) ||
        !variable("KVQ_EMU_DEPTH", false, 1, UINT32_MAX, &depth, text, n) ||
        !variable("KVQ_EMU_PID", false, 1, INT32_MAX, &pid, text, n))
        return KVQ_GPU_INVALID_VALUE;
    m.set.devices = (int)devices;
    for (int i = 0; i < MAX_DEVICES; i++)
        m.set.number[i] = i;
    gpu.multiprocessors = (int)multiprocessors;
    gpu.capability = (int)capability;
    gpu.shared_bytes = (uint32_t)shared;
    m.set.gpu = gpu::emu_complete(&gpu);
    m.set.pid = (uint32_t)pid;
    m.set.connections = (unsigned)connections;
    m.set.depth = depth;
    m.seed = seed;
    if ((getenv("KVQ_EMU_VISIBLE") &&
         !read_visible(getenv("KVQ_EMU_VISIBLE"), (int)devices, text, n)) ||
        !read_lacks(text_of("KVQ_EMU_LACKS"), text, n))
        return KVQ_GPU_INVALID_VALUE;
    if (parse_failures(text_of("KVQ_EMU_FAIL"), text, n) ||
        parse_stall(text_of("KVQ_EMU_STALL"), text, n))
        return KVQ_GPU_INVALID_VALUE;
    if (open_control(getenv("KVQ_EMU_CONTROL"))) {
        snprintf(text, n, "KVQ_EMU_CONTROL: no file of at least %zu bytes can be opened there",
                 sizeof(struct kvq_soft_control));
        return KVQ_GPU_INVALID_VALUE;
    }
    return m.set.devices ? KVQ_GPU_OK : KVQ_GPU_NO_DEVICE;
}
} // namespace soft
