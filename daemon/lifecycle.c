// SPDX-License-Identifier: Apache-2.0
//
// Puts the daemon together, drains it and takes it apart.
#include "daemon/lifecycle.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/attach/attach.h"
#include "daemon/config/change.h"
#include "daemon/config/machine.h"
#include "daemon/control/control.h"
#include "daemon/core/gpu/gpu.h"
#include "daemon/http/http.h"
#include "daemon/log/log.h"
#include "daemon/runtime/directory.h"
#include "daemon/runtime/events.h"
#include "daemon/runtime/history.h"
#include "daemon/runtime/refill.h"
#include "daemon/runtime/service.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/codebooks.h"
#include "daemon/store/store.h"
#include "proto/ring.h"

enum { DRAIN_LOOK_MS = 20, FAREWELL_NS = 1000000000, LONGEST_PID = 16 };

// ---- The runtime directory ----

static int refuse_second_daemon(int fd, const char *directory, char *text)
{
    char pid[LONGEST_PID] = "";
    ssize_t got = pread(fd, pid, sizeof pid - 1, 0);
    pid[got > 0 ? strcspn(pid, "\n") : 0] = 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "another kvqd (pid %s) uses %.200s; stop it, or choose another runtime_dir",
             *pid ? pid : "unknown", directory);
    return KVQ_E_BUSY;
}

int kvq__server_lock(struct kvq__server *server, char *text)
{
    char path[KVQ_CONFIG_PATH + 16], pid[LONGEST_PID];
    const char *directory = server->config.runtime_dir;
    server->lock_fd = -1;
    int fd, error = kvq__directory_open(&server->config, text);
    error = error ? error : kvq__directory_lock_file(directory, &fd, text);
    if (error)
        return error;
    snprintf(path, sizeof path, "%s/" KVQ_LOCK_FILE, directory);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        error = errno == EWOULDBLOCK ? refuse_second_daemon(fd, directory, text)
                                     : kvq__directory_fail("lock", path, text);
        close(fd);
        return error;
    }
    int length = snprintf(pid, sizeof pid, "%d\n", (int)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, pid, (size_t)length, 0) != length) {
        error = kvq__directory_fail("write", path, text);
        close(fd);
        return error;
    }
    server->lock_fd = fd; // the lock lives as long as the descriptor
    return 0;
}

// ---- Opening ----

static void on_async(uv_async_t *async)
{
    struct kvq__server *server = async->data;
    kvq__mailbox_deliver(&server->box);
}

// Any thread.
static void wake_loop(void *context)
{
    struct kvq__server *server = context;
    uv_async_send(&server->async);
}

static int open_loop(struct kvq__server *server, char *text)
{
    kvq__mailbox_open(&server->box, wake_loop, server);
    int error = uv_loop_init(&server->loop);
    server->loop_open = error == 0;
    error = error ? error : uv_async_init(&server->loop, &server->async, on_async);
    error = error ? error : uv_timer_init(&server->loop, &server->drain_timer);
    server->async.data = server->drain_timer.data = server;
    if (error == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "cannot start the event loop: %s", uv_strerror(error));
    return KVQ_E_SYSTEM;
}

static void on_buffer_gone(void *context, void *owner, uint32_t buffer)
{
    (void)context;
    kvq__attach_buffer_gone(owner, buffer);
}

static void on_table_gone(void *context, uint64_t client, const struct kvq__table_memory *memory)
{
    struct kvq__server *server = context;
    kvq__attach_table_gone(server->attach, client, memory);
}

static void on_wants(void *context)
{
    struct kvq__server *server = context;
    kvq__jobs_wants(server->jobs);
}

static int open_namespaces(struct kvq__core *core, const struct kvq__core_settings *settings,
                           char *text)
{
    int error = 0;
    for (uint32_t i = 0; i < settings->n_namespaces && error == 0; i++)
        error = kvq__core_namespace(core, &settings->namespaces[i], text);
    return error;
}

