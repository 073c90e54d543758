// SPDX-License-Identifier: Apache-2.0
//
// Lists that take several replies: whatever comes and goes between two pages, nothing is listed
// twice and nothing that stays is left out; a page costs what is on it; cursors that are no good
// are refused with words.
#include "daemon/commands/dispatch.h"
#include "proto/status.h"
#include "tests/core/core_kit.h"
#include "tests/kits/request.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, SESSIONS = 3000, MOST = 3 * SESSIONS, EPOCH = 77 };

static struct kit kit;
static struct member m;
static char text[KVQ_TEXT_BYTES];
static const struct kvq__identity identity = {"0", "cpu", "c", "/run/kvqd", EPOCH, 1, 0, 1, false};
static const struct kvq__peer admin = {.uid = 0, .admin = true};

static int setup(void **state)
{
    const uint32_t users[] = {1000};
    const struct kvq__namespace_config team = {.name = "team", .uids = users, .n_uids = 1};
    kit_open(&kit, 11, 64 * MIB, 0);
    kit.unchecked = true; // more namespaces than a check looks at
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), 0);
    assert_int_equal(member_open(&kit, &m, 1000, MIB), 0);
    return 0;
}

static int teardown_plain(void **state)
{
    member_close(&m);
    kit_close(&kit);
    return 0;
}

// ---- Asking ----

// Runs a request, and packs and unpacks its reply as it travels.
static const Kvq__Reply *ask(const struct kvq__peer *peer, const Kvq__Request *request)
{
    static uint8_t memory[KVQ_WIRE_ARENA], again[KVQ_WIRE_ARENA], bytes[KVQ_MAX_MESSAGE];
    struct kvq_arena arena, second;
    struct kvq__dispatch d = {.core = kit.core, .identity = &identity, .peer = peer, .now_ns = 1};
    Kvq__Reply reply = KVQ__REPLY__INIT, *back;
    size_t length;
    kvq_arena_init(&arena, memory, sizeof memory);
    kvq__dispatch_run(&d, request, &arena, &reply);
    assert_int_equal(kvq_reply_pack(&reply, bytes, sizeof bytes, &length), 0);
    kvq_arena_init(&second, again, sizeof again);
    assert_int_equal(kvq_reply_unpack(bytes, length, &second, &back, text), 0);
    return back;
}

static const Kvq__Reply *ask_sessions(const struct kvq__peer *peer, const char *ns,
                                      Kvq__Cursor *cursor)
{
    Kvq__ListSessions command = KVQ__LIST_SESSIONS__INIT;
    command.namespace_ = (char *)(uintptr_t)ns;
    command.cursor = cursor;
    return ask(peer, &REQUEST(LIST_SESSIONS, list_sessions, &command));
}

// A cursor that outlives its reply; NULL stays NULL.
static Kvq__Cursor *keep(const Kvq__Cursor *next, Kvq__Cursor *copy)
{
    if (!next)
        return NULL;
    *copy = *next;
    copy->remote_namespace = copy->remote_name = (char *)(uintptr_t) "";
    return copy;
}

// ---- Sessions that come and go ----

static struct {
    uint64_t handle;
    bool open, pinned, listed;
} known[1 + MOST]; // by id: the kit's core counts from 1

static void open_one(bool pinned)
{
    const struct kvq__layer_row row = {1, 1, 64, 64, .format = "f16", .kv_from = -1};
    static uint32_t n;
    char name[KVQ_NAME_BYTES];
    struct kvq__session_info info;
    // Names of all lengths, so that pages hold different numbers of them; some have none.
    snprintf(name, sizeof name, "%0*u", (int)(1 + n % 120), n);
    struct kvq__session_spec spec = {.ns = n % 3 == 0 ? "uid-1000" : "team",
                                     .name = n % 5 ? name : "",
                                     .layers = &row,
                                     .n_layers = 1};
    n++;
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    assert_in_range(info.id, 1, MOST);
    known[info.id].handle = info.handle;
    known[info.id].open = true;
    known[info.id].pinned = pinned;
}

// Of `at`, the session that the next page is behind, and of others.
static void churn(uint32_t times, uint64_t at)
{
    for (uint32_t i = 0; i < times; i++) {
        uint64_t id = i ? 1 + kit_below(&kit, (uint32_t)kit.core->last.session) : at;
        if (known[id].open && !known[id].pinned) {
            assert_int_equal(kvq__session_drop(m.client, known[id].handle, text), 0);
            known[id].open = false;
            open_one(false);
        }
    }
}

