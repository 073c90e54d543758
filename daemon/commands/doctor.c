// SPDX-License-Identifier: Apache-2.0
//
// Findings about the machine and the configuration, for people: what is fine, what is worth
// knowing, what is a problem, and what to do about it.
#include "daemon/commands/doctor.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/commands/dispatch.h"
#include "daemon/config/machine.h"
#include "daemon/core/gpu/gpu.h"
#include "daemon/runtime/server.h"
#include "proto/clock.h"
#include "proto/status.h"

enum level { FINE, NOTE, PROBLEM };
enum { MOST = 16 + 3 * KVQ_MAX_GPUS };

// When the store is nearly full: by what it takes, or by what is left for another session. The
// alert KvqdStoreNearlyFull of packaging/prometheus has the same: tests/tools/alerts.py sees to it.
enum { STORE_TAKEN_PERCENT = 90, STORE_ROOM_PERCENT = 5 };

struct findings {
    struct kvq_arena *arena;
    Kvq__DoctorReply *reply;
};

__attribute__((format(printf, 5, 6))) static void add(struct findings *f, const char *check,
                                                      enum level level, const char *remedy,
                                                      const char *format, ...)
{
    char text[KVQ_TEXT_BYTES];
    va_list arguments;
    Kvq__Finding *finding = kvq_arena_alloc(f->arena, sizeof *finding);
    if (!finding || f->reply->n_findings == MOST)
        return;
    assert((level == FINE) == !*remedy); // what is not fine comes with what to do about it
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    kvq__finding__init(finding);
    finding->check = kvq_arena_text(f->arena, check);
    finding->level = level;
    finding->text = kvq_arena_text(f->arena, text);
    finding->remedy = kvq_arena_text(f->arena, remedy);
    f->reply->findings[f->reply->n_findings++] = finding;
}

static void check_cpu(struct findings *f, const struct kvq__server *s)
{
    const char *isa = s->identity.isa;
    bool wide = strcmp(isa, "avx512") == 0 || strcmp(isa, "amx") == 0;
    add(f, "cpu", wide ? FINE : NOTE,
        wide ? "" : "a CPU with AVX-512 VNNI computes attention faster; nothing is wrong",
        "kernels of %s are in use", isa);
    uint32_t cpus = kvq__usable_cpus();
    uint32_t workers = s->identity.workers;
    if (cpus == 1)
        add(f, "spinning", NOTE, "give the daemon and its engines at least 2 CPUs",
            "1 usable CPU: nobody spins, so each request pays two wake-ups");
    else if (workers > cpus)
        add(f, "spinning", NOTE, "set workers to the number of CPUs at most",
            "%u workers on %u usable CPUs: they take turns, and engines seldom spin", workers,
            cpus);
    else
        add(f, "spinning", FINE, "",
            "%u worker%s on %u usable CPUs: an engine spins while it waits for a short answer, and "
            "sleeps while %s",
            workers, workers == 1 ? "" : "s", cpus,
            workers < cpus ? "others need its CPU" : "all workers compute");
}

static void check_memory(struct findings *f, const struct kvq__server *s)
{
    struct kvq__machine machine;
    uint64_t pool = s->config.pool_bytes, buffers = s->config.buffer_bytes;
    char unused[KVQ_TEXT_BYTES];
    kvq__machine_read("", &machine);
    uint64_t most = kvq__machine_most(&machine);
    uint64_t set_aside = s->memory.set_aside;
    bool tight = pool - set_aside > most / 10 * 9; // huge pages are for nothing else
    add(f, "pool", tight ? PROBLEM : FINE,
        tight ? "lower pool_bytes to 9/10 of the memory or less" : "",
        "the pool may grow to %llu MiB of %llu MiB that the %s allows; huge pages that were set "
        "aside are %llu MiB of it",
        (unsigned long long)(pool >> 20), (unsigned long long)(most >> 20),
        most < machine.total ? "control group" : "machine", (unsigned long long)(set_aside >> 20));
    bool over = kvq__machine_is_promised_twice(&machine, pool, set_aside, buffers, unused);
    add(f, "buffers", over ? NOTE : FINE,
        over ? "lower pool_bytes or buffer_bytes if clients may ever fill all of it" : "",
        "clients' buffers may grow to %llu MiB besides the pool",
        (unsigned long long)(buffers >> 20));
}

