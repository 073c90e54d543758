// SPDX-License-Identifier: Apache-2.0
//
// See gpu.h.
#include "daemon/core/gpu/gpu.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "daemon/core/gpu/extents.h"
#include "daemon/core/gpu/gate.h"
#include "proto/sync.h"

// Device memory that is freed when nothing runs on the GPU: kvq__gpu_sweep.
struct leftover {
    LIST_ENTRY(leftover) link;
    kvq_gpu_ptr memory;
};

// A copy of codebooks, for all who have the same on the host.
struct book {
    LIST_ENTRY(book) link;
    struct kvq_book host, copy;
    kvq_gpu_ptr memory;
    uint32_t uses;
};

enum { SLAB_COUNTS = 4096 };

// Counters that were taken from the system together.
struct slab {
    struct slab *next;
    void *host;
    struct kvq__gpu_counts counts[SLAB_COUNTS];
};

struct kvq__gpu {
    const struct kvq_gpu_driver *driver;
    int device;
    struct kvq_gpu_context *context;
    struct kvq_gpu kernels;
    bool kernels_open, memory_ops, shared_events, mapping, exports;
    struct kvq_gpu_stream *streams[KVQ__GPU_STREAMS];
    struct kvq_gpu_stream *stream; // KVQ__GPU_STREAM_SMALL
    uint32_t connections, connections_left;
    struct kvq__gate *gate; // of all GPUs
    uint64_t budget;
    struct kvq_gpu_uuid uuid;
    char uuid_text[KVQ__GPU_UUID_TEXT], name[KVQ__GPU_NAME];
    char fault[KVQ_TEXT_BYTES];
    LIST_HEAD(, book) books;
    LIST_HEAD(, leftover) leftovers;
    struct slab *slabs, *unready; // unready: one whose memory the GPU does not reach yet
    struct kvq__gpu_counts *free_counts;
    struct kvq__reserve *reserve; // NULL = none (extents.h)
};

struct kvq__gpus {
    struct kvq_gpu_driver driver;
    struct kvq__gate gate;
    struct kvq__gpu *gpu[KVQ_MAX_GPUS];
    uint32_t n;
    // Devices that nobody named and that cannot be used, and why.
    char skipped[KVQ_MAX_GPUS][KVQ_TEXT_BYTES];
    uint32_t n_skipped;
};

// ---- Telling ----

uint32_t kvq__gpus_count(const struct kvq__gpus *gpus)
{
    return gpus ? gpus->n : 0;
}

struct kvq__gpu *const *kvq__gpus_list(const struct kvq__gpus *gpus)
{
    return gpus ? gpus->gpu : NULL;
}

struct kvq__gpu *kvq__gpus_get(const struct kvq__gpus *gpus, uint32_t i)
{
    assert(i < kvq__gpus_count(gpus));
    return gpus->gpu[i];
}

const char *kvq__gpus_skipped(const struct kvq__gpus *gpus, uint32_t i)
{
    return gpus && i < gpus->n_skipped ? gpus->skipped[i] : NULL;
}

struct kvq__gpu *kvq__gpus_find(const struct kvq__gpus *gpus, const uint8_t uuid[16])
{
    for (uint32_t i = 0; i < kvq__gpus_count(gpus); i++)
        if (memcmp(gpus->gpu[i]->uuid.bytes, uuid, 16) == 0)
            return gpus->gpu[i];
    return NULL;
}

const struct kvq_gpu_driver *kvq__gpu_driver(const struct kvq__gpu *gpu)
{
    return gpu->driver;
}

const struct kvq_gpu *kvq__gpu_kernels(const struct kvq__gpu *gpu)
{
    return &gpu->kernels;
}

int kvq__gpu_device(const struct kvq__gpu *gpu)
{
    return gpu->device;
}

const uint8_t *kvq__gpu_uuid(const struct kvq__gpu *gpu)
{
    return gpu->uuid.bytes;
}

