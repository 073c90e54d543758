// SPDX-License-Identifier: Apache-2.0
//
// A build without a remote tier says so, whatever it is asked.

#include "proto/status.h"
#include "storage/remote.h"
#include "tests/kits/unit.h"

PLAIN_TEST(every_call_says_so)
{
    char text[512] = "";
    struct kvq_remote *remote = (struct kvq_remote *)text;
    struct kvq_remote_options options = {.endpoint = "http://127.0.0.1"};
    struct kvq_remote_pull what = {.space = "s", .name = "n"};
    struct kvq_remote_moved moved;
    assert_false(kvq_remote_built());
    assert_int_equal(kvq_remote_open(&options, &remote, text, sizeof text), KVQ_E_UNSUPPORTED);
    assert_null(remote);
    assert_says(text, "-DKVQ_REMOTE=ON");
    kvq_remote_close(&remote);
    assert_int_equal(kvq_remote_push(NULL, NULL, "f", "s", "n", false, NULL, &moved, NULL, 0),
                     KVQ_E_UNSUPPORTED);
    char *path = text;
    assert_int_equal(
        kvq_remote_fetch(NULL, NULL, "f", &what, NULL, &moved, &path, text, sizeof text),
        KVQ_E_UNSUPPORTED);
    assert_null(path);
    assert_int_equal(kvq_remote_take(NULL, &what, "p", NULL, text, sizeof text), KVQ_E_UNSUPPORTED);
    kvq_remote_sweep("f", NULL, 0, 0);
    assert_int_equal(kvq_remote_pull(NULL, NULL, "f", &what, NULL, &moved, text, sizeof text),
                     KVQ_E_UNSUPPORTED);
}

int main(void)
{
    return run_all(NULL, NULL);
}
