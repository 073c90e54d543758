// SPDX-License-Identifier: Apache-2.0
//
// See stream.h.
#include "client/ggml/stream.h"

#include <assert.h>
#include <ggml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

void kvq_ggml_sessions_init(struct kvq_ggml_sessions *all, struct kvq_ggml_daemon *daemon,
                            const struct kvq_ggml_layer *layers, uint32_t n)
{
    assert(n > 0 && n <= KVQ_GGML_LAYERS);
    uint64_t random[2] = {(uint64_t)getpid(), 0}; // if the system has none: the salt is no secret
    (void)!getrandom(random, sizeof random, 0);
    *all = (struct kvq_ggml_sessions){.daemon = daemon,
                                      .layers = layers,
                                      .n_layers = n,
                                      .cells = (uint64_t)layers[0].k->ne[1],
                                      .next_id = (int32_t)(random[1] & INT32_MAX),
                                      .last_stamp = random[1]};
    snprintf(all->salt, sizeof all->salt, "%016llx", (unsigned long long)random[0]);
}

// ---- Options --------------------------------------------------------------------------------

// What options point to.
struct words {
    char name[KVQ_GGML_NAME + 28]; // with the number of a stream
    struct kvq_layer shapes[KVQ_GGML_LAYERS];
};

// Options of a session for this stream. False: the environment asks for what there is not.
static bool describe(const struct kvq_ggml_sessions *all, const struct kvq_ggml_stream *stream,
                     uint32_t which, struct words *words, struct kvq_session_options *options)
{
    struct kvq_ggml_asked asked;
    if (!kvq_ggml_ask(&asked))
        return false;
    const char *name = stream->spared ? NULL : asked.name;
    for (uint32_t i = 0; i < all->n_layers; i++)
        words->shapes[i] = all->layers[i].shape;
    snprintf(words->name, sizeof words->name, which ? "%s-%u" : "%s", name ? name : "", which);
    *options = (struct kvq_session_options){.size = sizeof(struct kvq_session_options),
                                            .name = name ? words->name : NULL,
                                            .model = "llama.cpp",
                                            .salt = name ? words->name : all->salt,
                                            .layers = words->shapes,
                                            .n_layers = all->n_layers,
                                            .format = asked.format,
                                            .dtype = asked.dtype,
                                            .attention = asked.attention,
                                            .max_rollback = asked.rollback,
                                            .place = "host"};
    return true;
}

// ---- Opening --------------------------------------------------------------------------------

// Gives the memory of a stream in llama.cpp's own tensor back to the system: it holds nothing, and
// reads as zeros. ggml's buffers on the CPU are private anonymous memory.
static void release_cells(const struct ggml_tensor *tensor, uint32_t which)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t start = (uintptr_t)tensor->data + which * tensor->nb[2];
    const uintptr_t first = (start + page - 1) & ~(page - 1), end = start + tensor->nb[2];
    if (end > first + page)
        (void)madvise((void *)first, (end - first) & ~(page - 1), MADV_DONTNEED);
}

#ifdef _OPENMP
// Attention on the threads that llama.cpp's own operations run on.
static void in_parallel(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg)
{
    const struct kvq_ggml_sessions *all = context;
    const int now = all->daemon->threads < all->threads ? all->daemon->threads : all->threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(now) if (n > 1)
    for (uint32_t i = 0; i < n; i++)
        item(arg, i);
}
#define PARALLEL in_parallel
#else
#define PARALLEL NULL // threads of kvq's own
#endif

static bool open_local(struct kvq_ggml_sessions *all)
{
    enum { MOST_THREADS = 256 }; // of kvq_local_open
    assert(!all->local);
    all->threads = all->daemon->threads < MOST_THREADS ? all->daemon->threads : MOST_THREADS;
    const struct kvq_local_options options = {.size = sizeof options,
                                              .max_tokens = all->cells,
                                              .threads = (uint32_t)all->threads,
                                              .parallel = PARALLEL,
                                              .parallel_context = all};
    const int code = kvq_local_open(all->daemon->queue, &options, &all->local);
    return !code || kvq_ggml_failed("no attention in this process", code);
}

