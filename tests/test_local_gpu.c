// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's own context on a GPU, the software driver's: the same steps there, on
// the engine's stream or replayed from a captured graph, and by the daemon give the same bits.
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/kvq.h"
#include "kernels/cuda/share.h"
#include "tests/soft_kit.h"

enum {
    DIM = 64,
    Q_HEADS = 2,
    KV_HEADS = 1,
    LAYERS = 2,
    MAX = 512,      // tokens of a session
    ROWS = 256,     // of a step
    PART = 1 << 17, // bytes of one tensor
    ARENA = 1 << 22,
    SESSIONS = 2,
};

static struct {
    char directory[64];
    pid_t daemon;
    kvq_client *client;
    kvq_queue *queue;
    kvq_local *local;
    kvq_bucket *bucket;
    kvq_buffer *buffer, *host;
    kvq_gpu_ptr at;
    void *mapping;    // the engine's of `host`; NULL: kvq_buffer_data
    uint32_t on_host; // bits of the parts that the calls here have in the host's memory
    char gpu[48];
    struct kvq_gpu_stream *stream;
    struct kvq_soft_counts before;
    int files;
    uint64_t waits;   // for the GPU, of the last step here
    uint64_t brought; // bytes by its kernels
    uint32_t salt;
} rig;

static void fine(int code)
{
    if (code)
        fail_msg("%d: %s", code, kvq_error_text());
}

static void refused(int code, int got, const char *words)
{
    if (got != code)
        fail_msg("%d and not %d: %s", got, code, kvq_error_text());
    if (!strstr(kvq_error_text(), words))
        fail_msg("\"%s\" does not say \"%s\"", kvq_error_text(), words);
}

// ---- The daemon ----

static void run_daemon(int ready)
{
    char path[256], number[16];
    const char *bin = getenv("KVQ_BIN_DIR");
    snprintf(path, sizeof path, "%s/kvqd", bin ? bin : "bin");
    snprintf(number, sizeof number, "%d", ready);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(ready, F_SETFD, 0);
    execl(path, "kvqd", "--runtime-dir", rig.directory, "--backend", "emu", "--gpu-driver",
          KVQ_EMU_LIBRARY, "--pool-bytes", "64mb", "--extent-bytes", "2mb", "--gpu-bytes", "64mb",
          "--workers", "1", "--client-bytes", "64mb", "--log-level", "error", "--ready-fd", number,
          (char *)NULL);
    fprintf(stderr, "cannot start %s\n", path);
    _exit(127);
}

static void start_daemon(void)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    rig.daemon = fork();
    if (rig.daemon == 0)
        run_daemon(ready[1]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

static void end_daemon(int signal)
{
    int status;
    kill(rig.daemon, signal);
    waitpid(rig.daemon, &status, 0);
    rig.daemon = 0;
    if (signal == SIGTERM)
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void open_local(uint32_t flags)
{
    const struct kvq_local_options o = {.place = rig.gpu, .max_tokens = MAX, .flags = flags};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
}

static int setup(void **state)
{
    struct kvq_gpu_info gpu;
    uint32_t n;
    (void)state;
    unsetenv("KVQ_LOCAL");
    rig.before = soft_counts();
    rig.files = soft_open_files();
    start_daemon();
    const struct kvq_connect_options options = {.runtime_dir = rig.directory, .timeout_ms = 20000};
    fine(kvq_connect(&options, &rig.client));
    fine(kvq_queue_open(rig.client, &rig.queue));
    fine(kvq_daemon_gpus(rig.client, &gpu, 1, &n));
    assert_int_equal(n, 1);
    memcpy(rig.gpu, gpu.place, sizeof rig.gpu);
    OK(drv.stream_create(&rig.stream, KVQ_GPU_STREAM_OWN));
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &rig.buffer));
    rig.at = (uintptr_t)kvq_buffer_device(rig.buffer);
    return 0;
}

