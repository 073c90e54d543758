// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes control messages: bytes are unpacked as a Request, and what passes is run against a real
// core by a client without privileges. The reply must pack and unpack again. The request and the
// reply are told as JSON, as the log and the HTTP socket tell them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/runtime/server.h"
#include "proto/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct kvq__core *core;
static const struct kvq__peer peer = {.uid = 1000, .gids = {1000}, .n_gids = 1, .pid = 7};
static const struct kvq__identity identity = {"0", "cpu", "c", "/run/kvqd", 1, 1, 0, 1, false};

static void check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "fuzz_control: %s\n", what);
    abort();
}

static void open_core(void)
{
    char text[KVQ_TEXT_BYTES];
    static struct kvq__memory_source source = {.huge = KVQ__HUGE_OFF};
    struct kvq__core_config config = {.pool_bytes = 64 << 20,
                                      .extent_bytes = 2 << 20,
                                      .workers = 1,
                                      .kernels = kvq_kernels_get(KVQ_ISA_C),
                                      .memory = kvq__memory_ops(&source)};
    check(kvq__core_open(&config, &core, text) == 0, text);
}

static void tell(const ProtobufCMessage *message)
{
    cJSON *json = kvq_json_of_message(message);
    check(json != NULL, "no JSON of a message");
    cJSON_Delete(json);
}

static void run(const Kvq__Request *request, struct kvq_arena *arena)
{
    static uint8_t out[KVQ_MAX_MESSAGE], again[KVQ_WIRE_ARENA];
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq__client *client;
    uint64_t id;
    Kvq__Reply reply, *back;
    struct kvq_arena second;
    size_t length;
    check(kvq__client_attach(core, &peer, "fuzz", &client, &id, text) == 0, text);
    struct kvq__dispatch dispatch = {
        .core = core, .identity = &identity, .peer = &peer, .client = client, .now_ns = 1};
    const struct kvq_arena unpacked = *arena;
    for (int twice = 0; twice < 2; twice++) { // the second meets what the first left in the core
        *arena = unpacked;
        kvq__reply__init(&reply);
        kvq__dispatch_run(&dispatch, request, arena, &reply);
        check(reply.status <= 0, "a status above 0");
        check(reply.status == 0 || reply.text[0], "a refusal without words");
        check(kvq_reply_pack(&reply, out, sizeof out, &length) == 0, "a reply that is too long");
        kvq_arena_init(&second, again, sizeof again);
        check(kvq_reply_unpack(out, length, &second, &back, text) == 0, text);
        tell(&back->base);
    }
    kvq__client_detach(client);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t memory[KVQ_WIRE_ARENA];
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq_arena arena;
    Kvq__Request *request;
    if (!core)
        open_core();
    kvq_arena_init(&arena, memory, sizeof memory);
    int error = kvq_request_unpack(data, size, &arena, &request, text);
    check(error <= 0 && (error == 0) == (request != NULL), "code and message disagree");
    check(error == 0 || text[0], "a refusal without words");
    if (error == 0)
        tell(&request->base);
    if (error == 0 && kvq__dispatch_takes(request->command_case))
        run(request, &arena);
    return 0;
}