static void check_huge_pages(struct findings *f, const struct kvq__server *s)
{
    struct kvq__huge_counts counts = kvq__huge_counts();
    uint64_t need = s->config.pool_bytes / KVQ__HUGE_PAGE;
    char remedy[160];
    if (counts.transparent && s->memory.huge != KVQ__HUGE_REQUIRE) {
        add(f, "huge_pages", FINE, "", "shared memory may use huge pages");
        return;
    }
    if (s->memory.huge == KVQ__HUGE_OFF) {
        add(f, "huge_pages", NOTE, "set huge_pages = auto",
            "caches lie in small pages (huge_pages = off); huge ones would save some time at long "
            "contexts");
        return;
    }
    bool few = counts.total < need;
    snprintf(remedy, sizeof remedy,
             "sysctl vm.nr_hugepages=%llu and restart, or echo advise > "
             "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
             (unsigned long long)need);
    add(f, "huge_pages", few ? NOTE : FINE, few ? remedy : "",
        "a full pool needs %llu huge pages of 2 MiB; the system has %llu, of which %llu are "
        "available%s",
        (unsigned long long)need, (unsigned long long)counts.total,
        (unsigned long long)counts.available,
        few ? "; small ones cost some time at long contexts" : "");
}

// Those of full pools: one for each extent.
static uint64_t extents_of_pools(const struct kvq__server *s)
{
    uint64_t bytes = kvq__server_extent(s);
    uint64_t n = kvq__host_extents_most(s->config.pool_bytes, bytes);
    for (uint32_t i = 0; i < kvq__gpus_count(s->gpus); i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(s->gpus, i);
        n += kvq__gpu_exports(gpu) ? kvq__gpu_budget(gpu) / bytes : 0;
    }
    return n;
}

static void check_limits(struct findings *f, const struct kvq__server *s)
{
    struct rlimit files = {0, 0};
    getrlimit(RLIMIT_NOFILE, &files);
    // A client holds a socket and a pidfd, each queue 4 descriptors, each extent one.
    uint64_t need = 64 + s->config.max_clients * 6 + extents_of_pools(s);
    bool few = files.rlim_cur != RLIM_INFINITY && files.rlim_cur < need;
    add(f, "descriptors", few ? PROBLEM : FINE,
        few ? "raise LimitNOFILE= of the service, or ulimit -n" : "",
        "%llu descriptors may be open; max_clients with one queue each and full pools need %llu",
        (unsigned long long)files.rlim_cur, (unsigned long long)need);
}

// The first line of /proc/swaps is a heading, and each other one a file or device.
static bool has_swap(void)
{
    char line[256];
    int lines = 0;
    FILE *file = fopen("/proc/swaps", "re");
    while (file && fgets(line, sizeof line, file))
        lines++;
    if (file)
        fclose(file);
    return lines > 1;
}

static void check_swap(struct findings *f)
{
    bool there = has_swap();
    add(f, "swap", there ? NOTE : FINE,
        there ? "MemorySwapMax=0 for the service, or reserved huge pages, or swapoff -a" : "",
        there ? "caches that nobody uses for a while can be swapped out, and the next step waits "
                "for them"
              : "this machine has no swap");
}

static void check_permissions(struct findings *f, const struct kvq__server *s)
{
    struct stat st;
    if (stat(s->config.runtime_dir, &st) != 0) {
        add(f, "runtime_dir", PROBLEM, "restart kvqd", "%s has vanished", s->config.runtime_dir);
        return;
    }
    bool open_to_all = (st.st_mode & 0001) != 0;
    bool writable = (st.st_mode & 0022) != 0;
    add(f, "runtime_dir", writable ? PROBLEM : FINE,
        writable ? "chmod go-w: others could replace the sockets" : "",
        "%s has mode %03o, group %u: %s may connect", s->config.runtime_dir,
        (unsigned)st.st_mode & 0777, (unsigned)st.st_gid,
        open_to_all ? "every user" : "its owner and group");
}