// Nothing is left here, and the daemon leaves in good order.
static int teardown(void **state)
{
    (void)state;
    OK(drv.stream_sync(rig.stream));
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
    kvq_buffer_close(&rig.buffer);
    kvq_buffer_close(&rig.host);
    rig.on_host = 0;
    kvq_disconnect(&rig.client);
    rig.queue = NULL;
    OK(drv.stream_destroy(rig.stream));
    if (rig.daemon)
        end_daemon(SIGTERM);
    const struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &rig.before, sizeof now);
    assert_int_equal(soft_open_files(), rig.files);
    return 0;
}

// ---- Two sessions with the same steps ----

struct pair {
    kvq_session here, there;
    uint64_t tokens;
};

// Shard 0 or 1 of a session of two, or a session of its own (-1).
static void open_shard(const char *format, int shard, struct pair *p)
{
    struct kvq_layer rows[LAYERS] = {
        {.q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM},
        {.q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .window = 70}};
    struct kvq_session_options o = {.layers = rows,
                                    .n_layers = LAYERS,
                                    .format = format,
                                    .prompt_tokens = 40,
                                    .max_rollback = 2,
                                    .place = rig.gpu};
    *p = (struct pair){0};
    if (shard >= 0) {
        o.name = "here";
        o.shard = (uint16_t)shard;
        o.shards = 2;
    }
    fine(kvq_session_open(rig.client, &o, &p->here, NULL));
    o.name = shard >= 0 ? "there" : NULL;
    fine(kvq_session_open(rig.client, &o, &p->there, NULL));
    fine(kvq_local_add(rig.local, p->here));
}

static void open_pair(const char *format, struct pair *p)
{
    open_shard(format, -1, p);
}

// Both sides of `of`, up to so many tokens.
static void fork_pair(const struct pair *of, uint64_t tokens, struct pair *p)
{
    struct kvq_entry both[] = {{.session = of->here, .position = tokens},
                               {.session = of->there, .position = tokens}};
    fine(kvq_fork(rig.queue, both, 2));
    fine(both[0].status);
    fine(both[1].status);
    *p = (struct pair){both[0].value, both[1].value, tokens};
    fine(kvq_local_add(rig.local, p->here));
}

static void close_pair(struct pair *p)
{
    fine(kvq_session_close(rig.client, p->here));
    fine(kvq_session_close(rig.client, p->there));
}

// The buffer: K, V and Q of each layer, then both sides' outputs.
static struct kvq_tensor tensor(uint32_t part, uint32_t layer)
{
    uint32_t heads = part < 2 ? KV_HEADS : Q_HEADS;
    return kvq_tensor_make(rig.buffer, (uint64_t)(part * LAYERS + layer) * PART, heads, DIM,
                           KVQ_DTYPE_F32);
}

static bool on_host(uint32_t part)
{
    return rig.on_host >> part & 1;
}

static struct kvq_tensor tensor_here(uint32_t part, uint32_t layer)
{
    struct kvq_tensor t = tensor(part, layer);
    t.buffer = on_host(part) ? rig.host : rig.buffer;
    return t;
}

static struct kvq_work work_of(uint32_t layer, bool here)
{
    struct kvq_tensor (*of)(uint32_t, uint32_t) = here ? tensor_here : tensor;
    return (struct kvq_work){.layer = layer,
                             .k = of(0, layer),
                             .v = of(1, layer),
                             .q = of(2, layer),
                             .out = of(here ? 3 : 4, layer)};
}

static uint8_t *host_memory(void)
{
    return rig.mapping ? rig.mapping : kvq_buffer_data(rig.host);
}

// Other values in every step.
static void fill(void)
{
    static float values[3 * LAYERS * PART / sizeof(float)];
    rig.salt = rig.salt * 1664525 + 1013904223;
    for (uint32_t i = 0; i < sizeof values / sizeof *values; i++)
        values[i] = (float)((i * 7919 + rig.salt % 1009 * 31) % 2003) / 1000 - 1;
    OK(drv.copy_in(rig.at, values, sizeof values, rig.stream));
    OK(drv.stream_sync(rig.stream));
    if (rig.host)
        memcpy(host_memory(), values, sizeof values);
}