// The session of a stream. One with a name may be there.
static bool open_stream_session(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                                uint32_t which, const struct kvq_session_options *options)
{
    struct kvq_session_info info = {.size = sizeof info};
    assert(!stream->session);
    for (uint32_t i = 0; i < all->n_layers; i++) {
        release_cells(all->layers[i].k, which);
        release_cells(all->layers[i].v, which);
    }
    if (!all->local && !open_local(all))
        return false;
    int code = kvq_session_open(all->daemon->client, options, &stream->session, &info);
    if (code)
        return kvq_ggml_failed("no session", code);
    stream->tokens = info.tokens;
    if (info.created && !stream->ids)
        stream->ids = calloc(all->cells, sizeof *stream->ids);
    code = kvq_local_add(all->local, stream->session);
    if (code) {
        kvq_ggml_failed("no session", code);
        kvq_ggml_stream_close(all, stream);
        return false;
    }
    return true;
}

static bool open_anew(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream, uint32_t which,
                      uint32_t rows)
{
    struct words words;
    struct kvq_session_options options;
    if (!describe(all, stream, which, &words, &options))
        return false;
    options.prompt_tokens = rows;
    return open_stream_session(all, stream, which, &options);
}

void kvq_ggml_stream_close(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream)
{
    if (stream->session) {
        (void)kvq_local_remove(all->local, stream->session); // its page table stays mapped else
        (void)kvq_session_close(all->daemon->client, stream->session);
    }
    free(stream->ids);
    *stream = (struct kvq_ggml_stream){0};
}

void kvq_ggml_stream_forget(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream)
{
    const uint64_t stamp = stream->session ? KVQ_GGML_LOST : stream->stamp;
    kvq_ggml_stream_close(all, stream);
    stream->stamp = stamp;
}

// Destroys the session. llama.cpp's cells are not taken on trust again before the next step.
static void drop_session(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream)
{
    if (stream->session) {
        (void)kvq_local_remove(all->local, stream->session);
        (void)kvq_session_drop(all->daemon->client, stream->session);
    }
    stream->session = 0;
    stream->tokens = 0;
    stream->stamp = KVQ_GGML_LOST;
}

// ---- The stamp -------------------------------------------------------------------------------

// llama.cpp saves, restores and copies its cells without a word to backends. So that this shows, a
// number stands in the first cell that is another after each step: what is restored is older.
static void *stamp_of(const struct kvq_ggml_sessions *all, uint32_t which)
{
    const struct ggml_tensor *k = all->layers[0].k;
    return (char *)k->data + which * k->nb[2];
}

static bool is_stamped(const struct kvq_ggml_sessions *all, const struct kvq_ggml_stream *stream,
                       uint32_t which)
{
    return memcmp(stamp_of(all, which), &stream->stamp, sizeof stream->stamp) == 0;
}

void kvq_ggml_stream_committed(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                               uint32_t which, uint64_t tokens)
{
    assert(stream->session);
    stream->tokens = tokens;
    stream->stamp = ++all->last_stamp;
    memcpy(stamp_of(all, which), &stream->stamp, sizeof stream->stamp);
}

// ---- Going back -----------------------------------------------------------------------------

// K and V of all layers of the tokens between the pages that a new session shares and the cell
// that it is to end at.
struct tail {
    kvq_buffer *buffer;
    uint64_t first;
    uint32_t tokens;
    struct kvq_tensor k[KVQ_GGML_LAYERS], v[KVQ_GGML_LAYERS];
};