// Lists all, with sessions coming and going between pages. Returns the number of pages.
static uint32_t list_all(const char *ns, uint32_t times)
{
    Kvq__Cursor copy, *cursor = NULL;
    uint32_t pages = 0;
    for (uint32_t i = 0; i <= MOST; i++)
        known[i].listed = false;
    do {
        uint64_t before = kit.core->lookup.looks;
        const Kvq__Reply *reply = ask_sessions(&m.client->peer, ns, cursor);
        assert_int_equal(reply->status, 0);
        const Kvq__SessionList *list = reply->sessions;
        // Two descents of the trees, what is on the page, and the rest of the last piece.
        assert_in_range(kit.core->lookup.looks - before, list->n_sessions,
                        list->n_sessions + 64 + 12 * 40);
        for (size_t i = 0; i < list->n_sessions; i++) {
            uint64_t id = list->sessions[i]->id;
            assert_true(known[id].open);
            assert_false(known[id].listed);
            known[id].listed = true;
        }
        assert_int_equal(list->truncated, list->next != NULL);
        cursor = keep(list->next, &copy);
        churn(times, cursor ? cursor->id : 0);
        pages++;
        assert_in_range(pages, 1, 100);
    } while (cursor);
    return pages;
}

KIT_TEST(test_sessions)
{
    uint32_t missing = 0;
    kit.core->config.quota.limit[KVQ__SESSIONS] = 0;
    for (uint32_t i = 0; i < SESSIONS; i++)
        open_one(kit_chance(&kit, 50));
    assert_in_range(list_all("", 0), 5, 20);
    for (uint32_t i = 1; i <= SESSIONS; i++)
        assert_true(known[i].listed);
    for (int round = 0; round < 3; round++) {
        list_all("", 100);
        for (uint32_t i = 0; i <= MOST; i++)
            missing += known[i].pinned && !known[i].listed;
        assert_int_equal(missing, 0);
    }
    // Of one namespace, from a first page that all are gone from by then.
    list_all("team", 100);
    for (uint32_t i = 0; i <= MOST; i++)
        if (known[i].pinned) {
            bool own = strcmp(kit_of(&m, known[i].handle)->ns->name, "team") == 0;
            assert_int_equal(known[i].listed, own);
        }
    // Whoever asks as ever gets a first page and is told that it is one.
    const Kvq__Reply *reply = ask_sessions(&m.client->peer, "", NULL);
    assert_in_range(reply->sessions->n_sessions, 200, 1000);
    assert_true(reply->sessions->truncated);
    const struct kvq__peer stranger = {.uid = 2000};
    Kvq__Cursor copy, *cursor = keep(reply->sessions->next, &copy);
    reply = ask_sessions(&stranger, "", cursor); // it says nothing of what it may not see
    assert_int_equal(reply->status, 0);
    assert_int_equal(reply->sessions->n_sessions, 0);
}

// The session that a cursor names, and all behind it, are gone.
KIT_TEST(test_gone)
{
    Kvq__Cursor copy;
    memset(known, 0, sizeof known);
    for (uint32_t i = 0; i < 1000; i++)
        open_one(false);
    const Kvq__Reply *reply = ask_sessions(&m.client->peer, "", NULL);
    Kvq__Cursor *cursor = keep(reply->sessions->next, &copy);
    assert_non_null(cursor);
    for (uint32_t i = 1; i <= 1000; i++)
        if (i % 7)
            assert_int_equal(kvq__session_drop(m.client, known[i].handle, text), 0);
    for (uint32_t i = 0; i < 10; i++)
        open_one(false);
    reply = ask_sessions(&m.client->peer, "", cursor);
    assert_false(reply->sessions->truncated);
    uint64_t last = 0;
    uint32_t left = 10; // of the new ones, all but those that are before the cursor's namespace
    for (uint64_t i = 7; i <= 1000; i += 7) {
        const struct kvq__session *s = kit_of(&m, known[i].handle);
        left +=
            s->ns->number > copy.namespace_ || (s->ns->number == copy.namespace_ && i > copy.id);
    }
    assert_in_range(left, 40, 1000);
    assert_in_range(reply->sessions->n_sessions, left - 10, left);
    for (size_t i = 0; i < reply->sessions->n_sessions; i++) {
        const Kvq__Session *s = reply->sessions->sessions[i];
        assert_true(s->id % 7 == 0 || s->id > 1000);
        bool same = i && strcmp(s->namespace_, reply->sessions->sessions[i - 1]->namespace_) == 0;
        assert_true(!same || s->id > last);
        last = s->id;
    }
}

// ---- Cursors that are no good ----

static void refuse(Kvq__Cursor cursor, int code, const char *words)
{
    const Kvq__Reply *reply = ask_sessions(&m.client->peer, "", &cursor);
    assert_int_equal(reply->status, code);
    assert_says(reply->text, words);
    assert_int_equal(reply->result_case, KVQ__REPLY__RESULT__NOT_SET);
}