static void compare(uint32_t rows, uint64_t tokens)
{
    static float here[PART / sizeof(float)], there[PART / sizeof(float)];
    size_t bytes = (size_t)rows * Q_HEADS * DIM * sizeof(float);
    for (uint32_t i = 0; i < LAYERS; i++) {
        OK(drv.copy_out(here, rig.at + tensor(3, i).offset, bytes, rig.stream));
        OK(drv.copy_out(there, rig.at + tensor(4, i).offset, bytes, rig.stream));
        OK(drv.stream_sync(rig.stream));
        if (on_host(3))
            memcpy(here, host_memory() + tensor(3, i).offset, bytes);
        if (memcmp(here, there, bytes) != 0)
            fail_msg("outputs of layer %u differ at %llu tokens", i, (unsigned long long)tokens);
    }
}

struct batch {
    struct kvq_entry entries[4];
    uint32_t n, rows, q_rows;
};

static struct batch batch_of(const struct pair *p, uint32_t n, uint32_t append, bool here)
{
    struct batch b = {.n = n};
    uint32_t queries = append < 64 ? append : 64;
    for (uint32_t i = 0; i < n; i++, b.rows += append, b.q_rows += queries)
        b.entries[i] = (struct kvq_entry){.session = here ? p[i].here : p[i].there,
                                          .position = p[i].tokens,
                                          .row = b.rows,
                                          .q_row = b.q_rows,
                                          .append = append,
                                          .queries = (uint16_t)queries};
    return b;
}

static void all_fine(int rc, const struct batch *b)
{
    fine(rc);
    for (uint32_t i = 0; i < b->n; i++)
        fine(b->entries[i].status);
}

static void step_there(struct batch *b)
{
    uint64_t step;
    all_fine(kvq_step_begin(rig.queue, b->entries, b->n, &step), b);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct kvq_work w = work_of(i, false);
        w.step = step;
        all_fine(kvq_append_attend_on_stream(rig.queue, &w, b->entries, b->n, rig.stream), b);
    }
    all_fine(kvq_step_end(rig.queue, step, b->entries, b->n), b);
}

// How often this process has waited for the GPU.
static uint64_t waits(void)
{
    return soft_calls("stream_sync") + soft_calls("event_sync") + soft_calls("context_sync");
}

// With a graph the attentions are replayed, else launched one by one.
static void step(struct pair *p, uint32_t n, uint32_t append, struct kvq_gpu_exec *exec)
{
    struct batch here = batch_of(p, n, append, true), there = batch_of(p, n, append, false);
    fill();
    step_there(&there);
    uint64_t before = waits(), brought = soft_brought();
    all_fine(kvq_local_begin_on_stream(rig.local, rig.bucket, here.entries, n, rig.stream), &here);
    for (uint32_t i = 0; i < LAYERS && !exec; i++) {
        const struct kvq_work w = work_of(i, true);
        all_fine(kvq_local_attend_on_stream(rig.local, rig.bucket, &w, here.entries, n, rig.stream),
                 &here);
    }
    if (exec)
        OK(drv.graph_launch(exec, rig.stream));
    all_fine(kvq_local_end_on_stream(rig.local, NULL, here.entries, n, rig.stream), &here);
    rig.waits = waits() - before;
    OK(drv.stream_sync(rig.stream));
    rig.brought = soft_brought() - brought;
    compare(here.q_rows, p->tokens);
    for (uint32_t i = 0; i < n; i++) {
        p[i].tokens += append;
        assert_int_equal(here.entries[i].value, p[i].tokens);
    }
}

static void open_bucket(kvq_session session, uint32_t queries)
{
    const struct kvq_bucket_options o = {
        .session = session, .max_sessions = SESSIONS, .max_queries = queries};
    fine(kvq_bucket_open(rig.local, &o, &rig.bucket));
}

