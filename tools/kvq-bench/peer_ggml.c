// SPDX-License-Identifier: Apache-2.0
//
// Loading a ggml library. It is foreign code of any version, so every name is checked before
// anything of it is called, and what is missing is named.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/kvq-bench/peer_ggml.h"

#define KNOWN "ggml of August 2024, 0.9.3, 0.21.0 and 0.25.3 are known to work"

enum { MAX_LIBRARIES = 8, PATH_BYTES = 4096 };

struct libraries {
    void *handle[MAX_LIBRARIES];
    uint32_t n;
};

// ---- Files ----

static bool add(struct libraries *l, const char *path)
{
    void *handle = l->n < MAX_LIBRARIES ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!handle)
        return false;
    l->handle[l->n++] = handle;
    return true;
}

// In the order in which they need each other: one that is loaded already satisfies the next.
static const char *const parts[] = {"libggml-base.so", "libggml-cpu.so", "libggml.so"};
enum { PARTS = sizeof parts / sizeof *parts };

// The path of such a library in the folder, with or without a version. False: there is none.
static bool find_beside(const char *folder, const char *name, char path[PATH_BYTES])
{
    static const char *const endings[] = {"", ".0"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        int n = snprintf(path, PATH_BYTES, "%s/%s%s", folder, name, endings[i]);
        if (n < PATH_BYTES && access(path, F_OK) == 0)
            return true;
    }
    return false;
}

static bool add_or_complain(struct libraries *l, const char *path)
{
    if (add(l, path))
        return true;
    const char *why = dlerror();
    fprintf(stderr,
            "kvq-bench: --peer cannot load %s: %s; give a ggml library for this machine, or the "
            "folder that holds libggml.so and what it needs\n",
            path, why ? why : "too many libraries");
    return false;
}

static bool add_folder(struct libraries *l, const char *folder)
{
    uint32_t before = l->n;
    char path[PATH_BYTES];
    for (int i = 0; i < PARTS; i++)
        if (find_beside(folder, parts[i], path) && !add_or_complain(l, path))
            return false;
    if (l->n == before)
        fprintf(stderr,
                "kvq-bench: --peer %s: no ggml library in this folder; it must hold libggml.so, or "
                "libggml-base.so and libggml-cpu.so\n",
                folder);
    return l->n > before;
}

// What the library may need and lies beside it goes first; where that cannot be loaded, the
// library itself says what it lacks.
static bool add_file(struct libraries *l, const char *path)
{
    const char *slash = strrchr(path, '/');
    char folder[PATH_BYTES], beside[PATH_BYTES];
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) : 0, path);
    for (int i = 0; slash && i < PARTS - 1; i++)
        if (find_beside(folder, parts[i], beside))
            add(l, beside);
    return add_or_complain(l, path);
}

static bool add_all(struct libraries *l, const char *list)
{
    char path[PATH_BYTES];
    struct stat st;
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        int n = (int)strcspn(at, ",");
        if (n == 0 || n >= PATH_BYTES) {
            fprintf(stderr, "kvq-bench: --peer is \"%s\"; give libraries or folders\n", list);
            return false;
        }
        snprintf(path, sizeof path, "%.*s", n, at);
        bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
        if (!(folder ? add_folder(l, path) : add_file(l, path)))
            return false;
    }
    return true;
}

// ---- Names ----

static void *find(const struct libraries *l, const char *name)
{
    void *symbol = NULL;
    for (uint32_t i = 0; i < l->n && !symbol; i++)
        symbol = dlsym(l->handle[i], name);
    return symbol;
}

static void complain_missing(const char *name, const char *list)
{
    if (strncmp(name, "ggml_backend_cpu_", strlen("ggml_backend_cpu_")) == 0)
        fprintf(
            stderr,
            "kvq-bench: --peer %s has no CPU backend (%s is missing); give libggml-cpu.so, too, "
            "in the same folder or after a comma; " KNOWN "\n",
            list, name);
    else
        fprintf(stderr,
                "kvq-bench: --peer %s lacks %s: no ggml, or a version whose functions are "
                "others; " KNOWN "\n",
                list, name);
}

