// SPDX-License-Identifier: Apache-2.0
//
// Questions of HTTP to the core, over stand-ins for the core, the poller and the connection: what
// is answered when the poller takes too long, and when memory runs out between two pages.
#include "daemon/commands/dispatch.h"
#include "daemon/http/internal.h"
#include "tests/kits/unit.h"

// ---- Stand-ins ----

static struct kvq__mailbox poller_box;
static uint32_t pages, given, answers; // of namespaces: that there are, that were given out
static bool no_more_memory;

// realloc() of the file under test (ld --wrap).
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes)
{
    return no_more_memory ? NULL : __real_realloc(memory, bytes);
}

struct kvq__mailbox *kvq__poller_box(struct kvq__poller *poller)
{
    return &poller_box;
}

const struct kvq__latencies *kvq__poller_latencies(const struct kvq__poller *poller)
{
    static const struct kvq__latencies none;
    return &none;
}

void kvq__core_status(const struct kvq__core *core, struct kvq__status *status)
{
    *status = (struct kvq__status){0};
}

void kvq__core_counts(const struct kvq__core *core, struct kvq__counts *counts)
{
    *counts = (struct kvq__counts){0};
}

const struct kvq__refused *kvq__core_refused(const struct kvq__core *core)
{
    static const struct kvq__refused none;
    return &none;
}

uint32_t kvq__core_places(const struct kvq__core *core, struct kvq__place_info *out)
{
    return 0;
}

uint32_t kvq__core_pack_errors(const struct kvq__core *core, const struct kvq__pack_error **out)
{
    static const struct kvq__pack_error none;
    *out = &none;
    return 0;
}

uint32_t kvq__core_namespaces(const struct kvq__core *core, const struct kvq__peer *peer,
                              uint64_t after, struct kvq__namespace_info *out, uint32_t max)
{
    if (given == pages)
        return 0;
    given++;
    for (uint32_t i = 0; i < max; i++)
        out[i] = (struct kvq__namespace_info){.number = after + 1 + i};
    return max;
}

uint32_t kvq__core_prefixes(const struct kvq__core *core, const struct kvq__peer *peer,
                            uint64_t after, struct kvq__prefix_info *out, uint32_t max)
{
    return 0;
}

void kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply)
{
    fail();
}

const struct kvq__store_times *kvq__jobs_times(const struct kvq__jobs *jobs)
{
    return NULL;
}

void kvq__metrics_write(FILE *out, const struct kvq__snapshot *snapshot, bool open)
{
    fprintf(out, "%u namespaces%s", snapshot->n_namespaces, open ? " in OpenMetrics" : "");
}

void kvq__http_answered(struct kvq__http_ask *ask)
{
    assert_non_null(ask->connection);
    answers++;
}

// ---- The rig ----

static struct kvq__server server;
static struct kvq__http http;

static void nobody_sleeps(void *context)
{
}

static int setup(void **state)
{
    memset(&server, 0, sizeof server);
    memset(&http, 0, sizeof http);
    pages = given = answers = 0;
    no_more_memory = false;
    kvq__mailbox_open(&poller_box, nobody_sleeps, NULL);
    kvq__mailbox_open(&server.box, nobody_sleeps, NULL);
    TAILQ_INIT(&http.asking.waiting);
    http.server = &server;
    http.open = true;
    return 0;
}

static int teardown(void **state)
{
    assert_null(http.asking.current);
    assert_true(TAILQ_EMPTY(&http.asking.waiting));
    kvq__mailbox_close(&server.box);
    kvq__mailbox_close(&poller_box);
    return 0;
}

static struct kvq__http_ask *ask_for(enum kvq__http_topic topic)
{
    static char connection;
    struct kvq__http_ask *ask = calloc(1, sizeof *ask);
    assert_non_null(ask);
    ask->topic = topic;
    ask->connection = (struct MHD_Connection *)&connection;
    assert_int_equal(kvq__http_ask(&http, ask), 0);
    return ask;
}

// There and back until nobody has anything to say.
static void deliver_all(void)
{
    while (kvq__mailbox_pending(&poller_box) || kvq__mailbox_pending(&server.box)) {
        kvq__mailbox_deliver(&poller_box);
        kvq__mailbox_deliver(&server.box);
    }
}

// ---- Tests ----

TEST(test_pages)
{
    pages = 5;
    struct kvq__http_ask *ask = ask_for(KVQ__HTTP_METRICS);
    deliver_all();
    assert_int_equal(answers, 1);
    assert_int_equal(ask->status, MHD_HTTP_OK);
    assert_string_equal(ask->text.at, "320 namespaces");
    kvq__http_ask_leave(ask);
}

TEST(test_no_memory_between_pages)
{
    pages = 5;
    struct kvq__http_ask *ask = ask_for(KVQ__HTTP_METRICS);
    no_more_memory = true;
    deliver_all();
    assert_int_equal(answers, 1);
    assert_true(ask->answered);
    assert_int_equal(ask->status, MHD_HTTP_SERVICE_UNAVAILABLE);
    assert_string_equal(ask->type, "application/json");
    assert_says(ask->text.at, "no memory for the rest of the answer");
    kvq__http_ask_leave(ask);
}

// The one at the poller and the one behind it are told once each; what comes back is nobody's.
TEST(test_late)
{
    struct kvq__http_ask *asks[2], *fresh;
    for (int i = 0; i < 2; i++) {
        asks[i] = ask_for(KVQ__HTTP_HEALTH);
        asks[i]->asked_ns -= (KVQ__HTTP_PATIENCE_MS + 1) * 1000000ull;
    }
    fresh = ask_for(KVQ__HTTP_HEALTH);
    for (int i = 0; i < 2; i++)
        kvq__http_ask_tick(&http);
    assert_int_equal(answers, 2);
    for (int i = 0; i < 2; i++)
        assert_true(asks[i]->late && !asks[i]->answered);
    assert_false(fresh->late);
    kvq__http_ask_leave(asks[0]); // while the poller has it
    kvq__http_ask_leave(asks[1]);
    deliver_all();
    assert_int_equal(answers, 3);
    assert_true(fresh->answered);
    assert_int_equal(fresh->status, MHD_HTTP_OK);
    kvq__http_ask_leave(fresh);
}

int main(void)
{
    return run_all(NULL, NULL);
}
