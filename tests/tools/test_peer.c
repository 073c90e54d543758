// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench attend --peer against libraries that are made for this (fake_ggml.c): what it loads,
// what it hands over, what it prints, and what it says when something is missing or wrong.
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

enum { MAX_TEXT = 1 << 17, MAX_ARGS = 32, PEERS = 6 };

static char folder[] = "/tmp/kvq-test-peer-XXXXXX";
static char out[MAX_TEXT], err[MAX_TEXT], called[MAX_TEXT]; // of the last run

static const char *inside(const char *name)
{
    static char path[4][64];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

static void read_all(const char *name, char text[MAX_TEXT])
{
    FILE *f = fopen(inside(name), "r");
    size_t n = f ? fread(text, 1, MAX_TEXT - 1, f) : 0;
    text[n] = '\0';
    if (f)
        fclose(f);
}

static void redirect(const char *name, int to)
{
    int fd = open(inside(name), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    if (fd < 0 || dup2(fd, to) < 0)
        _exit(99);
    close(fd);
}

// Runs kvq-bench with the words and leaves what it printed. Returns its exit status, or minus the
// signal that ended it.
static int run(const char *wrong, const char *peer, const char *words)
{
    char program[512], text[512], *args[MAX_ARGS] = {program, (char *)"attend"};
    int n = 2, status;
    const char *bin = getenv("KVQ_BIN_DIR");
    snprintf(program, sizeof program, "%s/kvq-bench", bin ? bin : "bin");
    if (strncmp(words, "pack ", 5) == 0)
        args[1] = (char *)"pack";
    snprintf(text, sizeof text, "%s", strncmp(words, "pack ", 5) == 0 ? words + 5 : words);
    for (char *rest, *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        args[n++] = word;
    if (peer) {
        args[n++] = (char *)"--peer";
        args[n++] = (char *)peer;
    }
    unlink(inside("log"));
    pid_t child = fork();
    if (child == 0) {
        redirect("out", STDOUT_FILENO);
        redirect("err", STDERR_FILENO);
        setenv("FAKE_GGML", wrong, 1);
        setenv("FAKE_GGML_LOG", inside("log"), 1);
        execv(program, args);
        _exit(98);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    read_all("out", out);
    read_all("err", err);
    read_all("log", called);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void assert_says(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("\"%s\" is not in:\n%s", part, text);
}

// The portable functions are slow enough that no row can outrun the floor.
#define SMALL " --isa c --tokens 130 --q-heads 4 --kv-heads 2 --head-dim 64 --reps 1 --walk 1"

static const char *one(void)
{
    return FAKES "/one/libggml.so";
}

// ---- What comes out ----

static double number(const cJSON *row, const char *name)
{
    const cJSON *item = cJSON_GetObjectItem(row, name);
    if (!cJSON_IsNumber(item))
        fail_msg("%s is no number", name);
    return item->valuedouble;
}

static const char *string(const cJSON *row, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(row, name));
    return text ? text : "";
}

static const cJSON *find(const cJSON *rows, const char *format, const char *path)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, rows) if (strcmp(string(row, "format"), format) == 0 &&
                                      strcmp(string(row, "path"), path) == 0) return row;
    return NULL;
}

static void check_peer_row(const cJSON *rows, const char *format, const char *path, double bits)
{
    const cJSON *row = find(rows, format, path);
    if (!row)
        fail_msg("no row %s %s in %s", format, path, out);
    assert_string_equal(string(row, "isa"), "peer");
    assert_true(number(row, "us") > 0);
    assert_true(number(row, "rel_err") >= 0 && number(row, "rel_err") < 1e-5);
    assert_true(fabs(number(row, "bits_per_value") - bits) < 1e-9);
    assert_true(fabs(number(row, "bytes_per_token_head") - bits / 8 * 2 * 64) < 1e-9);
}

// The six caches are there and right, and each row of ours is compared with all six.
static void rows_of_a_peer(void **state)
{
    (void)state;
    assert_int_equal(run("", one(), "--format f16,oscar2 --path exact --threads 1 --json" SMALL),
                     0);
    cJSON *rows = cJSON_Parse(out);
    assert_int_equal(cJSON_GetArraySize(rows), PEERS + 2);
    for (int i = 0; i < 2; i++) {
        check_peer_row(rows, "ggml-f16", i ? "tokens" : "heads", 16);
        check_peer_row(rows, "ggml-q8_0", i ? "tokens" : "heads", 16);
        check_peer_row(rows, "ggml-q4_0", i ? "tokens" : "heads", 32);
        const cJSON *ours = find(rows, i ? "f16" : "oscar2", "exact");
        const cJSON *item, *all = cJSON_GetObjectItem(ours, "vs_peers");
        assert_string_equal(string(ours, "peer"), "ggml 9.8.7-fake");
        assert_int_equal(cJSON_GetArraySize(all), PEERS);
        cJSON_ArrayForEach(item, all) assert_true(item->valuedouble > 0);
        assert_true(number(all, "ggml-f16 heads") == number(ours, "vs_peer"));
    }
    cJSON_Delete(rows);
}

// Outliers and factors are there, and attention over them is that in double precision; what is
// packed is not what its outliers were learned from, so that some tokens of it become outliers.
static void formats_with_extras(void **state)
{
    (void)state;
    assert_int_equal(run("", NULL,
                         "--format f16,ott2,ott2-oscar,innerq-hybrid --path exact --threads 1 "
                         "--json" SMALL),
                     0);
    cJSON *rows = cJSON_Parse(out);
    static const char *const names[] = {"f16", "innerq-hybrid", "ott2", "ott2-oscar"};
    static const double outliers[] = {0, 0, 35, 37};
    for (int i = 0; i < 4; i++) {
        const cJSON *row = find(rows, names[i], "exact");
        assert_non_null(row);
        if (!(number(row, "rel_err") < 1e-5) || number(row, "outliers") != outliers[i])
            fail_msg("%s: error %g, %g outliers", names[i], number(row, "rel_err"),
                     number(row, "outliers"));
    }
    cJSON_Delete(rows);
    assert_int_equal(run("", NULL,
                         "pack --format ott2 --threads 1 --json --isa c --q-heads 1 --kv-heads 1 "
                         "--head-dim 64 --reps 2"),
                     0);
    rows = cJSON_Parse(out);
    double entered = number(cJSON_GetArrayItem(rows, 0), "outliers");
    if (!(entered > 1.2 && entered < 1.8)) // of two blocks' six best 1.5 are the second's
        fail_msg("%g tokens of a block become outliers", entered);
    cJSON_Delete(rows);
}

// Heads that are stored with zeros behind: the rows are the engine's, and the bits are those of the
// engine's values. What cannot be compared with a peer, or packed, is refused.
static void narrow_heads(void **state)
{
    (void)state;
    static const char narrow[] = "--format f16,kvq2 --path exact --threads 1 --json --isa c "
                                 "--tokens 130 --q-heads 4 --kv-heads 2 --head-dim 96 --reps 1 "
                                 "--walk 1";
    assert_int_equal(run("", NULL, narrow), 0);
    cJSON *rows = cJSON_Parse(out);
    const cJSON *row = find(rows, "f16", "exact"), *packed = find(rows, "kvq2", "exact");
    assert_true(number(row, "head_dim") == 96 && number(row, "rel_err") < 1e-5);
    assert_true(fabs(number(row, "bits_per_value") - 16 * 128 / 96.0) < 1e-9);
    assert_true(number(packed, "rel_err") > 0 && number(packed, "rel_err") < 1e-5);
    assert_true(fabs(number(packed, "bits_per_value") - 2.75 * 128 / 96) < 1e-9);
    cJSON_Delete(rows);
    assert_int_equal(run("", one(), narrow), 2);
    assert_says(err, "--head-dim 96: pack and --peer are for heads without zeros behind them");
    assert_int_equal(run("", NULL, "pack --head-dim 96"), 2);
    assert_says(err, "give 64, 128 or 256");
}

static int lines_with(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part))
        n++;
    return n;
}

