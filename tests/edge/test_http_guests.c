// SPDX-License-Identifier: Apache-2.0
//
// Guests of HTTP: who gets in when places or descriptors are taken, and who goes, by times that the
// test makes up.
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/http/internal.h"
#include "daemon/runtime/descriptors.h"
#include "tests/kits/unit.h"

enum { SECOND = 1000000000 };

static const uint64_t start = 1000ull * SECOND;
static struct kvq__http_guests guests;
static char text[KVQ_TEXT_BYTES];

static struct kvq__http_guest *add(bool local, uint32_t uid, uint64_t since_ns, bool asking)
{
    struct kvq__http_guest *guest = calloc(1, sizeof *guest);
    int pair[2];
    assert_non_null(guest);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    close(pair[1]);
    guest->fd = pair[0];
    guest->local = local;
    guest->peer.uid = uid;
    guest->since_ns = since_ns;
    guest->asking = asking;
    LIST_INSERT_HEAD(&guests, guest, link);
    return guest;
}

static void leave(struct kvq__http_guest *guest)
{
    close(guest->fd);
    kvq__http_guest_leave(&guests, guest);
}

static int teardown(void **state)
{
    while (!LIST_EMPTY(&guests))
        leave(LIST_FIRST(&guests));
    return 0;
}

static int check(bool local, uint32_t uid, enum kvq__role role, uint64_t now_ns)
{
    const struct kvq__http_guest guest = {.local = local, .peer.uid = uid};
    text[0] = 0;
    return kvq__http_guest_check(&guests, &guest, role, now_ns, text);
}

static uint32_t n_ending(void)
{
    const struct kvq__http_guest *guest;
    uint32_t n = 0;
    LIST_FOREACH (guest, &guests, link)
        n += guest->ending;
    return n;
}

// ---- Tests ----

// Of strangers who fill all places, the one goes who has been without a whole request for longest.
TEST_BETWEEN(test_displaced, NULL, teardown)
{
    struct kvq__http_guest *slow[KVQ__HTTP_MOST];
    for (uint32_t i = 0; i < KVQ__HTTP_MOST; i++) {
        assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + i), 0);
        slow[i] = add(false, 0, start + i, i < 2);
    }
    struct kvq__http_guest *local = add(true, 7, start - SECOND, false);
    assert_int_equal(n_ending(), 0);
    for (uint32_t i = 2; i < KVQ__HTTP_MOST; i++) {
        assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + SECOND), 0);
        assert_true(slow[i]->ending);
        assert_int_equal(n_ending(), i - 1);
        add(false, 0, start + SECOND, true); // who came instead
    }
    // All have a request under way: nobody goes before some take too long to read an answer.
    assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + 10ull * SECOND - 1), KVQ_E_LIMIT);
    assert_says(text, "all 32 connections have a request under way");
    assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + 10ull * SECOND), 0);
    assert_true(slow[0]->ending && !slow[1]->ending);
    assert_false(local->ending);
}

// Users of the Unix socket have shares, and none displaces another; an administrator has all.
TEST_BETWEEN(test_shares, NULL, teardown)
{
    for (uint32_t i = 0; i < KVQ__HTTP_MOST / 2; i++) {
        assert_int_equal(check(true, 7, KVQ__ROLE_NONE, start), 0);
        add(true, 7, start, false);
    }
    assert_int_equal(check(true, 7, KVQ__ROLE_NONE, start + 60ull * SECOND), KVQ_E_LIMIT);
    assert_says(text, "user 7 has 16 of the 32 connections");
    assert_int_equal(check(true, 8, KVQ__ROLE_NONE, start), 0);
    assert_int_equal(check(true, 7, KVQ__ROLE_ADMIN, start), 0);
    assert_int_equal(n_ending(), 0);
}

// However slowly it drips, a request has to be whole in time; an answer may take longer.
TEST_BETWEEN(test_late, NULL, teardown)
{
    struct kvq__http_guest *slow = add(false, 0, start, false);
    struct kvq__http_guest *fresh = add(true, 7, start + 1, false);
    struct kvq__http_guest *reader = add(false, 0, start, true);
    kvq__http_guests_tick(&guests, start + 10ull * SECOND - 1);
    assert_int_equal(n_ending(), 0);
    kvq__http_guests_tick(&guests, start + 10ull * SECOND);
    assert_true(slow->ending && !fresh->ending && !reader->ending);
    char byte;
    assert_int_equal(read(slow->fd, &byte, 1), 0); // its end, as libmicrohttpd sees it
    kvq__http_guests_tick(&guests, start + 11ull * SECOND);
    assert_int_equal(n_ending(), 2);
    assert_false(reader->ending);
}

// So many descriptors are free.
static void leave_free(uint32_t n)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = kvq__descriptors_limit() - kvq__descriptors_free() + n;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(kvq__descriptors_free(), n);
}

// Where engines have taken all that they may, monitors still get a few, and what is said is true.
TEST_BETWEEN(test_descriptors, NULL, teardown)
{
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (uint32_t i = 0; i < KVQ__HTTP_RESERVED; i++) {
        leave_free(20);
        assert_true(kvq__descriptors_free() <= kvq__descriptors_kept());
        assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start), 0);
        assert_int_equal(check(true, 7, KVQ__ROLE_ADMIN, start), 0);
        add(false, 0, start + i, true);
        add(true, 7, start, true);
    }
    leave_free(20);
    assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + 9), KVQ_E_LIMIT);
    assert_says(text, "kvqd has 20 of ");
    assert_int_equal(check(true, 7, KVQ__ROLE_ADMIN, start), KVQ_E_LIMIT);
    struct kvq__http_guest *silent = add(false, 0, start + 9, false);
    assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + 9), 0);
    assert_true(silent->ending);
    leave(silent);
    leave_free(KVQ__FILES_SPARE - 1);
    assert_int_equal(check(false, 0, KVQ__ROLE_NONE, start + 60ull * SECOND), KVQ_E_LIMIT);
    assert_says(text, "raise its LimitNOFILE=");
    assert_int_equal(n_ending(), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// libmicrohttpd may have told already that a connection is closed which it then refuses.
TEST_BETWEEN(test_leaves_twice, NULL, teardown)
{
    struct kvq__http_guest *guest = add(false, 0, start, false), *other;
    other = add(false, 0, start, false);
    leave(guest);
    kvq__http_guest_leave(&guests, guest);
    assert_ptr_equal(LIST_FIRST(&guests), other);
    assert_null(LIST_NEXT(other, link));
}

int main(void)
{
    return run_all(NULL, NULL);
}
