// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl doctor takes from /proc about an engine's OpenMP: texts as Linux gives them, and such
// as nobody should, in directories like /proc.
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "tools/kvqctl/openmp.h"

#define AT    "7f0000000000-7f0000001000 r-xp 00000000 fe:00 1234567      "
#define MEMFD "7f0000002000-7f0000003000 rw-s 00000000 00:01 99                         /memfd:"

static struct kvq__ctl_process mapped(const char *maps)
{
    struct kvq__ctl_process p = {0};
    kvq__ctl_process_maps(&p, maps, strlen(maps));
    return p;
}

static void test_maps(void **state)
{
    static const struct {
        const char *path;
        const char *spins; // NULL: no OpenMP
    } cases[] = {
        {"/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0", "libgomp"},
        {"/a b/torch.libs/libgomp-a34b3233.so.1", "libgomp"},
        {"/opt/intel/libiomp5.so", "libiomp5"},
        {"/usr/lib/llvm-14/lib/libomp.so.5 (deleted)", "libomp"},
        {"/usr/lib/libompl.so.17", NULL}, // plans motions
        {"/usr/lib/libgomp", NULL},
        {"/srv/libgomp.so.1/model.bin", NULL},
        {"[heap]", NULL},
        {"", NULL},
    };
    char line[256];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(line, sizeof line, AT "%s\n" AT "/usr/bin/python3\n", cases[i].path);
        struct kvq__ctl_process p = mapped(line);
        const char *spins = kvq__ctl_process_spins(&p);
        if (!spins != !cases[i].spins || (spins && strcmp(spins, cases[i].spins) != 0))
            fail_msg("%s: %s", cases[i].path, spins ? spins : "no OpenMP");
        assert_false(p.asks || p.attends);
    }
    struct kvq__ctl_process p = mapped(MEMFD "kvq-requests (deleted)\n" AT "/lib/libgomp.so.1");
    assert_true(p.asks && !p.attends && kvq__ctl_process_spins(&p));
    p = mapped(MEMFD "kvq-requests (deleted)\n" MEMFD "kvq-extent (deleted)\n");
    assert_true(p.asks && p.attends && !kvq__ctl_process_spins(&p));
}

// What an environment asks for, `variables` being cut at bars, of the runtimes that are mapped.
static const char *spins(const char *maps, const char *variables)
{
    struct kvq__ctl_process p = mapped(maps);
    char text[256];
    size_t bytes = (size_t)snprintf(text, sizeof text, "%s", variables);
    for (char *bar = text; (bar = strchr(bar, '|'));)
        *bar = 0;
    assert_true(kvq__ctl_process_environ(&p, text, bytes));
    return kvq__ctl_process_spins(&p);
}

static void test_environ(void **state)
{
    static const char gnu[] = AT "/lib/libgomp.so.1\n", llvm[] = AT "/lib/libomp.so.5\n";
    static const char intel[] = AT "/lib/libiomp5.so\n";
    static const char both[] = AT "/lib/libgomp.so.1\n" AT "/lib/libiomp5.so\n";
    static const struct {
        const char *maps, *variables, *spins;
    } cases[] = {
        {gnu, "PATH=/bin|HOME=/", "libgomp"},
        {gnu, "PATH=/bin|OMP_WAIT_POLICY=passive", NULL},
        {gnu, "OMP_WAIT_POLICY= PASSIVE |A=b", NULL},
        {gnu, "OMP_WAIT_POLICY=active", "libgomp"},
        {gnu, "OMP_WAIT_POLICY=passively", "libgomp"},
        {gnu, "MY_OMP_WAIT_POLICY=passive", "libgomp"},
        {gnu, "OMP_WAIT_POLICY=active|OMP_WAIT_POLICY=passive", "libgomp"}, // the first counts
        {gnu, "GOMP_SPINCOUNT=0", NULL},
        {gnu, "GOMP_SPINCOUNT=0k", NULL},
        {gnu, "GOMP_SPINCOUNT=", "libgomp"},
        {gnu, "GOMP_SPINCOUNT=1000", "libgomp"},
        {gnu, "OMP_WAIT_POLICY=passive|GOMP_SPINCOUNT=1000", "libgomp"},
        {gnu, "OMP_WAIT_POLICY=passive|GOMP_SPINCOUNT=infinity", "libgomp"},
        {gnu, "OMP_WAIT_POLICY=passive|GOMP_SPINCOUNT=few", NULL},
        {gnu, "KMP_BLOCKTIME=0", "libgomp"}, // another runtime's
        {intel, "KMP_BLOCKTIME=0", NULL},
        {intel, "GOMP_SPINCOUNT=0", "libiomp5"},
        {llvm, "KMP_BLOCKTIME=0ms", NULL},
        {llvm, "KMP_BLOCKTIME=200", "libomp"},
        {llvm, "OMP_WAIT_POLICY=passive", NULL},
        {llvm, "OMP_WAIT_POLICY=passive|KMP_BLOCKTIME=infinite", "libomp"},
        {both, "GOMP_SPINCOUNT=0", "libiomp5"},
        {both, "GOMP_SPINCOUNT=0|KMP_BLOCKTIME=0", NULL},
        {"", "PATH=/bin", NULL},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *got = spins(cases[i].maps, cases[i].variables), *want = cases[i].spins;
        if (!got != !want || (got && strcmp(got, want) != 0))
            fail_msg("%s: %s", cases[i].variables, got ? got : "passive");
    }
}