static struct kvq_gpu_exec *capture(struct pair *p, uint32_t n)
{
    struct kvq_gpu_graph *graph;
    struct kvq_gpu_exec *exec;
    struct batch b = batch_of(p, n, 1, true);
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    for (uint32_t i = 0; i < LAYERS; i++) {
        const struct kvq_work w = work_of(i, true);
        fine(kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, n, rig.stream));
    }
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_ready(&exec, graph, 0));
    OK(drv.graph_destroy(graph));
    return exec;
}

// ---- Tests ----

static int begin(struct batch *b)
{
    return kvq_local_begin_on_stream(rig.local, rig.bucket, b->entries, b->n, rig.stream);
}

static void replay(const char *format, uint32_t prompt, uint32_t steps)
{
    struct pair p[SESSIONS];
    open_local(KVQ_LOCAL_REQUIRE);
    assert_null(kvq_local_why(rig.local));
    for (uint32_t i = 0; i < SESSIONS; i++)
        open_pair(format, &p[i]);
    open_bucket(p[0].here, 64);
    step(p, 1, prompt, NULL);
    step(p, SESSIONS, 5, NULL);
    struct kvq_gpu_exec *exec = capture(p, SESSIONS);
    for (uint32_t i = 0; i < steps; i++)
        step(p, i % 8 == 5 ? 1 : SESSIONS, 1, i % 50 == 7 ? NULL : exec);
    OK(drv.stream_sync(rig.stream));
    OK(drv.exec_destroy(exec));
    for (uint32_t i = 0; i < SESSIONS; i++)
        close_pair(&p[i]);
}

// Both shards of a session: what a step commits on both is packed, and shown in the page tables,
// by whatever comes next.
static void test_shards(void **state)
{
    struct pair p[SESSIONS];
    (void)state;
    open_local(KVQ_LOCAL_REQUIRE);
    for (int i = 0; i < SESSIONS; i++)
        open_shard("oscar2", i, &p[i]);
    open_bucket(p[0].here, 64);
    step(p, SESSIONS, 40, NULL);
    step(p, SESSIONS, 60, NULL);
    struct kvq_gpu_exec *exec = capture(p, SESSIONS);
    for (uint32_t i = 0; i < 150; i++)
        step(p, SESSIONS, 1, i % 20 == 7 ? NULL : exec);
    OK(drv.stream_sync(rig.stream));
    OK(drv.exec_destroy(exec));
    for (uint32_t i = 0; i < SESSIONS; i++)
        close_pair(&p[i]);
}

// One graph, over 300 steps: units of 32 tokens are packed, and splits become two.
static void test_300_replays(void **state)
{
    (void)state;
    replay("oscar2", 60, 300);
}

static void test_extras(void **state)
{
    (void)state;
    replay("innerq-hybrid", 220, 20);
}

// Where a session's extras lie is not known before its first step has ended. No step after that
// waits for the GPU for it.
static void test_waits(void **state)
{
    static const char *const formats[] = {"oscar2", "innerq-hybrid", "ott2", "oscar2:sink=32"};
    struct pair p[SESSIONS];
    (void)state;
    open_local(KVQ_LOCAL_REQUIRE);
    for (uint32_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        for (uint32_t i = 0; i < SESSIONS; i++)
            open_pair(formats[f], &p[i]);
        open_bucket(p[0].here, 64);
        for (uint32_t i = 0; i < 10; i++) {
            step(p, i < 5 ? 1 : SESSIONS, i % 5 ? 1 : 200, NULL); // the first ones of each
            if (i % 5 && rig.waits && kvq_queue_order(rig.queue) != KVQ_ORDER_HOST)
                fail_msg("%s, step %u: %llu waits", formats[f], i, (unsigned long long)rig.waits);
        }
        kvq_bucket_close(&rig.bucket);
        for (uint32_t i = 0; i < SESSIONS; i++)
            close_pair(&p[i]);
    }
}

static void test_raw(void **state)
{
    (void)state;
    replay("f16", 60, 10);
}

