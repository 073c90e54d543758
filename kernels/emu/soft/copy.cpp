// SPDX-License-Identifier: Apache-2.0
//
// What streams do with memory: copies, fills, timeline words, host functions.
//
// Memory is checked when the work is given, and again when it is done: what was freed meanwhile is
// a fault, as on a GPU.
#include <string.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
static const size_t PART = 4096;

// With a seed, a copy arrives in parts, in any order.
static void copy_bytes(void *to, const void *from, size_t bytes, uint64_t draw)
{
    const size_t parts = (bytes + PART - 1) / PART;
    if (!m.seed || parts < 2 || parts > 64) {
        memmove(to, from, bytes);
        return;
    }
    const size_t start = draw % parts, step = draw & 1 ? 1 : parts - 1;
    for (size_t i = 0; i < parts; i++) {
        const size_t at = (start + i * step) % parts * PART;
        memmove((char *)to + at, (const char *)from + at, bytes - at < PART ? bytes - at : PART);
        if (i == parts / 2)
            delay(mix(draw, 2));
    }
}

static int missing(const char *what)
{
    fault(KVQ_GPU_ILLEGAL_ADDRESS, what);
    return KVQ_GPU_ILLEGAL_ADDRESS;
}

// The stream that a call works on, with its context current.
static int open_stream(kvq_gpu_stream *handle, stream_ptr *s)
{
    const int result = find_stream(handle, s);
    if (result)
        return result;
    if (!current())
        return KVQ_GPU_INVALID_CONTEXT;
    return (*s)->home == current() ? KVQ_GPU_OK : KVQ_GPU_INVALID_HANDLE;
}

static bool records(const stream_ptr &s)
{
    guard g(m.order);
    return s->recording != NULL;
}

// Pageable memory is read before the call returns, unless it is captured.
int copy_in(kvq_gpu_ptr to, const void *from, size_t bytes, kvq_gpu_stream *handle)
{
    stream_ptr s;
    work w;
    const int result = open_stream(handle, &s);
    if (result || bytes == 0)
        return result;
    if (!usable(to, bytes, true))
        return KVQ_GPU_INVALID_VALUE;
    std::shared_ptr<std::vector<char>> staged;
    if (!pinned(from, bytes) && !records(s))
        staged =
            std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
    w.run = [=](const run_at &at) {
        memory_use use;
        if (!usable(to, bytes, true))
            return missing("a copy to device memory that is gone");
        copy_bytes((void *)to, staged ? staged->data() : from, bytes, at.draw);
        return (int)KVQ_GPU_OK;
    };
    return give(s, std::move(w));
}

// To pageable memory, the call returns when all is there.
int copy_out(void *to, kvq_gpu_ptr from, size_t bytes, kvq_gpu_stream *handle)
{
    stream_ptr s;
    work w;
    uint64_t number = 0;
    int result = open_stream(handle, &s);
    if (result || bytes == 0)
        return result;
    if (!usable(from, bytes, false))
        return KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &at) {
        memory_use use;
        if (!usable(from, bytes, false))
            return missing("a copy from device memory that is gone");
        copy_bytes(to, (const void *)from, bytes, at.draw);
        return (int)KVQ_GPU_OK;
    };
    const bool wait = !pinned(to, bytes) && !records(s);
    result = give(s, std::move(w), &number);
    return result || !wait ? result : await(until(s, number));
}

int copy_device(kvq_gpu_ptr to, kvq_gpu_ptr from, size_t bytes, kvq_gpu_stream *handle)
{
    work w;
    if (bytes == 0)
        return KVQ_GPU_OK;
    if (!usable(to, bytes, true) || !usable(from, bytes, false))
        return KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &at) {
        memory_use use;
        if (!usable(to, bytes, true) || !usable(from, bytes, false))
            return missing("a copy between pieces of device memory of which one is gone");
        copy_bytes((void *)to, (const void *)from, bytes, at.draw);
        return (int)KVQ_GPU_OK;
    };
    return give(handle, std::move(w));
}

int fill8(kvq_gpu_ptr to, unsigned char value, size_t count, kvq_gpu_stream *handle)
{
    work w;
    if (count == 0)
        return KVQ_GPU_OK;
    if (!usable(to, count, true))
        return KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &) {
        memory_use use;
        if (!usable(to, count, true))
            return missing("a fill of device memory that is gone");
        memset((void *)to, value, count);
        return (int)KVQ_GPU_OK;
    };
    return give(handle, std::move(w));
}

int fill32(kvq_gpu_ptr to, unsigned value, size_t count, kvq_gpu_stream *handle)
{
    work w;
    if (count == 0)
        return KVQ_GPU_OK;
    if (to % 4 != 0 || count > SIZE_MAX / 4 || !usable(to, 4 * count, true))
        return KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &) {
        memory_use use;
        if (!usable(to, 4 * count, true))
            return missing("a fill of device memory that is gone");
        for (size_t i = 0; i < count; i++)
            memcpy((char *)to + 4 * i, &value, 4);
        return (int)KVQ_GPU_OK;
    };
    return give(handle, std::move(w));
}

// ---- Timeline words ----

static int check_word(kvq_gpu_ptr at, bool write)
{
    if (lacks(NO_MEMORY_OPS))
        return KVQ_GPU_NOT_SUPPORTED;
    return at % 8 == 0 && usable(at, 8, write) ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

int stream_wait64(kvq_gpu_stream *handle, kvq_gpu_ptr at, uint64_t value, unsigned flags)
{
    work w;
    const int result = check_word(at, false);
    if (result || flags != KVQ_GPU_WAIT_AT_LEAST)
        return result ? result : KVQ_GPU_INVALID_VALUE;
    w.first.push_back({(const word *)at, value, NULL});
    return give(handle, std::move(w));
}

int stream_write64(kvq_gpu_stream *handle, kvq_gpu_ptr at, uint64_t value, unsigned flags)
{
    work w;
    const int result = check_word(at, true);
    if (result || flags > 1)
        return result ? result : KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &) {
        memory_use use;
        if (!usable(at, 8, true))
            return missing("a write of a word in memory that is gone");
        publish((word *)at, value);
        return (int)KVQ_GPU_OK;
    };
    return give(handle, std::move(w));
}

int launch_host(kvq_gpu_stream *handle, void (*function)(void *), void *data)
{
    work w;
    if (!function)
        return KVQ_GPU_INVALID_VALUE;
    w.run = [=](const run_at &) {
        run_host_function(function, data);
        return (int)KVQ_GPU_OK;
    };
    return give(handle, std::move(w));
}
} // namespace soft