static int find_codebook(void *context, const char *name, uint32_t layer,
                         const struct kvq_format *format, const struct kvq_shape *shape,
                         struct kvq_book *book, void **hold, char *text)
{
    struct kvq__server *server = context;
    return kvq__codebooks_get(server->codebooks, name, layer, format, shape, book, hold, text);
}

static void share_codebook(void *context, void *hold)
{
    struct kvq__server *server = context;
    kvq__codebooks_share(server->codebooks, hold);
}

static void release_codebook(void *context, void *hold)
{
    struct kvq__server *server = context;
    kvq__codebooks_release(server->codebooks, hold);
}

static uint64_t id_of_codebook(void *context, void *hold)
{
    (void)context;
    return kvq__codebooks_id(hold);
}

// The software driver's library, beside the folder of this program.
static void emulator_path(char *path, size_t size)
{
    ssize_t got = readlink("/proc/self/exe", path, size - 1);
    path[got > 0 ? got : 0] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(path, '/');
        *(slash ? slash : path) = 0;
    }
    size_t length = strlen(path);
    snprintf(path + length, size - length, "/lib/libkvq-emu.so");
}

// GPUs, if they are wanted and, with backend = auto, if there are some that can be used.
static int open_gpus(struct kvq__server *server, char *text)
{
    const struct kvq_config *c = &server->config;
    char path[KVQ_CONFIG_PATH + 32], quoted[KVQ_TEXT_BYTES + 16];
    struct kvq__gpus_config config = {.driver = c->gpu_driver,
                                      .devices = c->gpus,
                                      .bytes = c->gpu_bytes,
                                      .extent_bytes = c->gpu_extent_bytes};
    if (c->backend == KVQ__BACKEND_CPU || server->gpus) // tests bring their own
        return 0;
    if (c->backend == KVQ__BACKEND_EMU && !c->gpu_driver[0]) {
        emulator_path(path, sizeof path);
        config.driver = path;
        if (access(path, F_OK) != 0) {
            snprintf(text, KVQ_TEXT_BYTES,
                     "backend = emu: this build has no emulator (KVQ_EMU=OFF): there is no %s",
                     path);
            return KVQ_E_UNSUPPORTED;
        }
    }
    int error = kvq__gpus_open(&config, &server->gpus, text);
    for (uint32_t i = 0; i < kvq__gpus_count(server->gpus); i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(server->gpus, i);
        kvq__log(KVQ_LOG_INFO, "gpu", "place=%s name=%s pool_mib=%llu", kvq__gpu_uuid_text(gpu),
                 kvq__log_quote(quoted, sizeof quoted, kvq__gpu_name(gpu)),
                 (unsigned long long)(kvq__gpu_budget(gpu) >> 20));
    }
    const char *why;
    for (uint32_t i = 0; (why = kvq__gpus_skipped(server->gpus, i)); i++)
        kvq__log(KVQ_LOG_WARN, "gpu_skipped", "reason=%s",
                 kvq__log_quote(quoted, sizeof quoted, why));
    if (!error || c->backend != KVQ__BACKEND_AUTO)
        return error;
    server->no_gpu = strdup(text);
    kvq__log(KVQ_LOG_INFO, "no_gpu", "reason=%s", kvq__log_quote(quoted, sizeof quoted, text));
    return 0;
}