const char *kvq__gpu_uuid_text(const struct kvq__gpu *gpu)
{
    return gpu->uuid_text;
}

const char *kvq__gpu_name(const struct kvq__gpu *gpu)
{
    return gpu->name;
}

bool kvq__gpu_has_memory_ops(const struct kvq__gpu *gpu)
{
    return gpu->memory_ops;
}

bool kvq__gpu_has_events(const struct kvq__gpu *gpu)
{
    return gpu->shared_events;
}

bool kvq__gpu_exports(const struct kvq__gpu *gpu)
{
    return gpu->exports;
}

bool kvq__gpu_maps(const struct kvq__gpu *gpu)
{
    return gpu->mapping;
}

struct kvq__reserve **kvq__gpu_reserve(struct kvq__gpu *gpu)
{
    return &gpu->reserve;
}

struct kvq_gpu_stream *kvq__gpu_stream(const struct kvq__gpu *gpu, enum kvq__gpu_stream which)
{
    assert(which < KVQ__GPU_STREAMS && gpu->streams[which]);
    return gpu->streams[which];
}

uint32_t kvq__gpu_connections(const struct kvq__gpu *gpu)
{
    return gpu->connections;
}

static uint32_t connections_for_clients(const struct kvq__gpu *gpu)
{
    const uint32_t own = KVQ__GPU_STREAMS + 1; // with the default stream, which libuv's threads use
    return gpu->connections > own ? gpu->connections - own : 0;
}

uint32_t kvq__gpu_clients_alone(const struct kvq__gpu *gpu)
{
    return connections_for_clients(gpu) / 2;
}

bool kvq__gpu_take_queues(struct kvq__gpu *gpu)
{
    assert(gpu->connections_left <= connections_for_clients(gpu));
    if (gpu->connections_left < 2)
        return false;
    gpu->connections_left -= 2;
    return true;
}

void kvq__gpu_give_queues(struct kvq__gpu *gpu)
{
    assert(gpu->connections_left + 2 <= connections_for_clients(gpu));
    gpu->connections_left += 2;
}

struct kvq__gate *kvq__gpu_gate(const struct kvq__gpu *gpu)
{
    return gpu->gate;
}

uint64_t kvq__gpu_budget(const struct kvq__gpu *gpu)
{
    return gpu->budget;
}

int kvq__gpu_enter(const struct kvq__gpu *gpu)
{
    struct kvq_gpu_context *current = NULL;
    assert(gpu->context);
    if (gpu->driver->context_get(&current) == KVQ_GPU_OK && current == gpu->context)
        return KVQ_GPU_OK;
    return gpu->driver->context_set(gpu->context);
}

// ---- Faults ----

const char *kvq__gpu_fault(const struct kvq__gpu *gpu)
{
    return gpu->fault[0] ? gpu->fault : NULL;
}

int kvq__gpu_failed(struct kvq__gpu *gpu, int result, const char *what)
{
    assert(result != KVQ_GPU_OK);
    if (result == KVQ_GPU_OUT_OF_MEMORY)
        return KVQ_E_NO_MEMORY;
    if (!gpu->fault[0])
        kvq_gpu_fault(gpu->driver, result, what, gpu->fault, sizeof gpu->fault);
    return KVQ_E_SYSTEM;
}

int kvq__gpu_order_lost(struct kvq__gpu *gpu, int result, const char *what)
{
    assert(result != KVQ_GPU_OK);
    if (!gpu->fault[0])
        kvq_gpu_fault(gpu->driver, result, what, gpu->fault, sizeof gpu->fault);
    return KVQ_E_SYSTEM;
}

int kvq__gpu_faulted(struct kvq__gpu *gpu, const char *text)
{
    assert(text[0]); // an empty one would say that nothing has failed
    if (!gpu->fault[0])
        snprintf(gpu->fault, sizeof gpu->fault, "%s", text);
    return KVQ_E_SYSTEM;
}