// The library was told to end, and had everything back by then.
static void assert_given_back(void)
{
    static const char last[] = "0 live\n";
    size_t n = strlen(called), m = strlen(last);
    assert_true(n >= m && strcmp(called + n - m, last) == 0 &&
                (n == m || called[n - m - 1] == '\n'));
}

// Types in both layouts, on the threads asked for, with the threads' CPUs free although ours are
// pinned, and everything given back.
static void what_is_called(void **state)
{
    char cpus[64];
    cpu_set_t set;
    (void)state;
    sched_getaffinity(0, sizeof set, &set);
    snprintf(cpus, sizeof cpus, "compute 2 threads, %d cpus\n", CPU_COUNT(&set));
    assert_int_equal(run("", one(), "--format oscar2 --path exact --threads 2" SMALL), 0);
    int layers = lines_with(called, "flash f16 heads\n");
    assert_true(layers > 1);
    assert_int_equal(lines_with(called, "flash f16 tokens\n"), layers);
    assert_true(lines_with(called, "flash q8_0 tokens\n") > 0);
    assert_true(lines_with(called, "flash q4_0 tokens\n") > 0);
    assert_true(lines_with(called, cpus) > 0);
    assert_int_equal(lines_with(called, " cpus\n"), lines_with(called, cpus));
    assert_given_back();
    assert_says(out, "peer: ggml 9.8.7-fake\n");
    assert_says(out, "times as fast as ");
    assert_says(out, "\noscar2 exact ");
}