// Tensors in the host's memory, all or some: the bits of device tensors, by launches and replayed,
// and nothing is taken after the step that gave them first.
static void host_tensors(uint32_t parts)
{
    struct pair p[SESSIONS];
    rig.on_host = parts;
    open_local(KVQ_LOCAL_REQUIRE);
    for (uint32_t i = 0; i < SESSIONS; i++)
        open_pair("oscar2", &p[i]);
    open_bucket(p[0].here, 64);
    step(p, SESSIONS, 40, NULL);
    const struct kvq_soft_counts first = soft_counts();
    for (uint32_t i = 0; i < 3; i++)
        step(p, SESSIONS, 30, NULL);
    struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &first, sizeof now);
    struct kvq_gpu_exec *exec = capture(p, SESSIONS);
    for (uint32_t i = 0; i < 10; i++)
        step(p, SESSIONS, 1, i == 7 ? NULL : exec);
    OK(drv.stream_sync(rig.stream));
    OK(drv.exec_destroy(exec));
    now = soft_counts();
    assert_memory_equal(&now, &first, sizeof now);
    for (uint32_t i = 0; i < SESSIONS; i++)
        close_pair(&p[i]);
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
}

static void test_host_tensors(void **state)
{
    (void)state;
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    host_tensors(15); // all
    host_tensors(3);  // K and V
    host_tensors(8);  // outputs
}

// ---- Blocks that sessions share ----

enum { FORKS = 4, PREFIX = 1024 };

// Steps of FORKS sessions, one token each, after prompts of more than PREFIX tokens: their own, or
// one and the same, forked. Every session adds two tokens by launches and two by a graph. *launched
// and *replayed: bytes that kernels here brought in the last step of both kinds.
static void share(bool forked, uint64_t *launched, uint64_t *replayed)
{
    struct pair p[FORKS];
    const struct kvq_local_options options = {.place = rig.gpu, .max_tokens = 2 * PREFIX};
    fine(kvq_local_open(rig.queue, &options, &rig.local));
    for (uint32_t i = 0; i < FORKS; i++) {
        if (i == 0 || !forked) {
            open_pair("kivi2", &p[i]);
            const struct kvq_bucket_options o = {
                .session = p[i].here, .max_sessions = FORKS, .max_queries = 64};
            if (i == 0)
                fine(kvq_bucket_open(rig.local, &o, &rig.bucket));
            for (uint32_t t = 0; t < PREFIX + 256; t += ROWS)
                step(&p[i], 1, ROWS, NULL);
        } else {
            fork_pair(&p[0], p[0].tokens, &p[i]);
        }
    }
    for (uint32_t i = 0; i < 2; i++)
        step(p, FORKS, 1, NULL);
    *launched = rig.brought;
    struct kvq_gpu_exec *exec = capture(p, FORKS);
    for (uint32_t i = 0; i < 2; i++)
        step(p, FORKS, 1, exec);
    *replayed = rig.brought;
    OK(drv.exec_destroy(exec));
    for (uint32_t i = 0; i < FORKS; i++)
        close_pair(&p[i]);
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
}

// Blocks that several entries of a call share are read once, not once for each; the outputs are
// those of the daemon, which shares as well.
static void test_shared(void **state)
{
    uint64_t launched, replayed, alone_launched, alone_replayed;
    (void)state;
    share(false, &alone_launched, &alone_replayed);
    share(true, &launched, &replayed);
    // Codes of K and V, 2 bits each, of layer 0; the other one sees but a window.
    const uint64_t saved = (FORKS - 1) * (uint64_t)PREFIX * KV_HEADS * DIM * 2 * 2 / 8;
    if (launched + saved > alone_launched || replayed + saved > alone_replayed)
        fail_msg("%llu and %llu bytes were read, %llu and %llu where nothing is shared",
                 (unsigned long long)launched, (unsigned long long)replayed,
                 (unsigned long long)alone_launched, (unsigned long long)alone_replayed);
}