const char *kvq__gpu_look(struct kvq__gpu *gpu)
{
    int result = kvq__gpu_enter(gpu);
    result = result ? result : gpu->driver->stream_query(gpu->stream);
    if (result != KVQ_GPU_OK && result != KVQ_GPU_NOT_READY)
        kvq__gpu_failed(gpu, result, "looking at the GPU");
    return kvq__gpu_fault(gpu);
}

// ---- Small copies ----

int kvq__gpu_put(struct kvq__gpu *gpu, kvq_gpu_ptr to, const void *from, size_t bytes)
{
    int result = kvq__gpu_enter(gpu);
    assert(to && bytes > 0);
    result = result ? result : gpu->driver->copy_in(to, from, bytes, gpu->stream);
    result = result ? result : gpu->driver->stream_sync(gpu->stream);
    return result ? kvq__gpu_failed(gpu, result, "copying to the GPU") : 0;
}

int kvq__gpu_take(struct kvq__gpu *gpu, void *to, kvq_gpu_ptr from, size_t bytes)
{
    int result = kvq__gpu_enter(gpu);
    assert(from && bytes > 0);
    result = result ? result : gpu->driver->copy_out(to, from, bytes, gpu->stream);
    result = result ? result : gpu->driver->stream_sync(gpu->stream);
    return result ? kvq__gpu_failed(gpu, result, "copying from the GPU") : 0;
}

void kvq__gpu_poke(struct kvq__gpu *gpu, kvq_gpu_ptr at, uint64_t value)
{
    int result = kvq__gpu_enter(gpu);
    assert(at % sizeof value == 0);
    result = result ? result : gpu->driver->stream_write64(gpu->stream, at, value, 0);
    if (result)
        kvq__gpu_failed(gpu, result, "writing a word of a timeline");
}

// ---- Memory that is freed when nothing runs ----

void kvq__gpu_free_later(struct kvq__gpu *gpu, kvq_gpu_ptr memory)
{
    struct leftover *l = calloc(1, sizeof *l);
    assert(memory);
    if (!l)
        return; // lost until the context goes: freeing it now could wait for a client
    l->memory = memory;
    LIST_INSERT_HEAD(&gpu->leftovers, l, link);
}

// ---- Counters ----

static bool add_slab(struct kvq__gpu *gpu)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    const unsigned flags = KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED;
    struct slab *slab = gpu->unready ? gpu->unready : calloc(1, sizeof *slab);
    assert(!gpu->free_counts);
    kvq_gpu_ptr at = 0;
    gpu->unready = slab;
    if (!slab)
        return false;
    int result = kvq__gpu_enter(gpu);
    if (result == KVQ_GPU_OK && !slab->host)
        result =
            d->host_alloc(&slab->host, SLAB_COUNTS * sizeof(struct kvq_gpu_store_counts), flags);
    result = result ? result : d->host_device(&at, slab->host, 0);
    if (result) {
        kvq__gpu_failed(gpu, result, "taking memory for counters");
        return false;
    }
    for (uint32_t i = 0; i < SLAB_COUNTS; i++) {
        struct kvq_gpu_store_counts *host = slab->host;
        slab->counts[i] = (struct kvq__gpu_counts){host + i, at + i * sizeof *host, NULL};
        kvq__gpu_counts_free(gpu, &slab->counts[i]);
    }
    slab->next = gpu->slabs;
    gpu->slabs = slab;
    gpu->unready = NULL;
    return true;
}

struct kvq__gpu_counts *kvq__gpu_counts_new(struct kvq__gpu *gpu)
{
    if (!gpu->free_counts && !add_slab(gpu))
        return NULL;
    struct kvq__gpu_counts *counts = gpu->free_counts;
    gpu->free_counts = counts->next;
    *counts->host = (struct kvq_gpu_store_counts){0};
    return counts;
}

void kvq__gpu_counts_free(struct kvq__gpu *gpu, struct kvq__gpu_counts *counts)
{
    assert(counts->host && counts != gpu->free_counts);
    counts->next = gpu->free_counts;
    gpu->free_counts = counts;
}

