// SPDX-License-Identifier: Apache-2.0
//
// What tests with the scripted daemon share.
#include "tests/client/client_kit.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

char client_dir[] = "/tmp/kvq-test-XXXXXX";

void client_prepare(void)
{
    if (!mkdtemp(client_dir))
        abort();
}

void client_cleanup(void)
{
    rmdir(client_dir);
}

int client_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

int connect_to(struct fake_script script, uint32_t timeout_ms, struct fake_daemon **daemon,
               kvq_client **client)
{
    struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = client_dir, .timeout_ms = timeout_ms};
    *daemon = fake_start(client_dir, &script);
    return kvq_connect(&options, client);
}

void expect_text(const char *part)
{
    if (!strstr(kvq_error_text(), part))
        fail_msg("\"%s\" lacks \"%s\"", kvq_error_text(), part);
}