static bool read_tail(const struct kvq_ggml_sessions *all, const struct kvq_ggml_stream *stream,
                      uint8_t dtype, struct tail *tail)
{
    uint64_t bytes = 0;
    assert(tail->tokens > 0 && tail->first + tail->tokens < stream->tokens);
    for (uint32_t i = 0; i < all->n_layers; i++)
        bytes += (uint64_t)2 * tail->tokens * all->layers[i].shape.kv_heads *
                 all->layers[i].shape.k_dim * sizeof(uint16_t);
    int code = kvq_buffer_create(all->daemon->client, bytes, &tail->buffer);
    if (code)
        return kvq_ggml_failed("no buffer to go back", code);
    bytes = 0;
    for (uint32_t i = 0; i < all->n_layers; i++) {
        const struct kvq_layer *shape = &all->layers[i].shape;
        const uint64_t one =
            (uint64_t)tail->tokens * shape->kv_heads * shape->k_dim * sizeof(uint16_t);
        tail->k[i] = kvq_tensor_make(tail->buffer, bytes, shape->kv_heads, shape->k_dim, dtype);
        tail->v[i] =
            kvq_tensor_make(tail->buffer, bytes + one, shape->kv_heads, shape->k_dim, dtype);
        bytes += 2 * one;
        const struct kvq_work work = {.layer = i, .k = tail->k[i], .v = tail->v[i]};
        struct kvq_entry entry = {
            .session = stream->session, .position = tail->first, .append = tail->tokens};
        code = kvq_read(all->daemon->queue, &work, &entry, 1);
        code = code ? code : entry.status;
        if (code)
            return kvq_ggml_failed("tokens are not read back", code);
    }
    return true;
}

static bool append_tail(const struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                        const struct tail *tail, const kvq_buffer *ids)
{
    assert(stream->tokens == tail->first);
    const struct kvq_step_work work = {.k = tail->k,
                                       .v = tail->v,
                                       .n_layers = all->n_layers,
                                       .ids = {ids, tail->first * sizeof(int32_t)}};
    struct kvq_entry entry = {
        .session = stream->session, .position = stream->tokens, .append = tail->tokens};
    int code = kvq_step(all->daemon->queue, &work, &entry, 1);
    code = code ? code : entry.status;
    if (code)
        return kvq_ggml_failed("tokens are not given back", code);
    stream->tokens = entry.value;
    return true;
}

static bool begins_with(uint64_t tokens, uint64_t wanted)
{
    assert(tokens <= wanted);
    return tokens == wanted ||
           kvq_ggml_refuse("pages of the first %llu tokens are gone; begin anew",
                           (unsigned long long)wanted);
}

// Opens a session without a name that keeps the pages which another one is to begin with.
static bool hold_prefix(const struct kvq_ggml_sessions *all,
                        const struct kvq_session_options *options, kvq_session *holder)
{
    struct kvq_session_options unnamed = *options;
    struct kvq_session_info info = {.size = sizeof info};
    assert(options->prefix.tokens > 0);
    unnamed.name = NULL;
    const int code = kvq_session_open(all->daemon->client, &unnamed, holder, &info);
    if (code)
        return kvq_ggml_failed("no session to go back", code);
    return begins_with(info.tokens, options->prefix.tokens);
}

// A session that ends at the cell in the place of one that is longer, which stays until what the
// new one begins with is sure.
static bool rebuild_session(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                            uint32_t which, uint64_t cell)
{
    struct words words;
    struct kvq_session_options options;
    struct tail *tail = calloc(1, sizeof *tail);
    kvq_buffer *ids = NULL;
    kvq_session holder = 0;
    bool well = false;
    assert(stream->ids && cell < stream->tokens);
    int code = tail ? kvq_buffer_create(all->daemon->client, cell * sizeof(int32_t), &ids) : 0;
    if (!tail || code) {
        (void)(tail ? kvq_ggml_failed("no buffer to go back", code)
                    : kvq_ggml_refuse("no memory to go back"));
        goto out;
    }
    memcpy(kvq_buffer_data(ids), stream->ids, cell * sizeof(int32_t));
    if (!describe(all, stream, which, &words, &options))
        goto out;
    options.prefix = (struct kvq_prefix){.buffer = ids, .tokens = cell};
    code = kvq_lookup(all->daemon->client, &options, &tail->first);
    if (code) {
        kvq_ggml_refuse("llama.cpp goes back from %llu tokens to %llu: %s. KVQ_LLAMA_ROLLBACK "
                        "(now %u) says how many can be taken back with every format",
                        (unsigned long long)stream->tokens, (unsigned long long)cell,
                        kvq_ggml_why(code), options.max_rollback);
        goto out;
    }
    tail->tokens = (uint32_t)(cell - tail->first);
    if (tail->tokens && !read_tail(all, stream, options.dtype, tail))
        goto out;
    options.prefix.tokens = tail->first;
    if (!tail->first)
        options.prefix.buffer = NULL;
    else if (!hold_prefix(all, &options, &holder))
        goto out;
    drop_session(all, stream);
    if (!open_stream_session(all, stream, which, &options))
        goto out;
    if (!begins_with(stream->tokens, tail->first)) {
        drop_session(all, stream);
        goto out;
    }
    well = !tail->tokens || append_tail(all, stream, tail, ids);
    if (well)
        kvq_ggml_stream_committed(all, stream, which, stream->tokens);
out:
    if (tail)
        kvq_buffer_close(&tail->buffer);
    kvq_buffer_close(&ids);
    if (holder)
        (void)kvq_session_close(all->daemon->client, holder);
    free(tail);
    return well;
}