static void free_slabs(struct kvq__gpu *gpu)
{
    struct slab *slab, *next = gpu->unready;
    if (next)
        next->next = gpu->slabs;
    else
        next = gpu->slabs;
    while ((slab = next)) {
        next = slab->next;
        if (slab->host)
            gpu->driver->host_free(slab->host);
        free(slab);
    }
}

// ---- Codebooks ----

// Floats of one side's tables, which may be shared by heads and by sub-vectors.
static size_t table_floats(const struct kvq_side *side, uint32_t heads, uint32_t dim, size_t head,
                           size_t sub)
{
    size_t entries = (size_t)side->vector << side->bits;
    assert(heads > 0 && side->vector > 0 && dim % side->vector == 0);
    return (heads - 1) * head + (dim / side->vector - 1) * sub + entries;
}

static size_t side_floats(const struct kvq_side *side, const struct kvq_shape *s, bool v,
                          const struct kvq_book *b)
{
    if (side->codec != KVQ_CODEC_BOOK)
        return 0;
    return table_floats(side, s->kv_heads, s->k_dim, v ? b->v_head : b->k_head,
                        v ? b->v_sub : b->k_sub);
}

static int put_table(struct kvq__gpu *gpu, const float **table, size_t floats, kvq_gpu_ptr *next)
{
    int error = 0;
    if (!*table || floats == 0)
        return 0;
    error = kvq__gpu_put(gpu, *next, *table, floats * sizeof(float));
    *table = (const float *)(uintptr_t)*next;
    *next += floats * sizeof(float);
    return error;
}

static struct book *find_gpu_book(struct kvq__gpu *gpu, const struct kvq_book *host)
{
    struct book *b;
    LIST_FOREACH (b, &gpu->books, link)
        if (b->host.k == host->k && b->host.v == host->v && b->host.smooth == host->smooth)
            return b;
    return NULL;
}

static int new_book(struct kvq__gpu *gpu, const struct kvq_format *f, const struct kvq_shape *s,
                    const struct kvq_book *host, struct book **out)
{
    size_t k = side_floats(&f->k, s, false, host), v = side_floats(&f->v, s, true, host);
    size_t smooth = host->smooth ? (size_t)s->kv_heads * s->k_dim : 0;
    struct book *b = calloc(1, sizeof *b);
    if (!b)
        return KVQ_E_NO_MEMORY;
    b->host = b->copy = *host;
    int result = kvq__gpu_enter(gpu);
    result =
        result ? result : gpu->driver->memory_alloc(&b->memory, (k + v + smooth) * sizeof(float));
    int error = result ? kvq__gpu_failed(gpu, result, "taking memory for codebooks") : 0;
    kvq_gpu_ptr next = b->memory;
    error = error ? error : put_table(gpu, &b->copy.k, k, &next);
    error = error ? error : put_table(gpu, &b->copy.v, v, &next);
    error = error ? error : put_table(gpu, &b->copy.smooth, smooth, &next);
    assert(next <= b->memory + (k + v + smooth) * sizeof(float));
    if (error) {
        if (b->memory)
            kvq__gpu_free_later(gpu, b->memory);
        free(b);
        return error;
    }
    LIST_INSERT_HEAD(&gpu->books, b, link);
    *out = b;
    return 0;
}

int kvq__gpu_book(struct kvq__gpu *gpu, const struct kvq_format *format,
                  const struct kvq_shape *shape, const struct kvq_book *book, struct kvq_book *copy)
{
    struct book *b = find_gpu_book(gpu, book);
    int error = b ? 0 : new_book(gpu, format, shape, book, &b);
    if (error)
        return error;
    b->uses++;
    *copy = b->copy;
    return 0;
}

void kvq__gpu_book_release(struct kvq__gpu *gpu, const struct kvq_book *book)
{
    struct book *b = find_gpu_book(gpu, book);
    assert(b && b->uses > 0);
    if (--b->uses > 0)
        return;
    LIST_REMOVE(b, link);
    kvq__gpu_free_later(gpu, b->memory);
    free(b);
}