// Whether the machine has what the options give away, and a word in the log where it is in use now.
static int check_machine(struct kvq__server *server, char *text)
{
    const struct kvq_config *c = &server->config;
    struct kvq__huge_counts counts = kvq__huge_counts();
    struct kvq__machine machine;
    char quoted[KVQ_TEXT_BYTES + 16];
    server->memory = (struct kvq__memory_source){.huge = (enum kvq__huge_pages)c->huge_pages,
                                                 .transparent = counts.transparent,
                                                 .pool_bytes = c->pool_bytes};
    server->memory.set_aside = kvq__memory_set_aside(&server->memory, &counts);
    kvq__machine_read("", &machine);
    const struct {
        const char *name;
        uint64_t bytes, set_aside;
        bool given;
    } options[] = {
        {"pool_bytes", c->pool_bytes, server->memory.set_aside, true},
        {"buffer_bytes", c->buffer_bytes, 0, kvq__config_sets_buffer_bytes(c, &machine)},
    };
    int error = kvq__memory_check(&server->memory, &counts, text);
    for (size_t i = 0; i < sizeof options / sizeof *options && error == 0; i++) {
        if (!options[i].given)
            continue;
        error = kvq__machine_check(&machine, options[i].name, options[i].bytes,
                                   options[i].set_aside, text);
        if (error == 0 && kvq__machine_is_tight(&machine, options[i].name, options[i].bytes,
                                                options[i].set_aside, text))
            kvq__log(KVQ_LOG_WARN, "memory_tight", "text=%s",
                     kvq__log_quote(quoted, sizeof quoted, text));
    }
    if (error == 0 && kvq__machine_is_promised_twice(&machine, c->pool_bytes, options[0].set_aside,
                                                     c->buffer_bytes, text))
        kvq__log(KVQ_LOG_WARN, "memory_tight", "text=%s",
                 kvq__log_quote(quoted, sizeof quoted, text));
    return error;
}

static int open_core_with(struct kvq__server *server, const struct kvq__core_settings *settings,
                          char *text)
{
    const struct kvq_config *c = &server->config;
    const struct kvq_kernels *kernels = kvq_kernels_get(KVQ_ISA_BEST);
    server->identity.isa = kvq_kernels_isa(kernels);
    struct kvq__core_config config = {.pool_bytes = c->pool_bytes,
                                      .extent_bytes = kvq__server_extent(server),
                                      .keep_ns = settings->keep_ns,
                                      .prefix_keep_ns = settings->prefix_keep_ns,
                                      .evict_idle_ns = settings->evict_idle_ns,
                                      .evict_above = settings->evict_above,
                                      .park_idle_ns = settings->park_idle_ns,
                                      .pack_error_ns = settings->pack_error_ns,
                                      .workers = (uint32_t)c->workers,
                                      .path = settings->path,
                                      .quota = settings->quota,
                                      .kernels = kernels,
                                      .saves = c->storage_dir[0] != 0,
                                      .run = server->identity.epoch,
                                      .gpus = kvq__gpus_list(server->gpus),
                                      .n_gpus = kvq__gpus_count(server->gpus),
                                      .formats = c->own_formats,
                                      .n_formats = c->n_formats,
                                      .fault = server->fault,
                                      .memory = kvq__memory_ops(&server->memory),
                                      .context = server,
                                      .event = kvq__event_from_core,
                                      .buffer_gone = on_buffer_gone,
                                      .table_gone = on_table_gone,
                                      .wants = on_wants,
                                      .codebook = find_codebook,
                                      .codebook_share = share_codebook,
                                      .codebook_release = release_codebook,
                                      .codebook_id = id_of_codebook};
    if (getrandom(config.prefix_key, sizeof config.prefix_key, 0) != sizeof config.prefix_key) {
        snprintf(text, KVQ_TEXT_BYTES, "no random bytes for the key of prefixes");
        return KVQ_E_SYSTEM;
    }
    server->codebooks = kvq__codebooks_new(c->codebook_dir);
    if (!server->codebooks) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    int error = kvq__core_open(&config, &server->core, text);
    if (error)
        return error;
    kvq__core_clock(server->core, kvq_now_ns());
    return open_namespaces(server->core, settings, text);
}

static int open_core(struct kvq__server *server, char *text)
{
    struct kvq__core_settings *settings = kvq__config_settings(&server->config);
    int error = KVQ_E_NO_MEMORY;
    snprintf(text, KVQ_TEXT_BYTES, "no memory");
    if (settings)
        error = open_core_with(server, settings, text);
    free(settings);
    return error;
}

