// SPDX-License-Identifier: Apache-2.0
// kvqctl doctor: looks at what this machine offers and asks the daemon for its own findings. It
// works without a daemon too, since that is when it is needed most.
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/openmp.h"

enum { LEVEL_FINE, LEVEL_NOTE, LEVEL_PROBLEM };
enum { MAX_FINDINGS = 16, TEXT_BYTES = 512 };

// Findings of this program, in the shape the daemon sends its own.
struct report {
    size_t n;
    Kvq__Finding findings[MAX_FINDINGS];
    char texts[MAX_FINDINGS][TEXT_BYTES];
};

static void __attribute__((format(printf, 5, 6)))
add(struct report *report, const char *check, uint32_t level, const char *remedy,
    const char *format, ...)
{
    va_list arguments;
    if (report->n == MAX_FINDINGS)
        return;
    Kvq__Finding *finding = &report->findings[report->n];
    char *text = report->texts[report->n++];
    kvq__finding__init(finding);
    va_start(arguments, format);
    vsnprintf(text, TEXT_BYTES, format, arguments);
    va_end(arguments);
    finding->check = (char *)check;
    finding->level = level;
    finding->text = text;
    finding->remedy = (char *)remedy;
}

static void check_cpu(struct report *report)
{
    const char *isa = kvq_isa_name(kvq_isa_best(KVQ_ISA_BEST));
    const char *mask = getenv("KVQ_CPU_MASK");
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    if (mask && strcmp(mask, "amx") == 0 && strcmp(isa, mask) != 0)
        add(report, "machine", LEVEL_NOTE,
            "unset KVQ_CPU_MASK, or see troubleshooting.md in share/doc/kvqd",
            "KVQ_CPU_MASK=amx is set, and kernels run as %s: there is no AMX for this process",
            isa);
    else if (mask && *mask && strcmp(mask, "amx") != 0)
        add(report, "machine", LEVEL_NOTE, "unset KVQ_CPU_MASK",
            "kernels run as %s because KVQ_CPU_MASK=%s is set", isa, mask);
    else if (strcmp(isa, "c") == 0)
        add(report, "machine", LEVEL_NOTE, "use a machine with AVX2 or AVX-512 for speed",
            "no AVX2: the portable kernels run, many times slower");
    else
        add(report, "machine", LEVEL_FINE, "", "%s kernels, %s", isa,
            kvq__ctl_count((uint64_t)cpus, "usable CPU"));
    if (cpus < 2)
        add(report, "cpus", LEVEL_NOTE, "give daemon and engine two CPUs",
            "one usable CPU: nobody spins, so each request pays for a wake-up");
}

static void check_kernel(struct report *report)
{
    struct utsname name;
    int fd = memfd_create("kvqctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (uname(&name) != 0)
        snprintf(name.release, sizeof name.release, "unknown");
    if (fd < 0)
        add(report, "memfd", LEVEL_PROBLEM, "use Linux 5.10 or newer, outside a strict sandbox",
            "memfd_create does not work here (kernel %s): %s", name.release, strerror(errno));
    else
        close(fd);
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd < 0)
        add(report, "pidfd", LEVEL_PROBLEM, "use Linux 5.10 or newer, outside a strict sandbox",
            "pidfd_open does not work here (kernel %s): %s", name.release, strerror(errno));
    else
        close(pidfd);
    if (fd >= 0 && pidfd >= 0)
        add(report, "kernel", LEVEL_FINE, "", "Linux %s has memfd and pidfd", name.release);
}

