// SPDX-License-Identifier: Apache-2.0
//
// See daemon_kit.h.
#include "tests/kits/daemon_kit.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/kits/unit.h"

enum { MAX_FLAGS = 32 };

void fine(int code)
{
    if (code)
        fail_msg("%d: %s", code, kvq_error_text());
}

void refused(int code, int got, const char *words)
{
    if (got != code)
        fail_msg("%d and not %d: %s", got, code, kvq_error_text());
    if (!strstr(kvq_error_text(), words))
        fail_msg("\"%s\" does not say \"%s\"", kvq_error_text(), words);
}

void daemon_prepare(struct daemon *d)
{
    snprintf(d->directory, sizeof d->directory, "/tmp/kvq-test-XXXXXX");
    if (!mkdtemp(d->directory)) {
        perror(d->directory);
        exit(1);
    }
}

int daemon_cleanup(const struct daemon *d)
{
    char path[128];
    snprintf(path, sizeof path, "%s/kvqd.lock", d->directory);
    unlink(path);
    if (rmdir(d->directory) == 0)
        return 0;
    perror(d->directory);
    return 1;
}

// In the new process.
static void become(const struct daemon *d, int ready)
{
    char path[256], number[16];
    const char *bin = getenv("KVQ_BIN_DIR");
    const char *arguments[MAX_FLAGS] = {"kvqd",  "--runtime-dir", d->directory, "--log-level",
                                        "error", "--ready-fd",    number};
    size_t n = 7;
    for (size_t i = 0; d->flags[i]; i++) {
        if (n + 1 == MAX_FLAGS)
            abort();
        arguments[n++] = d->flags[i];
    }
    snprintf(path, sizeof path, "%s/kvqd", bin ? bin : "bin");
    snprintf(number, sizeof number, "%d", ready);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(ready, F_SETFD, 0);
    if (d->before)
        d->before();
    execv(path, (char *const *)arguments);
    fprintf(stderr, "cannot start %s\n", path);
    _exit(127);
}

void daemon_start(struct daemon *d)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    d->pid = fork();
    if (d->pid == 0)
        become(d, ready[1]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

void daemon_end(struct daemon *d, int signal)
{
    int status;
    kill(d->pid, signal);
    waitpid(d->pid, &status, 0);
    d->pid = 0;
    if (signal == SIGTERM)
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