static int open_page(struct kvq__server *server, char *text)
{
    int error =
        kvq__shm_create(&server->page, "kvq-daemon", sizeof(struct kvq_daemon_page), true, text);
    if (error)
        return error;
    *(struct kvq_daemon_page *)server->page.map =
        (struct kvq_daemon_page){.magic = KVQ_SHM_MAGIC_DAEMON,
                                 .version = KVQ_PROTOCOL_MAX,
                                 .epoch = server->identity.epoch,
                                 .cpus = kvq__usable_cpus(),
                                 .awake = 1};
    return 0;
}

static void make_identity(struct kvq__server *server)
{
    struct kvq__identity *us = &server->identity;
    us->version = KVQ_VERSION_TEXT;
    us->backend = "cpu";
    us->runtime_dir = server->config.runtime_dir;
    us->pid = (uint64_t)getpid();
    us->start_ns = kvq_now_ns();
    us->workers = (uint32_t)server->config.workers;
    us->stores = server->config.storage_dir[0] != 0;
    while (us->epoch == 0) // 0 means none
        if (getrandom(&us->epoch, sizeof us->epoch, 0) != sizeof us->epoch)
            us->epoch = us->start_ns;
}

int kvq__server_open(struct kvq__server *server, char *text)
{
    server->page.fd = -1;
    server->history = calloc(1, sizeof *server->history);
    if (!server->history) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for events");
        return KVQ_E_NO_MEMORY;
    }
    make_identity(server);
    int error = open_loop(server, text);
    error = error ? error : check_machine(server, text);
    error = error ? error : open_page(server, text);
    error = error ? error : open_gpus(server, text);
    server->identity.backend = server->gpus ? "gpu" : "cpu";
    if (!error)
        error =
            kvq__refill_open(server->gpus, server->config.gpu_extent_bytes, &server->refill, text);
    error = error ? error : open_core(server, text);
    if (error)
        return error;
    struct kvq__poller_config config = {.core = server->core,
                                        .page = server->page.map,
                                        .workers = (uint32_t)server->config.workers,
                                        .spin_ns = server->config.spin_us * 1000,
                                        .pin = server->config.pin};
    if (server->config.storage_dir[0])
        error = kvq__directory_check("storage_dir", server->config.storage_dir, text);
    error = error ? error : kvq__jobs_open(server, &server->jobs, text);
    error = error ? error : kvq__poller_open(&config, &server->poller, text);
    error = error ? error : kvq__control_open(server, &server->control, text);
    error = error ? error : kvq__http_open(server, &server->http, text);
    return error ? error : kvq__attach_open(server, &server->attach, text);
}

// ---- Draining ----

static void drain_look(struct kvq__server *server);

static void leave(struct kvq__server *server)
{
    uv_timer_stop(&server->drain_timer);
    if (server->drained)
        server->drained(server);
    server->drained = NULL;
}

// Those who have asked how far the end is may ask once more.
static void on_farewell(uv_timer_t *timer)
{
    struct kvq__server *server = timer->data;
    if (kvq_now_ns() >= server->drain_until_ns || !kvq__control_awaited(server->control))
        leave(server);
}

static void drain_end(struct kvq__server *server)
{
    server->drain.phase = KVQ__DRAIN_OVER;
    server->drain.unsaved = 0;
    if (!kvq__control_awaited(server->control)) {
        leave(server);
        return;
    }
    server->drain_until_ns = kvq_now_ns() + FAREWELL_NS;
    uv_timer_start(&server->drain_timer, on_farewell, DRAIN_LOOK_MS, DRAIN_LOOK_MS);
}

// Sessions are saved, too; however long that takes, a second signal ends it.
static void drain_save(struct kvq__server *server, bool complete)
{
    uv_timer_stop(&server->drain_timer);
    server->drain.phase = KVQ__DRAIN_SAVES;
    server->drain.complete = complete;
    kvq__jobs_drain(server->jobs, drain_end);
}

static void drain_answer(struct kvq__mail *mail)
{
    struct kvq__server *server =
        (struct kvq__server *)((char *)mail - offsetof(struct kvq__server, drain_mail));
    server->drain_asked = false;
    if (!server->core_idle || !server->drained || server->drain.phase != KVQ__DRAIN_STEPS)
        return;
    kvq__log(KVQ_LOG_INFO, "drained", "complete=yes");
    drain_save(server, true);
}