static void check_directory(struct report *report, const struct kvq__ctl *ctl)
{
    struct stat st;
    const char *dir = ctl->runtime_dir;
    if (stat(dir, &st) != 0)
        add(report, "directory", LEVEL_PROBLEM,
            "start kvqd, or name its directory with --runtime-dir", "%s: %s", dir, strerror(errno));
    else if (!S_ISDIR(st.st_mode))
        add(report, "directory", LEVEL_PROBLEM, "name another one with --runtime-dir",
            "%s is not a directory", dir);
    else if (access(dir, X_OK) != 0)
        add(report, "directory", LEVEL_PROBLEM, "join the group that owns it",
            "%s belongs to uid %u, gid %u and this user may not enter", dir, (unsigned)st.st_uid,
            (unsigned)st.st_gid);
    else if (st.st_mode & S_IWOTH && !(st.st_mode & S_ISVTX))
        add(report, "directory", LEVEL_PROBLEM, "chmod o-w it",
            "anybody may replace the sockets in %s", dir);
    else
        add(report, "directory", LEVEL_FINE, "", "%s, owned by uid %u", dir, (unsigned)st.st_uid);
}

// ---- Engines ----

enum { NAMED = 4, LOOKED_AT = 64 }; // processes

struct look {
    uint32_t workers;
    cpu_set_t cpus; // the daemon's
    uint64_t pids[LOOKED_AT];
    uint32_t n, spinning, unread;
};

static bool cpus_of(uint64_t pid, cpu_set_t *set)
{
    return pid > 0 && pid <= INT_MAX && sched_getaffinity((pid_t)pid, sizeof *set, set) == 0;
}

static void add_spinning(struct report *report, uint64_t pid, const char *runtime, uint32_t team,
                         uint32_t workers, int cpus)
{
    add(report, "openmp", LEVEL_NOTE,
        "set OMP_WAIT_POLICY=passive before the engine starts; or let it attend in its own context "
        "on its own threads (threads=\"torch\"); or lower the daemon's workers",
        "process %llu has OpenMP (%s), up to %u threads of which may spin while they wait, beside "
        "%s of the daemon on %s: they may take the CPUs that attention in the daemon needs",
        (unsigned long long)pid, runtime, team, kvq__ctl_count(workers, "worker"),
        kvq__ctl_count((uint64_t)cpus, "usable CPU"));
}

// Engines that attend in their own context are passed over: the workers do little for them.
static void look_at(struct report *report, struct look *look, uint64_t pid)
{
    struct kvq__ctl_process process;
    cpu_set_t its, both, any;
    int rc = kvq__ctl_process_read(&process, "/proc", pid);
    const char *runtime = rc == 0 ? kvq__ctl_process_spins(&process) : NULL;
    bool gone = rc == -ENOENT || rc == -ESRCH;
    look->unread += rc != 0 && !gone;
    if (!runtime || !process.asks || process.attends || !cpus_of(pid, &its))
        return;
    uint32_t team = kvq__ctl_process_team(&process, (uint32_t)CPU_COUNT(&its));
    CPU_AND(&both, &its, &look->cpus);
    CPU_OR(&any, &its, &look->cpus);
    bool fits = (uint64_t)team + look->workers <= (uint64_t)CPU_COUNT(&any);
    if (team < 2 || fits || CPU_COUNT(&both) == 0)
        return;
    if (look->spinning++ < NAMED)
        add_spinning(report, pid, runtime, team, look->workers, CPU_COUNT(&any));
}

static void look_at_all(struct report *report, struct look *look,
                        const struct kvq__ctl_list *clients)
{
    for (size_t i = 0; i < clients->n; i++) {
        uint64_t pid = ((const Kvq__Client *)(const void *)clients->elements[i])->pid;
        uint32_t known = 0;
        while (known < look->n && look->pids[known] != pid)
            known++;
        if (known < look->n)
            continue;
        if (look->n == LOOKED_AT || pid == 0) { // 0: in no PID namespace of ours
            look->unread++;
            continue;
        }
        look->pids[look->n++] = pid;
        look_at(report, look, pid);
    }
}