KIT_TEST(test_refusals)
{
    Kvq__Cursor good = KVQ__CURSOR__INIT;
    memset(known, 0, sizeof known);
    open_one(true);
    good.epoch = EPOCH;
    good.list = KVQ__REQUEST__COMMAND_LIST_SESSIONS;
    good.namespace_ = good.id = 1;
    assert_int_equal(ask_sessions(&m.client->peer, "", &good)->status, 0);
    refuse(WITH(good, epoch++), KVQ_E_EPOCH, "another run");
    refuse(WITH(good, list = KVQ__REQUEST__COMMAND_LIST_CLIENTS), KVQ_E_INVALID,
           "list_clients (33), not of list_sessions (32)");
    refuse(WITH(good, list = 4000000000u), KVQ_E_INVALID, "no list (4000000000)");
    refuse(WITH(good, id = 2), KVQ_E_INVALID, "none above");
    refuse(WITH(good, id = UINT64_MAX), KVQ_E_INVALID, "18446744073709551615");
    refuse(WITH(good, namespace_ = UINT64_MAX), KVQ_E_INVALID, "begin the list anew");
}

// ---- Clients, and namespaces: three lists of them ----

KIT_TEST(test_clients)
{
    enum { CLIENTS = KVQ_MAX_CLIENTS - 1 };
    static struct kvq__client *clients[CLIENTS];
    static bool listed[10 * KVQ_MAX_CLIENTS];
    Kvq__ListClients command = KVQ__LIST_CLIENTS__INIT;
    Kvq__Cursor copy;
    char name[KVQ_NAME_BYTES];
    uint64_t id;
    uint32_t pages = 0, n = 0;
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    for (uint32_t i = 0; i < CLIENTS; i++)
        assert_int_equal(
            kvq__client_attach(kit.core, &m.client->peer, name, &clients[i], &id, text), 0);
    do {
        const Kvq__ClientList *list =
            ask(&m.client->peer, &REQUEST(LIST_CLIENTS, list_clients, &command))->clients;
        for (size_t i = 0; i < list->n_clients; i++) {
            assert_false(listed[list->clients[i]->id]);
            listed[list->clients[i]->id] = true;
            n++;
        }
        command.cursor = keep(list->next, &copy);
        kvq__client_detach(clients[pages]); // of those that were listed
        assert_int_equal(
            kvq__client_attach(kit.core, &m.client->peer, name, &clients[pages], &id, text), 0);
        pages++;
    } while (command.cursor);
    assert_in_range(pages, 2, 10);
    assert_in_range(n, CLIENTS + 1, CLIENTS + pages);
    for (uint32_t i = 0; i < CLIENTS; i++)
        kvq__client_detach(clients[i]);
}

// Users' own namespaces, which an administrator names.
static void make_namespaces(uint32_t n)
{
    char name[32];
    struct kvq__namespace *ns;
    for (uint32_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "uid-%u", 4000000000u + i);
        assert_int_equal(kvq__namespace_get(kit.core, &admin, name, &ns, text), 0);
    }
}

// The number of elements of all pages, each another one than those before it.
static uint32_t count_quotas(void)
{
    Kvq__ListQuotas command = KVQ__LIST_QUOTAS__INIT;
    Kvq__Cursor copy;
    char last[KVQ_NAME_BYTES] = "";
    uint32_t n = 0;
    do {
        const Kvq__QuotaList *list =
            ask(&admin, &REQUEST(LIST_QUOTAS, list_quotas, &command))->quotas;
        assert_int_equal(list->truncated, list->next != NULL);
        assert_string_not_equal(list->quotas[0]->namespace_, last);
        n += (uint32_t)list->n_quotas;
        snprintf(last, sizeof last, "%s", list->quotas[list->n_quotas - 1]->namespace_);
        command.cursor = keep(list->next, &copy);
    } while (command.cursor);
    return n;
}

TEST_BETWEEN(test_namespaces, setup, teardown_plain)
{
    enum { NAMESPACES = 2500 };
    Kvq__Status command = KVQ__STATUS__INIT;
    Kvq__Request request = REQUEST(STATUS, status, &command);
    Kvq__Cursor copy;
    uint32_t n = 0, pages = 0, there = 0;
    const struct kvq__namespace *ns;
    make_namespaces(NAMESPACES);
    TAILQ_FOREACH (ns, &kit.core->namespaces, link)
        there++;
    do {
        const Kvq__StatusReply *s = ask(&admin, &request)->status_reply;
        assert_int_equal(s->truncated, s->next != NULL);
        assert_int_equal(s->clients, 1);
        assert_int_equal(s->n_counters, KVQ__COUNTERS);
        assert_string_equal(s->counters[0]->name, "steps");
        n += (uint32_t)s->n_namespaces;
        command.cursor = keep(s->next, &copy);
        pages++;
    } while (command.cursor);
    assert_int_equal(n, there);
    assert_in_range(pages, 2, 20);
    assert_int_equal(count_quotas(), there);
    copy = (Kvq__Cursor)KVQ__CURSOR__INIT;
    copy.epoch = EPOCH;
    copy.list = KVQ__REQUEST__COMMAND_LIST_QUOTAS; // its order is the same; it is another list
    command.cursor = &copy;
    assert_int_equal(ask(&admin, &request)->status, KVQ_E_INVALID);
}

int main(void)
{
    return run_all(NULL, NULL);
}
