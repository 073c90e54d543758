// SPDX-License-Identifier: Apache-2.0
//
// kvq-run: a small real engine whose KV cache and attention are wholly in kvqd.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "client/kvq.h"
#include "tools/kvq-run/commands.h"
#include "tools/kvq-run/options.h"

// One BLAS thread: the daemon has the other cores.
extern void openblas_set_num_threads(int n);

atomic_bool run_interrupted;

static void on_signal(int number)
{
    (void)number;
    atomic_store(&run_interrupted, true);
}

double run_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int run(int argc, char **argv, struct problem *p)
{
    struct options o;
    if (options_parse(argc, argv, &o, p))
        return -1;
    switch (o.command) {
    case COMMAND_GENERATE:
        return run_generate(&o, p);
    case COMMAND_PERPLEXITY:
        return run_perplexity(&o, p);
    case COMMAND_LOGITS:
        return run_logits(&o, p);
    case COMMAND_VERSION:
        printf("kvq-run %s\n", kvq_version());
        return 0;
    default:
        return 0;
    }
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    openblas_set_num_threads(1);
    struct problem p = {0};
    if (run(argc, argv, &p)) {
        fflush(stdout);
        fprintf(stderr, "kvq-run: %s\n", p.text);
        return p.exit_code ? p.exit_code : RUN_FAILED;
    }
    return fflush(stdout) ? RUN_FAILED : RUN_OK;
}
