// SPDX-License-Identifier: Apache-2.0
//
// When streams go on: delays drawn from a seed, which bring work of different streams into every
// order that is allowed, and stalls that a test asks for.
//
// Every draw is made of the seed, the stream's number and that of its work, and so is the same in
// every run in which one process's own calls are.
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
// KVQ_EMU_STALL: this work of this stream begins so much later.
static struct {
    uint64_t stream, number, milliseconds;
    bool set;
} planned;

static void nap(uint64_t ns)
{
    const struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&t, NULL);
}

uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x7f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Half of the time none; some turns of others; or long enough for whole chains of work.
void delay(uint64_t draw)
{
    if (m.in_steps)
        take_steps();
    if (m.in_steps || !m.seed)
        return;
    const unsigned kind = draw % 8, size = (unsigned)(draw >> 8 & 0xff);
    if (kind < 4)
        return;
    if (kind == 7) {
        ((std::atomic<uint32_t> *)&kvq_soft_control()->naps)->fetch_add(1);
        nap(1000 * (size < 16 ? 40 * (size + 1) : size / 4));
    } else {
        for (unsigned i = 0; i <= size % 8; i++)
            sched_yield();
    }
}

int parse_stall(const char *spec, char *text, size_t n)
{
    char *end = (char *)spec;
    if (!*spec)
        return KVQ_GPU_OK;
    planned.stream = strtoull(spec, &end, 10);
    if (end != spec && *end == ':')
        planned.number = strtoull(end + 1, &end, 10);
    if (planned.number > 0 && *end == ':')
        planned.milliseconds = strtoull(end + 1, &end, 10);
    planned.set = planned.milliseconds > 0 && !*end;
    if (planned.set)
        return KVQ_GPU_OK;
    snprintf(text, n,
             "KVQ_EMU_STALL is \"%.64s\": it must be STREAM:N:MILLISECONDS, the number of a "
             "stream in order of creation (0: the default one) and of its work, from 1",
             spec);
    return KVQ_GPU_INVALID_VALUE;
}

static uint64_t milliseconds()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void hold(stream &s, uint64_t number)
{
    struct kvq_soft_control *c = kvq_soft_control();
    std::atomic<uint32_t> &stall = *(std::atomic<uint32_t> *)&c->stall;
    std::atomic<uint32_t> &held = *(std::atomic<uint32_t> *)&c->held;
    uint64_t end = 0;
    if (planned.set && planned.stream == s.number && planned.number == number)
        end = milliseconds() + planned.milliseconds;
    if (stall == 0 && !s.stalled && end == 0)
        return;
    held++;
    while ((stall != 0 || s.stalled || milliseconds() < end) && !broken())
        nap(500000);
    held--;
}
} // namespace soft

void kvq_soft_stall(struct kvq_gpu_stream *handle, bool held)
{
    soft::stream_ptr s;
    if (soft::find_stream(handle, &s) == KVQ_GPU_OK)
        s->stalled = held;
}