static void no_peer(void **state)
{
    (void)state;
    assert_int_equal(run("", NULL, "--format f16 --path exact --threads 1" SMALL), 0);
    assert_says(out, "vs peer");
    assert_says(out, " no peer ");
    assert_says(out, "no peer: --peer LIB times a ggml library beside us; "
                     "docs/benchmarks/peers.md says how to build one");
    assert_int_equal(run("", NULL, "--format f16 --path exact --threads 1 --json" SMALL), 0);
    assert_says(out, "no peer: --peer LIB");
    cJSON *rows = cJSON_Parse(out);
    assert_true(cJSON_IsNull(cJSON_GetObjectItem(cJSON_GetArrayItem(rows, 0), "vs_peer")));
    cJSON_Delete(rows);
}

// ---- What is loaded ----

// With a backend that cannot start, a run ends where everything else has been found.
static void split_libraries(void **state)
{
    static const char *const ways[] = {
        FAKES "/split",
        FAKES "/split/libggml-base.so",
        FAKES "/split/libggml-cpu.so",
        FAKES "/base/libggml-base.so," FAKES "/split/libggml-cpu.so",
        FAKES "/one",
    };
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        assert_int_equal(run("null", ways[i], SMALL), 1);
        assert_says(err, "ggml_backend_cpu_init fails");
        assert_string_equal(out, "");
    }
}

static void cannot_be_loaded(void **state)
{
    static const struct {
        const char *wrong, *peer, *text;
    } cases[] = {
        {"", "/nowhere/libggml.so", "cannot load /nowhere/libggml.so"},
        {"", "", "give libraries or folders"},
        {"", FAKES "/base", "has no CPU backend (ggml_backend_cpu_init is missing)"},
        {"", FAKES "/base", "libggml-cpu.so"},
        {"", FAKES "/no_flash", "lacks ggml_flash_attn_ext"},
        {"", FAKES "/no_flash", "are known to work"},
        {"", "libc.so.6", "lacks ggml_init"},
        {"types", FAKES "/one", "calls its type 8 \"q7_7\" where \"q8_0\" was expected"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(run(cases[i].wrong, cases[i].peer, SMALL), 1);
        assert_says(err, cases[i].text);
        assert_string_equal(out, "");
    }
    assert_int_equal(run("", folder, SMALL), 1);
    assert_says(err, "no ggml library in this folder");
    assert_int_equal(run("", inside("err"), SMALL), 1); // a text
    assert_says(err, "cannot load");
}

// ---- What goes wrong later ----

// The run fails and says why; our rows come all the same, with nothing claimed against a peer that
// was not timed.
static void refused(const char *wrong, const char *text, int rows_left)
{
    assert_int_equal(run(wrong, one(), "--format f16 --path exact --threads 1 --json" SMALL), 1);
    assert_says(err, text);
    cJSON *rows = cJSON_Parse(out);
    assert_int_equal(cJSON_GetArraySize(rows), rows_left + 1);
    const cJSON *ours = find(rows, "f16", "exact");
    const cJSON *q4 = cJSON_GetObjectItem(cJSON_GetObjectItem(ours, "vs_peers"), "ggml-q4_0 heads");
    assert_non_null(q4);
    assert_true(cJSON_IsNull(q4));
    assert_int_equal(cJSON_IsNull(cJSON_GetObjectItem(ours, "vs_peer")), rows_left == 0);
    cJSON_Delete(rows);
    assert_given_back();
}

static void wrong_results(void **state)
{
    (void)state;
    refused("garbage", "ggml-f16 heads is off by 100%", 0);
    refused("head", "ggml-q8_0 tokens is off by", 0);
}

static void errors_of_the_library(void **state)
{
    (void)state;
    refused("compute", "ggml_backend_graph_compute returns -1", 0);
    refused("unsupported", "ggml-q4_0 tokens: the library has no flash attention", 4);
    refused("rows", "rows have a size that cannot be", 0);
    refused("quantize", "does not convert to this type", 0);
    refused("memory", "no memory for queries and outputs", 0);
}

static void crash(void **state)
{
    (void)state;
    assert_true(run("crash", one(), "--format f16 --path exact --threads 1" SMALL) < 0);
    assert_says(err, "that was the library of --peer");
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(inside("out"));
    unlink(inside("err"));
    unlink(inside("log"));
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cannot_be_loaded),
        cmocka_unit_test(split_libraries),
        cmocka_unit_test(no_peer),
        cmocka_unit_test(rows_of_a_peer),
        cmocka_unit_test(formats_with_extras),
        cmocka_unit_test(narrow_heads),
        cmocka_unit_test(what_is_called),
        cmocka_unit_test(wrong_results),
        cmocka_unit_test(errors_of_the_library),
        cmocka_unit_test(crash),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