void kvq__gpu_sweep(struct kvq__gpu *gpu)
{
    struct leftover *l = LIST_FIRST(&gpu->leftovers);
    if (!l || !kvq__gate_is_clear(gpu->gate, gpu))
        return;
    while ((l = LIST_FIRST(&gpu->leftovers))) {
        LIST_REMOVE(l, link);
        kvq__gpu_enter(gpu);
        gpu->driver->memory_free(l->memory);
        free(l);
    }
}

// ---- Opening ----

// Whether the list of UUIDs names it; an empty list names all. Either prefix will do.
static bool is_named(const char *list, const char *uuid)
{
    return !list || !*list || strcasestr(list, uuid + strlen("GPU-")) != NULL;
}

static int query_gpu(struct kvq__gpu *gpu)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    int mapping = 0, fds = 0, result = d->device_uuid(&gpu->uuid, gpu->device);
    result = result ? result : d->device_name(gpu->name, sizeof gpu->name, gpu->device);
    result = result ? result : d->device_attribute(&mapping, KVQ_GPU_HAS_MAPPING, gpu->device);
    if (result == KVQ_GPU_OK && mapping)
        result = d->device_attribute(&fds, KVQ_GPU_HAS_HANDLE_FD, gpu->device);
    gpu->mapping = mapping != 0;
    gpu->exports = fds != 0;
    kvq_gpu_place(&gpu->uuid, gpu->name, gpu->uuid_text);
    return result;
}

static int take_budget(struct kvq__gpu *gpu, const struct kvq__gpus_config *config)
{
    size_t available = 0, total = 0;
    int result = gpu->driver->memory_info(&available, &total);
    assert(config->extent_bytes > 0);
    gpu->budget = config->bytes ? config->bytes : available / 2;
    gpu->budget = gpu->budget / config->extent_bytes * config->extent_bytes;
    return result;
}

// What a variable of CUDA's asks for; `otherwise` where it is not set, or not to be taken.
static uint32_t queues_asked(const char *variable, uint32_t otherwise)
{
    const char *set = getenv(variable);
    unsigned long n = strtoul(set ? set : "", NULL, 10);
    return n >= 1 && n <= KVQ_GPU_CONNECTIONS ? (uint32_t)n : otherwise;
}

// Copies may have fewer hardware queues than kernels, and every wave begins with a copy.
static uint32_t connections_of(void)
{
    uint32_t all = queues_asked("CUDA_DEVICE_MAX_CONNECTIONS", 8); // as CUDA does
    uint32_t copies = queues_asked("CUDA_DEVICE_MAX_COPY_CONNECTIONS", all);
    return copies < all ? copies : all;
}

static int open_gpu_streams(struct kvq__gpu *gpu)
{
    int result = KVQ_GPU_OK;
    for (int i = 0; i < KVQ__GPU_STREAMS && result == KVQ_GPU_OK; i++)
        result = gpu->driver->stream_create(&gpu->streams[i], KVQ_GPU_STREAM_OWN);
    gpu->stream = gpu->streams[KVQ__GPU_STREAM_SMALL];
    gpu->connections = connections_of();
    gpu->connections_left = connections_for_clients(gpu);
    return result;
}

// ---- What the device of the current context can do ----