// Memory that the engine made, and pinned itself.
static void test_host_tensors_of_engine(void **state)
{
    void *mapping;
    (void)state;
    int fd = memfd_create("engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, ARENA), 0);
    fine(kvq_buffer_import_memfd(rig.client, fd, 0, ARENA, &rig.host));
    mapping = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(mapping, MAP_FAILED);
    close(fd);
    rig.mapping = mapping;
    host_tensors(15);
    kvq_buffer_close(&rig.host);
    rig.mapping = NULL;
    munmap(mapping, ARENA);
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    OK(drv.host_register(kvq_buffer_data(rig.host), ARENA, KVQ_GPU_HOST_MAPPED));
    host_tensors(15);
    OK(drv.host_unregister(kvq_buffer_data(rig.host)));
}

// Memory that cannot be pinned, and a capture that a first use would spoil.
static void test_host_refusals(void **state)
{
    struct pair p[1];
    struct kvq_gpu_graph *graph;
    (void)state;
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    open_local(KVQ_LOCAL_REQUIRE);
    open_pair("oscar2", p);
    open_bucket(p->here, 64);
    struct batch b = batch_of(p, 1, 4, true);
    rig.on_host = 15;
    const struct kvq_work w = work_of(0, true);
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream),
            "before the capture begins");
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_destroy(graph));
    fine(begin(&b));
    fine(b.entries[0].status);
    assert_int_equal(soft_fail("host_register", 1, false, KVQ_GPU_NOT_SUPPORTED), 0);
    refused(KVQ_E_UNSUPPORTED,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream),
            "kvq_buffer_create_on");
    kvq_local_abort(rig.local);
    step(p, 1, 4, NULL);
    rig.on_host = 0;
    step(p, 1, 4, NULL);
    close_pair(p);
}

static void test_through_daemon(void **state)
{
    struct pair p[SESSIONS];
    struct batch b;
    struct kvq_gpu_graph *graph;
    (void)state;
    setenv("KVQ_LOCAL", "daemon", 1);
    open_local(0);
    assert_non_null(strstr(kvq_local_why(rig.local), "KVQ_LOCAL"));
    for (uint32_t i = 0; i < SESSIONS; i++)
        open_pair("oscar2", &p[i]);
    open_bucket(p[0].here, 64);
    step(p, SESSIONS, 40, NULL);
    for (uint32_t i = 0; i < 5; i++)
        step(p, SESSIONS, 1, NULL);
    b = batch_of(p, 1, 1, true);
    const struct kvq_work w = work_of(0, true);
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream),
            "through the daemon");
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_destroy(graph));
    for (uint32_t i = 0; i < SESSIONS; i++)
        close_pair(&p[i]);
}

static void test_refusals(void **state)
{
    struct pair p[1];
    kvq_local *host;
    kvq_client *other;
    kvq_buffer *elsewhere;
    (void)state;
    open_local(KVQ_LOCAL_REQUIRE);
    const struct kvq_bucket_options o = {.session = 4711};
    refused(KVQ_E_STALE, kvq_bucket_open(rig.local, &o, &rig.bucket), "not in this");
    open_pair("oscar2", p);
    open_bucket(p->here, 4);
    struct batch b = batch_of(p, 1, 4, true);
    struct kvq_work w = work_of(0, true);
    refused(KVQ_E_INVALID, kvq_local_begin(rig.local, b.entries, 1), "have a stream");
    fine(kvq_local_open(rig.queue, NULL, &host));
    refused(KVQ_E_INVALID, kvq_local_begin_on_stream(host, rig.bucket, b.entries, 1, rig.stream),
            "no stream");
    kvq_local_close(&host);
    refused(KVQ_E_NO_STEP,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream),
            "begin_on_stream");
    b.entries[0].queries = 5;
    fine(begin(&b));
    refused(KVQ_E_LIMIT, b.entries[0].status, "entry 0");
    b.entries[0].queries = 4;
    b.entries[0].position = 3;
    fine(begin(&b));
    refused(KVQ_E_POSITION, b.entries[0].status, "holds 0 tokens");
    b.entries[0].position = 0;
    fine(begin(&b));
    fine(b.entries[0].status);
    fine(kvq_connect(&(struct kvq_connect_options){.runtime_dir = rig.directory}, &other));
    fine(kvq_buffer_create(other, ARENA, &elsewhere));
    w.q.buffer = elsewhere;
    refused(KVQ_E_BUFFER,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream), "q");
    kvq_disconnect(&other);
    kvq_local_abort(rig.local);
    step(p, 1, 4, NULL);
    close_pair(p);
}

