// SPDX-License-Identifier: Apache-2.0
//
// Where clients look for the daemon, by what they were told and by what lies there.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/runtime_dir.h"
#include "tests/kits/unit.h"

static char home[64], user[80], service[80], user_run[96];

static int setup(void **state)
{
    snprintf(home, sizeof home, "/tmp/kvq-where-XXXXXX");
    assert_non_null(mkdtemp(home));
    snprintf(user, sizeof user, "%s/user", home);
    snprintf(user_run, sizeof user_run, "%s/kvqd", user);
    snprintf(service, sizeof service, "%s/service", home);
    assert_int_equal(mkdir(user, 0700) | mkdir(user_run, 0700) | mkdir(service, 0700), 0);
    unsetenv("KVQ_RUNTIME_DIR");
    setenv("XDG_RUNTIME_DIR", user, 1);
    return 0;
}

static void path_of(char path[108], const char *dir)
{
    snprintf(path, 108, "%s/attach.sock", dir);
}

static int teardown(void **state)
{
    char path[108];
    const char *const all[] = {user_run, user, service, home};
    for (int i = 0; i < 4; i++) {
        path_of(path, all[i]);
        unlink(path);
        rmdir(all[i]);
    }
    return access(home, F_OK) == 0;
}

// A socket as a daemon leaves it, of one that runs or of one that was killed.
static void put_socket(const char *dir)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    path_of(address.sun_path, dir);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
}

static void expect(const char *given, const char *want)
{
    char path[128];
    assert_int_equal(kvq_runtime_dir(given, service, path, sizeof path), strlen(want));
    assert_string_equal(path, want);
}

TEST(test_what_is_told_comes_first)
{
    put_socket(service);
    setenv("KVQ_RUNTIME_DIR", "/told", 1);
    expect(NULL, "/told");
    expect("/given", "/given");
    setenv("KVQ_RUNTIME_DIR", "", 1); // as if it were not set
    expect(NULL, service);
}

TEST(test_the_service_is_found_from_a_login)
{
    expect(NULL, user_run); // neither has a daemon
    put_socket(service);
    expect(NULL, service);
    put_socket(user_run); // the user's own comes first
    expect(NULL, user_run);
}

TEST(test_a_file_is_no_socket)
{
    char path[108];
    path_of(path, service);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    expect(NULL, user_run);
}

TEST(test_without_a_login)
{
    unsetenv("XDG_RUNTIME_DIR");
    expect(NULL, service);
    setenv("XDG_RUNTIME_DIR", "", 1);
    expect(NULL, service);
}

TEST(test_a_long_path_is_told)
{
    char path[8];
    put_socket(service);
    assert_true(kvq_runtime_dir(NULL, service, path, sizeof path) >= (int)sizeof path);
}

int main(void)
{
    return run_all(NULL, NULL);
}
