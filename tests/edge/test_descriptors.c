// SPDX-License-Identifier: Apache-2.0
//
// Shares of users, and counting descriptors.
#include <fcntl.h>
#include <unistd.h>

#include "daemon/runtime/descriptors.h"
#include "tests/kits/unit.h"

enum { USERS = 6 };
#define MOST 4096ull

// Users who take all they can get, in turn or one after the other: whoever comes next gets some.
PLAIN_TEST(test_shares)
{
    for (int in_turn = 0; in_turn < 2; in_turn++) {
        uint64_t own[USERS] = {0}, used = 0;
        bool more = true;
        for (int user = 0; user < USERS && !in_turn; user++)
            for (; kvq__share_allows(own[user], 1, used, MOST); used++)
                own[user]++;
        while (in_turn && more) {
            more = false;
            for (int user = 0; user < USERS; user++)
                if (kvq__share_allows(own[user], 1, used, MOST)) {
                    own[user]++;
                    used++;
                    more = true;
                }
        }
        if (!in_turn)
            assert_int_equal(own[0], MOST / 2);
        for (int user = 0; user < USERS; user++)
            assert_int_equal(own[user], in_turn ? MOST / (USERS + 1) : MOST >> (user + 1));
        assert_true(kvq__share_allows(0, 1, used, MOST));
    }
    assert_false(kvq__share_allows(0, 1, MOST, MOST));
    assert_false(kvq__share_allows(0, 1, MOST + 1, MOST));
    assert_true(kvq__share_allows(0, 2, 0, 4));
    assert_false(kvq__share_allows(0, 3, 0, 4));
}

PLAIN_TEST(test_counting)
{
    int fds[8];
    uint32_t before = kvq__descriptors_free();
    assert_true(before > 0 && before < kvq__descriptors_limit());
    for (int i = 0; i < 8; i++)
        fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_int_equal(kvq__descriptors_free(), before - 8);
    for (int i = 0; i < 8; i++)
        close(fds[i]);
    assert_int_equal(kvq__descriptors_free(), before);
    assert_true(kvq__descriptors_kept() >= KVQ__FILES_KEPT_LEAST);
    assert_true(kvq__descriptors_kept() <= KVQ__FILES_KEPT_MOST);
}

int main(void)
{
    return run_all(NULL, NULL);
}