// What is not finite is found when nobody waits; the next end tells, and the session stands as
// before the step that had it. Where the host orders requests it waits, and that end tells itself.
static void test_not_finite(void **state)
{
    struct pair p[1];
    const float nan = __builtin_nanf("");
    (void)state;
    open_local(KVQ_LOCAL_REQUIRE);
    open_pair("oscar2", p);
    open_bucket(p->here, 64);
    step(p, 1, 30, NULL);
    bool waits = kvq_queue_order(rig.queue) == KVQ_ORDER_HOST;
    for (int round = 0; round < (waits ? 1 : 2); round++) {
        struct batch b = batch_of(p, 1, 1, true);
        fill();
        if (round == 0)
            OK(drv.copy_in(rig.at, &nan, sizeof nan, rig.stream));
        b.entries[0].position += (uint64_t)round;
        fine(begin(&b));
        fine(b.entries[0].status);
        for (uint32_t i = 0; i < LAYERS; i++) {
            const struct kvq_work w = work_of(i, true);
            fine(kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream));
        }
        fine(kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, rig.stream));
        if (round == 0 && !waits)
            fine(b.entries[0].status);
        else
            assert_int_equal(b.entries[0].status, KVQ_E_NONFINITE);
        OK(drv.stream_sync(rig.stream));
    }
    step(p, 1, 1, NULL);
    close_pair(p);
}

// What is mapped stays, and the stream goes on.
static void test_daemon_dies(void **state)
{
    struct pair p[1];
    uint32_t lost;
    (void)state;
    open_local(KVQ_LOCAL_REQUIRE);
    open_pair("oscar2", p);
    open_bucket(p->here, 64);
    step(p, 1, 40, NULL);
    struct batch b = batch_of(p, 1, 1, true);
    const struct kvq_work w = work_of(0, true);
    fine(begin(&b));
    end_daemon(SIGKILL);
    fine(kvq_local_attend_on_stream(rig.local, rig.bucket, &w, b.entries, 1, rig.stream));
    OK(drv.stream_sync(rig.stream));
    refused(KVQ_E_DISCONNECTED, kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, rig.stream),
            "kvq_reattach");
    OK(drv.stream_sync(rig.stream));
    start_daemon();
    assert_int_equal(kvq_reattach(rig.client, &lost), KVQ_E_EPOCH);
    refused(KVQ_E_CANCELLED, begin(&b), "open another");
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
    open_local(KVQ_LOCAL_REQUIRE);
    open_pair("oscar2", p);
    open_bucket(p->here, 64);
    step(p, 1, 40, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_shards, setup, teardown),
        cmocka_unit_test_setup_teardown(test_raw, setup, teardown),
        cmocka_unit_test_setup_teardown(test_extras, setup, teardown),
        cmocka_unit_test_setup_teardown(test_waits, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shared, setup, teardown),
        cmocka_unit_test_setup_teardown(test_host_tensors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_host_tensors_of_engine, setup, teardown),
        cmocka_unit_test_setup_teardown(test_host_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_through_daemon, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_finite, setup, teardown),
        cmocka_unit_test_setup_teardown(test_daemon_dies, setup, teardown),
        cmocka_unit_test_setup_teardown(test_300_replays, setup, teardown),
    };
    soft_open();
    snprintf(rig.directory, sizeof rig.directory, "/tmp/kvq-test-XXXXXX");
    if (!mkdtemp(rig.directory))
        return 1;
    setenv("KVQ_GPU_DRIVER", KVQ_EMU_LIBRARY, 1);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char path[128];
    snprintf(path, sizeof path, "%s/kvqd.lock", rig.directory);
    unlink(path);
    rmdir(rig.directory);
    return failed ? 1 : 0;
}