static void check_gpu(struct findings *f, const struct kvq__gpu *gpu)
{
    bool words = kvq__gpu_has_memory_ops(gpu), events = kvq__gpu_has_events(gpu);
    add(f, "gpu", FINE, "", "%s, %s: caches may take %llu MiB", kvq__gpu_uuid_text(gpu),
        kvq__gpu_name(gpu), (unsigned long long)(kvq__gpu_budget(gpu) >> 20));
    add(f, "gpu_order", words ? FINE : NOTE,
        words ? "" : "a newer driver, if there is one, has 64-bit stream memory operations",
        "%s: streams of engines and daemon wait for each other by %s%s; tried at the start: "
        "timeline words %s, events between processes %s",
        kvq__gpu_uuid_text(gpu),
        words    ? "timeline words"
        : events ? "events"
                 : "nothing",
        words || events ? "" : ", so engines wait on the host for each request",
        words ? "work" : "do not work", events ? "work" : "do not work");
}

// Streams that wait for a client have a hardware queue each, and there are few.
static void check_queues(struct findings *f, const struct kvq__server *s,
                         const struct kvq__gpu *gpu)
{
    uint32_t queues = kvq__gpu_connections(gpu), clients = kvq__gpu_clients_alone(gpu);
    assert(2 * clients <= queues); // each has two
    bool few = clients < s->config.max_clients, more = queues < KVQ_GPU_CONNECTIONS;
    add(f, "gpu_queues", few ? NOTE : FINE,
        !few   ? ""
        : more ? "start kvqd with CUDA_DEVICE_MAX_CONNECTIONS=32 and "
                 "CUDA_DEVICE_MAX_COPY_CONNECTIONS=32, or without these variables"
               : "engines that attend in their own context (kvq_local_open) wait once a step "
                 "instead of once a layer",
        "%s has %u hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, and "
        "CUDA_DEVICE_MAX_COPY_CONNECTIONS if that is less): the requests of %u clients are ordered "
        "on streams; further ones get the same answers, but wait on the host for each request",
        kvq__gpu_uuid_text(gpu), queues, clients);
}

// Without MPS the contexts of two processes take turns on a GPU. Under MPS they share one fate: a
// fault in one, and a kill of one with work in flight, can end the others' work.
static void check_mps(struct findings *f)
{
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    bool runs = access(pipe ? pipe : "/tmp/nvidia-mps", F_OK) == 0;
    add(f, "mps", NOTE,
        runs ? "end engines in order; or run without MPS, with attention in their own context "
               "(kvq_local_open)"
             : "let engines attend in their own context (kvq_local_open), one hop a step; MPS "
               "(nvidia-cuda-mps-control -d) helps as well, but ties engines' and daemon's fates",
        runs ? "MPS seems to run: kernels run side by side, but a fault in one process, or a "
               "kill -9 of one with work in flight, can end the GPU work of all, the daemon's too"
             : "MPS does not seem to run (no CUDA_MPS_PIPE_DIRECTORY nor /tmp/nvidia-mps, which a "
               "service with a /tmp of its own does not see): daemon and engines take turns on a "
               "GPU, which costs time at every change");
}

static void check_gpus(struct findings *f, const struct kvq__server *s)
{
    for (uint32_t i = 0; i < kvq__gpus_count(s->gpus); i++) {
        check_gpu(f, kvq__gpus_get(s->gpus, i));
        check_queues(f, s, kvq__gpus_get(s->gpus, i));
    }
    const char *why;
    for (uint32_t i = 0; (why = kvq__gpus_skipped(s->gpus, i)); i++)
        add(f, "gpus", NOTE, "restart kvqd once it can be used; gpus names those that must be",
            "a GPU is left out: %s", why);
    if (s->gpus)
        check_mps(f);
    else if (s->no_gpu)
        add(f, "backend", FINE, "", "caches and attention are on the CPU: %s", s->no_gpu);
    else
        add(f, "backend", FINE, "", "caches and attention are on the CPU; no GPU was looked for");
}

// ---- What is saved ----

static const char *what_mends(int status)
{
    if (status == KVQ_E_NO_SPACE)
        return "drop saved sessions (kvqctl session drop) and kvqctl storage compact; or free some "
               "of the disk, or raise storage_bytes, which takes a restart";
    if (status == KVQ_E_QUOTA)
        return "kvqctl quota list shows who is at disk-bytes: raise it (kvqctl quota set), or drop "
               "saved sessions of that namespace";
    return "kvqd's log says why (event=storage_failed); kvqctl storage status";
}