// What the daemon's workers compute takes longer where threads of an engine spin on their CPUs.
static void check_openmp(struct report *report, struct kvq__ctl *ctl)
{
    static struct look look;
    struct kvq__ctl_list statuses, clients;
    ctl->quiet = true; // an older daemon, say
    int result = kvq__ctl_ask_status(ctl, &statuses);
    if (result == KVQ_EXIT_OK) {
        const Kvq__StatusReply *status = kvq__ctl_status_of(&statuses);
        look.workers = status->workers;
        bool computes = strcmp(status->backend, "cpu") == 0 && cpus_of(status->pid, &look.cpus);
        if (computes && kvq__ctl_ask_clients(ctl, &clients) == KVQ_EXIT_OK) {
            look_at_all(report, &look, &clients);
            kvq__ctl_list_free(&clients);
        }
        kvq__ctl_list_free(&statuses);
    }
    ctl->quiet = false;
    if (look.spinning > NAMED)
        add(report, "openmp", LEVEL_NOTE, "as for those before", "%u more like these",
            look.spinning - NAMED);
    if (look.unread)
        add(report, "openmp", LEVEL_FINE, "",
            "clients whose processes were not looked at: %u (this user may not read them, their "
            "environment is gone, or they are many)",
            look.unread);
}

static void print_findings(Kvq__Finding *const *findings, size_t n)
{
    static const char *const words[] = {"fine", "note", "PROBLEM"};
    for (size_t i = 0; i < n; i++) {
        const Kvq__Finding *f = findings[i];
        uint32_t level = f->level > LEVEL_PROBLEM ? LEVEL_PROBLEM : f->level;
        printf("%-8s %-12s %s\n", words[level], kvq__ctl_clean(f->check), kvq__ctl_clean(f->text));
        if (level > LEVEL_FINE && f->remedy && *f->remedy)
            printf("%-21s -> %s\n", "", kvq__ctl_clean(f->remedy));
    }
}

// All findings of both sides in one array; NULL without memory. *n is their number.
static Kvq__Finding **gather(struct report *ours, const Kvq__Reply *reply, size_t *n)
{
    size_t theirs = reply ? reply->doctor->n_findings : 0;
    Kvq__Finding **all = calloc(ours->n + theirs, sizeof *all);
    *n = 0;
    for (size_t i = 0; all && i < ours->n; i++)
        all[(*n)++] = &ours->findings[i];
    for (size_t i = 0; all && i < theirs; i++)
        all[(*n)++] = reply->doctor->findings[i];
    return all;
}

static uint32_t worst_level(Kvq__Finding *const *findings, size_t n)
{
    uint32_t worst = LEVEL_FINE;
    for (size_t i = 0; i < n; i++)
        worst = findings[i]->level > worst ? findings[i]->level : worst;
    return worst;
}

int kvq__ctl_doctor(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    static struct report report;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Doctor command = KVQ__DOCTOR__INIT;
    Kvq__Reply *reply;
    size_t n;
    if (!ctl->connect) { // of another machine its daemon alone knows
        check_cpu(&report);
        check_kernel(&report);
        check_directory(&report, ctl);
    }
    request.command_case = KVQ__REQUEST__COMMAND_DOCTOR;
    request.doctor = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_DOCTOR, &reply);
    if (result)
        add(&report, "daemon", LEVEL_PROBLEM, "", "no answer from a daemon %s",
            kvq__ctl_where(ctl));
    else if (!ctl->connect)
        check_openmp(&report, ctl);
    Kvq__Finding **all = gather(&report, reply, &n);
    if (!all) {
        fprintf(stderr, "kvqctl: out of memory\n");
        return KVQ_EXIT_FAILED;
    }
    if (ctl->json)
        kvq__ctl_print_json_array((ProtobufCMessage *const *)all, n);
    else
        print_findings(all, n);
    // Whatever kept the daemon from answering is one of the problems.
    if (worst_level(all, n) >= LEVEL_PROBLEM)
        result = KVQ_EXIT_PROBLEM;
    free(all);
    return result;
}