// Whether streams can write words in host memory and wait for them: tries it on an idle stream. The
// wait is tried only after the word was seen to be written, since it would never end otherwise.
static bool words_work(const struct kvq_gpu_driver *d, int device, struct kvq_gpu_stream *s)
{
    void *word = NULL;
    kvq_gpu_ptr at;
    int has = 0, result = d->device_attribute(&has, KVQ_GPU_HAS_MEMORY_OPS, device);
    if (result != KVQ_GPU_OK || !has ||
        d->host_alloc(&word, sizeof(uint64_t), KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED))
        return false;
    kvq_word64_store_release(word, 0);
    result = d->host_device(&at, word, 0);
    result = result ? result : d->stream_write64(s, at, 1, 0);
    result = result ? result : d->stream_sync(s);
    bool works = result == KVQ_GPU_OK && kvq_word64_load_acquire(word) == 1 &&
                 d->stream_wait64(s, at, 1, KVQ_GPU_WAIT_AT_LEAST) == KVQ_GPU_OK &&
                 d->stream_sync(s) == KVQ_GPU_OK;
    d->host_free(word);
    return works;
}

// Whether there are events that other processes can open.
static bool events_work(const struct kvq_gpu_driver *d, int device)
{
    struct kvq_gpu_event *event;
    struct kvq_gpu_ipc_event handle;
    int has = 0;
    if (d->device_attribute(&has, KVQ_GPU_HAS_IPC_EVENTS, device) != KVQ_GPU_OK || !has ||
        d->event_create(&event, KVQ_GPU_EVENT_UNTIMED | KVQ_GPU_EVENT_SHARED) != KVQ_GPU_OK)
        return false;
    bool works = d->ipc_event_get(&handle, event) == KVQ_GPU_OK;
    d->event_destroy(event);
    return works;
}

static int open_gpu(struct kvq__gpu *gpu, const struct kvq__gpus_config *config, char *text)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    int result = d->context_retain(&gpu->context, gpu->device);
    result = result ? result : kvq__gpu_enter(gpu);
    result = result ? result : open_gpu_streams(gpu);
    result = result ? result : take_budget(gpu, config);
    if (result) {
        char what[KVQ__GPU_NAME + 32];
        snprintf(what, sizeof what, "opening %s", gpu->uuid_text);
        kvq_gpu_fault(d, result, what, text, KVQ_TEXT_BYTES);
        return KVQ_E_SYSTEM;
    }
    gpu->memory_ops = words_work(d, gpu->device, gpu->stream);
    gpu->shared_events = events_work(d, gpu->device);
    gpu->kernels_open = kvq_gpu_open(&gpu->kernels, d, text, KVQ_TEXT_BYTES) == 0;
    if (gpu->kernels_open && !add_slab(gpu)) { // before a session needs some
        snprintf(text, KVQ_TEXT_BYTES, "no memory on %s for counters", gpu->uuid_text);
        return KVQ_E_NO_MEMORY;
    }
    return gpu->kernels_open ? 0 : KVQ_E_UNSUPPORTED;
}

static void close_gpu(struct kvq__gpu *gpu)
{
    assert(LIST_EMPTY(&gpu->books) && gpu->connections_left == connections_for_clients(gpu));
    if (gpu->context)
        kvq__gpu_enter(gpu);
    kvq__reserve_close(gpu);
    kvq__gpu_sweep(gpu);
    free_slabs(gpu);
    if (gpu->kernels_open)
        kvq_gpu_close(&gpu->kernels);
    for (int i = 0; i < KVQ__GPU_STREAMS; i++)
        if (gpu->streams[i])
            gpu->driver->stream_destroy(gpu->streams[i]);
    if (gpu->context)
        gpu->driver->context_release(gpu->device);
    free(gpu);
}

// A device that nobody named is not missed: one that another program has for itself, or that has
// broken, takes nothing from the others. Returns 0.
static int skip_device(struct kvq__gpus *gpus, const char *text)
{
    if (gpus->n_skipped < KVQ_MAX_GPUS)
        snprintf(gpus->skipped[gpus->n_skipped++], KVQ_TEXT_BYTES, "%s", text);
    return 0;
}