static void check_saves(struct findings *f, const struct kvq__server *s)
{
    const struct kvq__store_failures *failed = &s->storage.failed[KVQ__TIME_SAVE];
    if (kvq__store_fails(failed, kvq_now_ns()))
        add(f, "saving", PROBLEM, what_mends(failed->status),
            "saves fail: %llu since the start, the last one %llu s ago with %s (%s); sessions that "
            "are not saved end with the daemon",
            (unsigned long long)failed->count,
            (unsigned long long)((kvq_now_ns() - failed->at_ns) / 1000000000),
            kvq_status_name(failed->status), kvq_status_text(failed->status));
}

static void check_storage(struct findings *f, const struct kvq__server *s)
{
    const struct kvq__storage_state *state = &s->storage;
    uint64_t most = state->used_bytes + state->free_bytes;
    bool capped = state->limit_bytes && state->limit_bytes < most;
    most = capped ? state->limit_bytes : most;
    bool full = state->used_bytes > most / 100 * STORE_TAKEN_PERCENT ||
                state->room_bytes < most / 100 * STORE_ROOM_PERCENT;
    if (!s->config.storage_dir[0]) {
        add(f, "storage", FINE, "", "no session is saved: storage_dir is not set");
        return;
    }
    check_saves(f, s);
    if (!state->known)
        return;
    if (state->read_only) {
        add(f, "storage", PROBLEM,
            "kvqctl storage status says why; when that is mended, restart kvqd",
            "the store in %s is read-only: nothing is saved", s->config.storage_dir);
        return;
    }
    add(f, "storage", full ? NOTE : FINE, full ? what_mends(KVQ_E_NO_SPACE) : "",
        "saved sessions: %llu, which take %llu MiB of %llu MiB that the %s", // the cap, or the disk
        (unsigned long long)state->sessions, (unsigned long long)(state->used_bytes >> 20),
        (unsigned long long)(most >> 20),
        capped ? "store may have (storage_bytes)" : "disk has for it");
}

// Whether they fail.
static bool tell_transfers(struct findings *f, const char *what,
                           const struct kvq__store_failures *failures)
{
    bool fail = kvq__store_fails(failures, kvq_now_ns());
    if (fail)
        add(f, "remote", PROBLEM, "kvqd's log says why (event=remote_failed); kvqctl remote status",
            "%s fail: %llu since the start, the last with %s (%s)", what,
            (unsigned long long)failures->count, kvq_status_name(failures->status),
            kvq_status_text(failures->status));
    return fail;
}

static void check_transfers(struct findings *f, const struct kvq__server *s)
{
    if (!s->config.remote_endpoint[0])
        return;
    bool pushes = tell_transfers(f, "pushes", &s->storage.failed[KVQ__TIME_PUSH]);
    bool pulls = tell_transfers(f, "pulls", &s->storage.failed[KVQ__TIME_PULL]);
    if (!pushes && !pulls)
        add(f, "remote", FINE, "", "there is a remote store, and no push or pull failed lately");
}

void kvq__doctor(const struct kvq__server *server, struct kvq_arena *arena, Kvq__Reply *reply)
{
    struct findings f = {arena, kvq_arena_alloc(arena, sizeof(Kvq__DoctorReply))};
    if (f.reply) {
        kvq__doctor_reply__init(f.reply);
        f.reply->findings = kvq_arena_alloc(arena, MOST * sizeof *f.reply->findings);
    }
    if (!f.reply || !f.reply->findings) {
        kvq__reply_status(reply, arena, KVQ_E_NO_MEMORY, "no room left for the reply");
        return;
    }
    check_gpus(&f, server);
    check_cpu(&f, server);
    check_memory(&f, server);
    check_huge_pages(&f, server);
    check_limits(&f, server);
    check_swap(&f);
    check_permissions(&f, server);
    check_storage(&f, server);
    check_transfers(&f, server);
    assert(f.reply->n_findings <= MOST);
    reply->doctor = f.reply;
    reply->result_case = KVQ__REPLY__RESULT_DOCTOR;
}
