// SPDX-License-Identifier: Apache-2.0
//
// Which thread unmaps what clients had: the loop's, which all of them wait for, does so only where
// it takes next to no time.

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>

#include "proto/status.h"
#include "tests/edge/attach_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, LARGE = 5 * MIB, SMALL = 64 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int on_loop[2], elsewhere[2]; // how often each size was unmapped: small, large
static bool holds;                   // the next large one, unless the loop's thread unmaps it
static pthread_t loop;
static sem_t begun, goes_on;

int __real_munmap(void *at, size_t bytes);
int __wrap_munmap(void *at, size_t bytes);

int __wrap_munmap(void *at, size_t bytes)
{
    bool large = bytes == LARGE, here = pthread_equal(pthread_self(), loop);
    if (!large && bytes != SMALL)
        return __real_munmap(at, bytes);
    pthread_mutex_lock(&lock);
    bool held = large && holds;
    ++*(here ? &on_loop[large] : &elsewhere[large]);
    holds = holds && !held;
    pthread_mutex_unlock(&lock);
    if (held)
        sem_post(&begun);
    if (held && !here)
        sem_wait(&goes_on);
    return __real_munmap(at, bytes);
}

static int start(void **state)
{
    int rc = attach_start_counting(state);
    sem_init(&begun, 0, 0);
    sem_init(&goes_on, 0, 0);
    loop = attach_loop_thread();
    for (int i = 0; i < 2; i++)
        on_loop[i] = elsewhere[i] = 0;
    return rc;
}

static int stop(void **state)
{
    sem_post(&goes_on); // after a test that failed in between
    return attach_stop_counting(state);
}

static void unmapped(int small_on_loop, int large_elsewhere)
{
    pthread_mutex_lock(&lock);
    int seen[] = {on_loop[0], elsewhere[0], on_loop[1], elsewhere[1]};
    pthread_mutex_unlock(&lock);
    assert_int_equal(seen[0], small_on_loop);
    assert_int_equal(seen[1], 0);
    assert_int_equal(seen[2], 0);
    assert_int_equal(seen[3], large_elsewhere);
}

// A close answers when the memory is back, and what counts against the limit is free again.
TEST_BETWEEN(test_closed, start, stop)
{
    struct peer *p = peer_attached();
    for (int i = 0; i < 3; i++) {
        uint32_t large = peer_buffer(p, LARGE); // of 8 MiB that it may have
        uint32_t small = peer_buffer(p, SMALL);
        assert_int_equal(peer_close_buffer(p, large), 0);
        unmapped(i, i + 1);
        assert_int_equal(peer_close_buffer(p, small), 0);
        unmapped(i + 1, i + 1);
    }
}

// However long it takes, others are served; the one who closes it waits, and until it is back it
// counts.
TEST_BETWEEN(test_takes_long, start, stop)
{
    enum { LIMIT = 20 * MIB }; // of all clients
    struct peer *p = peer_attached(), *other = peer_attached(), *third = peer_attached();
    struct pollfd answer = {.fd = p->fd, .events = POLLIN};
    uint32_t large = peer_buffer(p, LARGE);
    assert_int_equal(peer_create_buffer(third, 8 * MIB), 0);
    pthread_mutex_lock(&lock);
    holds = true;
    pthread_mutex_unlock(&lock);
    peer_send_close(p, large);
    sem_wait(&begun);
    for (int i = 0; i < 3; i++) { // several turns of the loop
        assert_int_equal(peer_close_buffer(other, peer_buffer(other, SMALL)), 0);
    }
    assert_int_equal(poll(&answer, 1, 0), 0);
    assert_int_equal(peer_create_buffer(other, LIMIT - LARGE - 8 * MIB + 1), KVQ_E_LIMIT);
    sem_post(&goes_on);
    assert_int_equal(peer_answer(p), 0);
    assert_int_equal(peer_create_buffer(other, LIMIT - LARGE - 8 * MIB + 1), 0);
}

// The end of a client that has closed nothing waits as well.
TEST_BETWEEN(test_dies, start, stop)
{
    for (int i = 0; i < 3; i++) {
        struct peer *p = peer_attached();
        assert_int_equal(peer_create_buffer(p, LARGE), 0);
        assert_int_equal(peer_create_buffer(p, SMALL), 0);
        peer_free(p);
        unmapped(i + 1, i + 1);
    }
}

// The core refuses one buffer more than there may be, after its memory was made.
TEST_BETWEEN(test_refused, start, stop)
{
    struct peer *p = peer_attached();
    uint32_t n = 0;
    while (peer_create_buffer(p, 4096) == 0)
        n++;
    assert_true(n > 0 && p->reply->status == KVQ_E_LIMIT);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(peer_create_buffer(p, LARGE), KVQ_E_LIMIT);
        unmapped(0, i + 1);
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
