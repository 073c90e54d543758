// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl doctor finds of the machine's memory, of a daemon that is no more than its options.
#include "daemon/commands/doctor.h"
#include "daemon/config/machine.h"
#include "proto/clock.h"
#include "proto/status.h"
#include "tests/kits/unit.h"

enum { PROBLEM = 2 };

static struct kvq__server server;
static uint8_t memory[1 << 16];

// The n-th finding of that check; NULL: there is none.
static const Kvq__Finding *find_one(const char *check, uint32_t n)
{
    static Kvq__Reply reply;
    struct kvq_arena arena;
    kvq_arena_init(&arena, memory, sizeof memory);
    kvq__reply__init(&reply);
    kvq__doctor(&server, &arena, &reply);
    assert_int_equal(reply.result_case, KVQ__REPLY__RESULT_DOCTOR);
    for (size_t i = 0; i < reply.doctor->n_findings; i++)
        if (strcmp(reply.doctor->findings[i]->check, check) == 0 && n-- == 0)
            return reply.doctor->findings[i];
    return NULL;
}

static const Kvq__Finding *find(const char *check)
{
    return find_one(check, 0);
}

static uint64_t prepare(void)
{
    struct kvq__machine machine;
    kvq__machine_read("", &machine);
    memset(&server, 0, sizeof server);
    server.identity.isa = "c";
    server.identity.workers = 1;
    server.config.host_extent_bytes = 64 << 20;
    server.config.gpu_extent_bytes = 64 << 20;
    server.config.pool_bytes = kvq__machine_most(&machine);
    server.config.buffer_bytes = 1;
    return server.config.pool_bytes;
}

// Nothing but caches may have them, so a pool of all of them takes no memory from others.
PLAIN_TEST(test_pages_that_were_set_aside)
{
    uint64_t most = prepare();
    assert_int_equal(find("pool")->level, PROBLEM);
    server.memory.set_aside = most;
    assert_int_equal(find("pool")->level, 0);
    assert_says(find("pool")->text, "huge pages that were set aside are");
}

// Full pools need a descriptor for each extent, of which some stay small.
PLAIN_TEST(test_descriptors)
{
    prepare();
    server.config.pool_bytes = 8ull << 30;
    server.config.host_extent_bytes = 8 << 20;
    assert_says(find("descriptors")->text,
                "full pools need 1408"); // 64 + 2 * 256 + (8192 - 1536) / 8
    server.config.pool_bytes = 8 << 20;
    assert_says(find("descriptors")->text, "full pools need 68"); // of 2 MiB each
}

// Nothing locks memory, so no limit of locked memory keeps caches from being swapped out.
PLAIN_TEST(test_swap)
{
    char text[4096] = "";
    FILE *file = fopen("/proc/swaps", "re");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[got] = 0;
    const char *first = strchr(text, '\n');
    bool has_swap = first && first[1];
    prepare();
    assert_null(find("memlock"));
    assert_int_equal(find("swap")->level, has_swap);
    assert_says(find("swap")->text, has_swap ? "can be swapped out" : "this machine has no swap");
}

// Pulls that fail are told of, also where a later push went well or fails as well.
PLAIN_TEST(test_transfers)
{
    struct kvq__store_failures *push = &server.storage.failed[KVQ__TIME_PUSH],
                               *pull = &server.storage.failed[KVQ__TIME_PULL];
    prepare();
    assert_null(find("remote"));
    snprintf(server.config.remote_endpoint, sizeof server.config.remote_endpoint, "https://s3");
    assert_int_equal(find("remote")->level, 0);
    *pull = (struct kvq__store_failures){
        .count = 3, .at_ns = kvq_now_ns() - 2000, .status = KVQ_E_REMOTE};
    *push =
        (struct kvq__store_failures){.count = 1, .at_ns = kvq_now_ns() - 1000, .went_well = true};
    assert_int_equal(find("remote")->level, PROBLEM);
    assert_says(find("remote")->text, "pulls fail: 3");
    assert_null(find_one("remote", 1));
    push->went_well = false;
    push->status = KVQ_E_SYSTEM;
    assert_says(find("remote")->text, "pushes fail: 1");
    assert_says(find_one("remote", 1)->text, "pulls fail: 3");
}

int main(void)
{
    return run_all(NULL, NULL);
}