static bool find_all(struct peer *p, const struct libraries *l, const char *list)
{
    static const struct {
        const char *name;
        size_t offset;
    } functions[] = {
#define X(returns, name, parameters) {#name, offsetof(struct peer, name)},
        PEER_FUNCTIONS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = find(l, functions[i].name);
        if (!symbol) {
            complain_missing(functions[i].name, list);
            return false;
        }
        memcpy((char *)p + functions[i].offset, &symbol, sizeof symbol);
    }
    return true;
}

static bool check_types(const struct peer *p, const char *list)
{
    static const struct {
        int type;
        const char *name;
    } types[] = {{GGML_F32, "f32"},
                 {GGML_F16, "f16"},
                 {GGML_Q4_0, "q4_0"},
                 {GGML_Q8_0, "q8_0"},
                 {GGML_I32, "i32"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const char *name = p->ggml_type_name(types[i].type);
        if (!name || strcmp(name, types[i].name) != 0) {
            fprintf(stderr,
                    "kvq-bench: --peer %s calls its type %d \"%.20s\" where \"%s\" was expected: a "
                    "version that numbers types otherwise; " KNOWN "\n",
                    list, types[i].type, name ? name : "", types[i].name);
            return false;
        }
    }
    return true;
}

// Newer versions say which they are.
static void read_version(struct peer *p, const struct libraries *l)
{
    const char *(*version)(void);
    void *symbol = find(l, "ggml_version");
    snprintf(p->version, sizeof p->version, "ggml");
    if (!symbol)
        return;
    memcpy(&version, &symbol, sizeof version);
    const char *text = version();
    if (text)
        snprintf(p->version, sizeof p->version, "ggml %.40s", text);
}

bool peer_open(struct peer *p, const char *list)
{
    struct libraries l = {.n = 0};
    *p = (struct peer){.backend = NULL};
    if (pthread_getaffinity_np(pthread_self(), sizeof p->cpus, &p->cpus))
        CPU_ZERO(&p->cpus);
    if (!add_all(&l, list) || !find_all(p, &l, list) || !check_types(p, list))
        return false;
    read_version(p, &l);
    peer_enter(p);
    p->backend = p->ggml_backend_cpu_init();
    peer_leave(p);
    if (!p->backend)
        fprintf(stderr, "kvq-bench: --peer %s: ggml_backend_cpu_init fails; " KNOWN "\n", list);
    return p->backend;
}

void peer_close(struct peer *p)
{
    if (p->backend)
        p->ggml_backend_free(p->backend);
    *p = (struct peer){.backend = NULL};
}

// ---- Its calls ----

static const int crashes[] = {SIGABRT, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
enum { CRASHES = sizeof crashes / sizeof *crashes };

// What the caller had before it entered. One thread at a time calls a library.
static struct sigaction handlers[CRASHES];
static cpu_set_t caller_cpus;

static void tell_crash(int number)
{
    static const char text[] =
        "kvq-bench: that was the library of --peer: it crashed or gave up in a call of ours. It "
        "may "
        "be built for another CPU, or be a version whose functions mean something else; " KNOWN
        "\n";
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0)
        _exit(1);
    signal(number, SIG_DFL);
    raise(number);
}

void peer_enter(struct peer *p)
{
    struct sigaction tell = {.sa_handler = tell_crash};
    for (int i = 0; i < CRASHES; i++)
        sigaction(crashes[i], &tell, &handlers[i]);
    pthread_getaffinity_np(pthread_self(), sizeof caller_cpus, &caller_cpus);
    if (CPU_COUNT(&p->cpus))
        pthread_setaffinity_np(pthread_self(), sizeof p->cpus, &p->cpus);
}

void peer_leave(struct peer *p)
{
    if (CPU_COUNT(&p->cpus))
        pthread_setaffinity_np(pthread_self(), sizeof caller_cpus, &caller_cpus);
    for (int i = 0; i < CRASHES; i++)
        sigaction(crashes[i], &handlers[i], NULL);
}