// Bytes of others: no variables, names without values, no NUL at the end, numbers of any length.
static void test_foreign_bytes(void **state)
{
    struct kvq__ctl_process p = {.threads = 9};
    char bytes[513];
    (void)state;
    memset(bytes, 0, sizeof bytes);
    assert_false(kvq__ctl_process_environ(&p, bytes, sizeof bytes - 1)); // written over by a title
    assert_false(kvq__ctl_process_environ(&p, bytes, 0));
    assert_false(kvq__ctl_process_environ(&p, "VLLM::EngineCore", 16));
    assert_false(kvq__ctl_process_environ(&p, "=passive", 8));
    assert_true(kvq__ctl_process_environ(&p, "OMP_NUM_THREADS=4,2", 19));
    assert_int_equal(kvq__ctl_process_team(&p, 64), 4);
    static const char many[] = "OMP_NUM_THREADS=99999999999999999999999999";
    assert_true(kvq__ctl_process_environ(&p, many, sizeof many - 1));
    assert_int_equal(kvq__ctl_process_team(&p, 2), 9);
    assert_true(kvq__ctl_process_environ(&p, "OMP_NUM_THREADS=-3", 18));
    assert_int_equal(kvq__ctl_process_team(&p, 2), 2);
    for (unsigned seed = 1; seed < 2000; seed++) {
        for (size_t i = 0; i < sizeof bytes - 1; i++)
            bytes[i] = (char)(seed * 2654435761u * (unsigned)(i + 1) >> 13);
        bytes[seed % 512] = seed & 1 ? '\n' : '/';
        kvq__ctl_process_maps(&p, bytes, sizeof bytes - 1);
        kvq__ctl_process_environ(&p, bytes, sizeof bytes - 1);
        kvq__ctl_process_status(&p, bytes);
    }
    kvq__ctl_process_status(&p, "Name:\tx\nThreads:\t17\nSigQ:\t0/1\n");
    assert_int_equal(p.threads, 17);
    kvq__ctl_process_status(&p, "Name:\tThreads: 4\n");
    assert_int_equal(p.threads, 0);
}

// ---- A directory like /proc ----

static char proc[64];

static void put(const char *name, const char *text, size_t bytes)
{
    char path[128];
    snprintf(path, sizeof path, "%s/77/%s", proc, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

static int make_proc(void **state)
{
    char path[80];
    (void)state;
    snprintf(proc, sizeof proc, "/tmp/kvqctl-proc-XXXXXX");
    if (!mkdtemp(proc))
        return -1;
    snprintf(path, sizeof path, "%s/77", proc);
    return mkdir(path, 0700);
}

static int remove_proc(void **state)
{
    static const char *const names[] = {"/77/maps", "/77/environ", "/77/status", "/77", ""};
    char path[128];
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s%s", proc, names[i]);
        remove(path);
    }
    return 0;
}

// Lines that lie over the end of a piece, at each of their bytes, and a text without any end.
static void test_long_maps(void **state)
{
    static const char last[] = MEMFD "kvq-requests (deleted)\n" AT "/lib/libgomp.so.1\n";
    enum { PIECE = 64 * 1024, LINE = 64, LAST = sizeof last - 1, BYTES = 3 * PIECE };
    char *maps = malloc(BYTES);
    struct kvq__ctl_process p;
    (void)state;
    assert_non_null(maps);
    put_text("status", "Name:\tpython3\nThreads:\t3\n");
    put_text("environ", "PATH=/bin");
    for (size_t back = 0; back <= LAST; back++) {
        size_t before = 2 * PIECE - back;
        for (size_t i = 0; i < before; i++)
            maps[i] = (before - i) % LINE == 1 ? '\n' : '/';
        memcpy(maps + before, last, LAST);
        put("maps", maps, before + LAST);
        assert_int_equal(kvq__ctl_process_read(&p, proc, 77), 0);
        assert_true(p.asks && p.threads == 3);
        assert_string_equal(kvq__ctl_process_spins(&p), "libgomp");
    }
    memset(maps, 'x', BYTES);
    put("maps", maps, BYTES);
    assert_int_equal(kvq__ctl_process_read(&p, proc, 77), 0);
    assert_false(p.asks);
    free(maps);
}

// What cannot be read is said, and no more is read than there is room for.
static void test_refused(void **state)
{
    enum { BYTES = 34 * 1024 * 1024 };
    struct kvq__ctl_process p;
    char *much = calloc(1, BYTES);
    (void)state;
    assert_non_null(much);
    assert_int_equal(kvq__ctl_process_read(&p, proc, 78), -ENOENT);
    put_text("status", "Name:\tpython3\nThreads:\t3\n");
    assert_int_equal(kvq__ctl_process_read(&p, proc, 77), -ENOENT);
    put("environ", much, 4096);
    put_text("maps", MEMFD "kvq-requests\n");
    assert_int_equal(kvq__ctl_process_read(&p, proc, 77), -ENODATA);
    memset(much, '=', BYTES);
    put("environ", much, 2 << 20);
    assert_int_equal(kvq__ctl_process_read(&p, proc, 77), -E2BIG);
    put_text("environ", "PATH=/bin");
    put("maps", much, BYTES);
    assert_int_equal(kvq__ctl_process_read(&p, proc, 77), -E2BIG);
    free(much);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_maps),
        cmocka_unit_test(test_environ),
        cmocka_unit_test(test_foreign_bytes),
        cmocka_unit_test_setup_teardown(test_long_maps, make_proc, remove_proc),
        cmocka_unit_test_setup_teardown(test_refused, make_proc, remove_proc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