// Poller's thread.
static void drain_ask(struct kvq__mail *mail)
{
    struct kvq__server *server =
        (struct kvq__server *)((char *)mail - offsetof(struct kvq__server, drain_mail));
    kvq__core_drain(server->core);
    server->core_idle = kvq__core_idle(server->core);
    kvq__mailbox_post(&server->box, mail, drain_answer);
}

static void on_drain_timer(uv_timer_t *timer)
{
    drain_look(timer->data);
}

static void drain_look(struct kvq__server *server)
{
    bool late = kvq_now_ns() >= server->drain_until_ns && server->drained;
    if (late && server->drain_looked) {
        kvq__log(KVQ_LOG_WARN, "drained", "complete=no after_ms=%llu",
                 (unsigned long long)server->config.drain_ms);
        drain_save(server, false);
    } else if (!server->drain_asked) {
        server->drain_asked = true;
        kvq__mailbox_post(kvq__poller_box(server->poller), &server->drain_mail, drain_ask);
    }
    server->drain_looked = true;
}

void kvq__server_drain(struct kvq__server *server)
{
    server->draining = true;
    server->drain_until_ns = kvq_now_ns() + server->config.drain_ms * 1000000;
    kvq__log(KVQ_LOG_INFO, "drain_begin", "limit_ms=%llu",
             (unsigned long long)server->config.drain_ms);
    kvq__service_stopping(server->service);
    uv_timer_start(&server->drain_timer, on_drain_timer, DRAIN_LOOK_MS, DRAIN_LOOK_MS);
    drain_look(server);
}

// ---- Closing ----

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static bool all_back(const struct kvq__server *server)
{
    return kvq__attach_idle(server->attach) && kvq__control_idle(server->control) &&
           kvq__http_idle(server->http) && !server->drain_asked && kvq__jobs_idle(server->jobs) &&
           kvq__events_idle() && kvq__service_idle(server->service);
}

static void on_close_timer(uv_timer_t *timer)
{
    struct kvq__server *server = timer->data;
    server->stuck(kvq__attach_count(server->attach));
}

void kvq__server_close(struct kvq__server *server)
{
    uv_timer_stop(&server->drain_timer);
    server->drained = NULL;
    if (server->stuck && kvq__gpus_count(server->gpus) > 0)
        uv_timer_start(&server->drain_timer, on_close_timer, KVQ__CLOSE_MS, 0);
    if (server->attach) {
        kvq__attach_refuse(server->attach);
        kvq__attach_end_all(server->attach);
    }
    kvq__jobs_end(server->jobs);
    kvq__control_hush(server->control);
    kvq__http_end(server->http);
    kvq__service_end(server->service);
    while (!all_back(server))
        uv_run(&server->loop, UV_RUN_ONCE);
    uv_timer_stop(&server->drain_timer);
    kvq__poller_close(&server->poller);
    if (server->core)
        kvq__jobs_forget_last(server->jobs);
    if (server->core)
        kvq__core_close(&server->core);
    kvq__refill_close(&server->refill);
    kvq__gpus_close(&server->gpus);
    free(server->no_gpu);
    kvq__codebooks_free(&server->codebooks);
    // The core's last events.
    kvq__mailbox_deliver(&server->box);
    kvq__control_end(server->control);
    if (server->loop_open) {
        uv_walk(&server->loop, close_handle, NULL);
        uv_run(&server->loop, UV_RUN_DEFAULT);
        int error = uv_loop_close(&server->loop);
        assert(error == 0);
        (void)error;
    }
    kvq__jobs_close(&server->jobs);
    kvq__attach_free(&server->attach);
    kvq__http_free(&server->http);
    kvq__control_free(&server->control);
    kvq__service_free(&server->service);
    free(server->history);
    server->history = NULL;
    kvq__shm_close(&server->page);
    kvq__mailbox_close(&server->box);
}
