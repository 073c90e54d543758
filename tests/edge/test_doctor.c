// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl doctor finds of the machine's memory, of a daemon that is no more than its options.
#include "daemon/commands/doctor.h"
#include "daemon/config/machine.h"
#include "tests/kits/unit.h"

enum { PROBLEM = 2 };

static struct kvq__server server;
static uint8_t memory[1 << 16];

// The finding of that check; NULL: there is none.
static const Kvq__Finding *find(const char *check)
{
    static Kvq__Reply reply;
    struct kvq_arena arena;
    kvq_arena_init(&arena, memory, sizeof memory);
    kvq__reply__init(&reply);
    kvq__doctor(&server, &arena, &reply);
    assert_int_equal(reply.result_case, KVQ__REPLY__RESULT_DOCTOR);
    for (size_t i = 0; i < reply.doctor->n_findings; i++)
        if (strcmp(reply.doctor->findings[i]->check, check) == 0)
            return reply.doctor->findings[i];
    return NULL;
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

int main(void)
{
    return run_all(NULL, NULL);
}