static bool go_back(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream, uint32_t which,
                    uint64_t cell)
{
    assert(stream->session && cell < stream->tokens);
    struct kvq_entry entry = {.session = stream->session, .position = stream->tokens};
    int code = kvq_truncate(all->daemon->queue, &entry, &cell, 1);
    code = code ? code : entry.status;
    if (code == 0)
        stream->tokens = cell;
    else if (code == KVQ_E_ROLLBACK && stream->ids)
        return rebuild_session(all, stream, which, cell);
    else
        kvq_ggml_refuse("llama.cpp goes back from %llu tokens to %llu: %s",
                        (unsigned long long)stream->tokens, (unsigned long long)cell,
                        kvq_ggml_why(code));
    return code == 0;
}

// Another sequence begins. A session of the asked name that was there before is let go, not
// destroyed: llama.cpp begins with a few tokens to warm up.
static bool begin_anew(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                       uint32_t which, uint32_t rows)
{
    if (stream->ids) {
        drop_session(all, stream);
    } else {
        kvq_ggml_stream_close(all, stream);
        stream->spared = true;
    }
    return open_anew(all, stream, which, rows);
}

// Takes the session back that was spared, if llama.cpp goes on behind all of its tokens.
static bool take_back(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream, uint32_t which,
                      uint64_t cell)
{
    kvq_ggml_stream_close(all, stream); // the session without a name goes with it
    if (!open_anew(all, stream, which, 0))
        return false;
    if (stream->tokens == cell)
        return true;
    stream->stamp = KVQ_GGML_LOST;
    return kvq_ggml_refuse("llama.cpp goes on behind %llu tokens, and the session of "
                           "KVQ_LLAMA_SESSION has %llu; begin anew",
                           (unsigned long long)cell, (unsigned long long)stream->tokens);
}

bool kvq_ggml_stream_go_to(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                           uint32_t which, uint64_t cell, uint32_t rows)
{
    if (!stream->session && !open_anew(all, stream, which, rows))
        return false;
    if (cell == 0 && stream->tokens)
        return begin_anew(all, stream, which, rows);
    const bool own = !stream->stamp || is_stamped(all, stream, which);
    if (cell && stream->spared && (!own || cell > stream->tokens))
        return take_back(all, stream, which, cell);
    if (cell && !own)
        return kvq_ggml_refuse("llama.cpp goes on behind %llu tokens that kvqd does not have: they "
                               "were restored, copied or shifted, or the kvqd that had them is "
                               "gone; begin anew (llama-server: --cache-ram 0; llama-cpp-python: "
                               "Llama.reset())",
                               (unsigned long long)cell);
    if (cell > stream->tokens)
        return kvq_ggml_refuse("llama.cpp goes on behind %llu tokens, and kvqd has %llu of them; "
                               "begin anew",
                               (unsigned long long)cell, (unsigned long long)stream->tokens);
    return cell == stream->tokens || go_back(all, stream, which, cell);
}

void kvq_ggml_stream_number(struct kvq_ggml_sessions *all, struct kvq_ggml_stream *stream,
                            uint32_t rows, int32_t *to)
{
    for (uint32_t i = 0; i < rows; i++) {
        to[i] = all->next_id;
        all->next_id = (int32_t)(((uint32_t)all->next_id + 1) & INT32_MAX);
        if (stream->ids && stream->tokens + i < all->cells)
            stream->ids[stream->tokens + i] = to[i];
    }
}