static int add_device(struct kvq__gpus *gpus, int number, const struct kvq__gpus_config *config,
                      char *text)
{
    const bool named = config->devices && *config->devices;
    struct kvq__gpu *gpu = calloc(1, sizeof *gpu);
    assert(gpus->n < KVQ_MAX_GPUS);
    if (!gpu)
        return KVQ_E_NO_MEMORY;
    gpu->driver = &gpus->driver;
    LIST_INIT(&gpu->books);
    gpu->gate = &gpus->gate;
    int result = gpu->driver->device_get(&gpu->device, number);
    result = result ? result : query_gpu(gpu);
    if (result || !is_named(config->devices, gpu->uuid_text)) {
        free(gpu);
        if (!result)
            return 0;
        kvq_gpu_fault(&gpus->driver, result, "asking for GPUs", text, KVQ_TEXT_BYTES);
        return named ? KVQ_E_SYSTEM : skip_device(gpus, text);
    }
    int error = open_gpu(gpu, config, text);
    if (error) {
        close_gpu(gpu);
        return named ? error : skip_device(gpus, text);
    }
    gpus->gpu[gpus->n++] = gpu;
    return 0;
}

// The first UUID of the list that no GPU has.
static int check_named(const struct kvq__gpus *gpus, const char *list, char *text)
{
    char one[KVQ__GPU_UUID_TEXT];
    for (const char *at = list ? list : ""; *at; at += strspn(at, ", ")) {
        size_t length = strcspn(at, ", ");
        bool found = false;
        snprintf(one, sizeof one, "%.*s", (int)length, at);
        for (uint32_t i = 0; i < gpus->n; i++)
            found |= kvq_gpu_place_is(one, gpus->gpu[i]->uuid_text);
        if (!found) {
            snprintf(text, KVQ_TEXT_BYTES,
                     "no GPU here is \"%s\"; nvidia-smi -L lists those that there are", one);
            return KVQ_E_INVALID;
        }
        at += length;
    }
    return 0;
}

static int open_all(struct kvq__gpus *gpus, const struct kvq__gpus_config *config, char *text)
{
    int count = 0, error = 0, result = gpus->driver.init(0);
    result = result ? result : gpus->driver.device_count(&count);
    if (result) {
        kvq_gpu_fault(&gpus->driver, result, "starting the GPU driver", text, KVQ_TEXT_BYTES);
        return KVQ_E_UNSUPPORTED;
    }
    for (int i = 0; !error && i < count && gpus->n < KVQ_MAX_GPUS; i++)
        error = add_device(gpus, i, config, text);
    if (error == 0 && gpus->n == 0 && gpus->n_skipped)
        return KVQ_E_UNSUPPORTED; // the text says why the last one could not be used
    if (error == 0)
        error = check_named(gpus, config->devices, text);
    if (error == 0 && gpus->n == 0) {
        snprintf(text, KVQ_TEXT_BYTES, "the driver knows no GPU");
        error = KVQ_E_UNSUPPORTED;
    }
    return error;
}

int kvq__gpus_open(const struct kvq__gpus_config *config, struct kvq__gpus **out, char *text)
{
    struct kvq__gpus *gpus = calloc(1, sizeof *gpus);
    const char *library = config->driver && *config->driver ? config->driver : NULL;
    *out = NULL;
    if (!gpus) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    int error = 0;
    kvq__gate_open(&gpus->gate);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // the driver reads them when it starts
    setenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "32", 0);
    if (config->table)
        gpus->driver = *config->table;
    else if (kvq_gpu_driver_open(&gpus->driver, library, text, KVQ_TEXT_BYTES))
        error = KVQ_E_UNSUPPORTED;
    error = error ? error : open_all(gpus, config, text);
    if (error)
        kvq__gpus_close(&gpus);
    *out = gpus;
    return error;
}

void kvq__gpus_close(struct kvq__gpus **pointer)
{
    struct kvq__gpus *gpus = *pointer;
    if (!gpus)
        return;
    *pointer = NULL;
    for (uint32_t i = 0; i < gpus->n; i++)
        close_gpu(gpus->gpu[i]);
    kvq__gate_close(&gpus->gate);
    if (gpus->driver.library)
        kvq_gpu_driver_close(&gpus->driver);
    free(gpus);
}
