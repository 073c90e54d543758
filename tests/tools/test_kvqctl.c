// SPDX-License-Identifier: Apache-2.0
// kvqctl against a scripted daemon: a thread answers each request as the test says, so that
// exit statuses, JSON and texts are checked for answers a real daemon seldom gives.
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

#include "proto/shm.h"
#include "proto/status.h"
#include "proto/wire.h"

// How the scripted daemon answers.
enum manner {
    ANSWER,
    SILENT,
    GARBAGE,
    STALE_ID_FIRST,
    CUT_LISTS,
    PAGES,
    CIRCLE,
    OTHER_RESULT,
    ESCAPES,
    KNOWS_NO_AGAIN,  // as a daemon of 0.1.0, which pushes what is new alone
    ENDS,            // instead of answering
    ANSWERS_AND_ENDS // at once
};

struct daemon {
    void *context, *socket;
    pthread_t thread;
    enum manner manner;
    int status;       // of the reply
    const char *text; // of the reply
    int requests;     // seen so far
    Kvq__Request__CommandCase last;
    char last_name[64];
};

struct fixture {
    char dir[64], path[128];
    struct daemon daemon;
};

static struct kvq_arena fresh_arena(void)
{
    static uint8_t memory[KVQ_WIRE_ARENA];
    struct kvq_arena arena;
    kvq_arena_init(&arena, memory, sizeof memory);
    return arena;
}

static void send_reply(void *socket, const uint8_t *identity, size_t identity_size,
                       const Kvq__Reply *reply)
{
    static uint8_t data[KVQ_MAX_MESSAGE];
    size_t size;
    assert_int_equal(kvq_reply_pack(reply, data, sizeof data, &size), 0);
    zmq_send(socket, identity, identity_size, ZMQ_SNDMORE);
    zmq_send(socket, data, size, 0);
}

static double compression = 4.25; // of the session below

// One session with numbers that a test can recognize.
static void fill_session(Kvq__Session *session)
{
    kvq__session__init(session);
    session->id = 7;
    session->namespace_ = "uid-0";
    session->name = "chat";
    session->format = "mymix";
    session->layer_formats = "0-1:k8v4, 2-31:oscar2";
    session->tokens = 4096;
    session->bits_per_value = 3.0625;
    session->bytes_per_token_head = 98;
    session->bytes_per_token_head_total = 120.5;
    session->full_precision_tokens = 128;
    session->compression = compression;
    session->packed_bytes = 1ull << 40;
    session->tier = "disk";
    session->pinned = true;
    session->readers = 2;
    session->v_rotation = "mixed";
}

// Lists besides sessions and formats: each without an element, and cut.
static void answer_cut(const Kvq__Request *request, Kvq__Reply *reply)
{
    static Kvq__ClientList clients = KVQ__CLIENT_LIST__INIT;
    static Kvq__PrefixList prefixes = KVQ__PREFIX_LIST__INIT;
    static Kvq__QuotaList quotas = KVQ__QUOTA_LIST__INIT;
    static Kvq__SavedList saved = KVQ__SAVED_LIST__INIT;
    static Kvq__RemoteList remote = KVQ__REMOTE_LIST__INIT;
    clients.truncated = prefixes.truncated = quotas.truncated = true;
    saved.truncated = remote.truncated = true;
    if (request->command_case == KVQ__REQUEST__COMMAND_LIST_CLIENTS) {
        reply->result_case = KVQ__REPLY__RESULT_CLIENTS;
        reply->clients = &clients;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_PREFIXES) {
        reply->result_case = KVQ__REPLY__RESULT_PREFIXES;
        reply->prefixes = &prefixes;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_QUOTAS) {
        reply->result_case = KVQ__REPLY__RESULT_QUOTAS;
        reply->quotas = &quotas;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_SAVED) {
        reply->result_case = KVQ__REPLY__RESULT_SAVED;
        reply->saved = &saved;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_REMOTE) {
        reply->result_case = KVQ__REPLY__RESULT_REMOTE_LIST;
        reply->remote_list = &remote;
    }
}

// Sessions in pages of two, the second of three being empty; in a circle if it is to end nowhere.
static void answer_page(const struct daemon *daemon, const Kvq__Cursor *cursor,
                        Kvq__SessionList *list, Kvq__Session sessions[2], Kvq__Cursor *next)
{
    uint64_t page = cursor ? cursor->id : 0;
    kvq__cursor__init(next);
    next->epoch = 5;
    next->id = daemon->manner == CIRCLE ? 1 : page + 1;
    sessions[0].id = 100 + 2 * page;
    sessions[1] = sessions[0];
    sessions[1].id++;
    list->n_sessions = page == 1 ? 0 : 2;
    list->truncated = daemon->manner == CIRCLE || page < 2;
    list->next = list->truncated ? next : NULL;
}

static uint64_t each; // of the counters below

// A status whose numbers are all the same.
static void fill_status(Kvq__StatusReply *status)
{
    static char *const names[] = {"parked_room",    "offloaded_now",   "demoted",
                                  "demoted_now",    "prompts_packed",  "waited_for_room",
                                  "kicked_clients", "evictions_failed"};
    enum { N_COUNTERS = sizeof names / sizeof *names };
    static Kvq__Counter counters[N_COUNTERS];
    static Kvq__Counter *all[N_COUNTERS];
    kvq__status_reply__init(status);
    status->version = "9.9.9";
    for (size_t i = 0; i < N_COUNTERS; i++) {
        kvq__counter__init(&counters[i]);
        counters[i].name = names[i];
        counters[i].value = each;
        all[i] = &counters[i];
    }
    status->counters = all;
    status->n_counters = N_COUNTERS;
    status->workers = status->sessions = status->clients = (uint32_t)each;
}

static void answer(struct daemon *daemon, const uint8_t *identity, size_t n,
                   const Kvq__Request *request)
{
    Kvq__Reply reply = KVQ__REPLY__INIT;
    Kvq__Pong pong = KVQ__PONG__INIT;
    Kvq__StatusReply status;
    Kvq__SessionList list = KVQ__SESSION_LIST__INIT;
    Kvq__Session pair[2], *sessions[] = {&pair[0], &pair[1]};
    Kvq__Cursor next;
    Kvq__FormatList formats = KVQ__FORMAT_LIST__INIT;
    Kvq__Format format = KVQ__FORMAT__INIT, *all_formats[] = {&format};
    Kvq__Transfer transfer = KVQ__TRANSFER__INIT;
    fill_session(&pair[0]);
    format.name = "mymix";
    format.layers = "2-31";
    format.row = "oscar2";
    format.source = "a paper";
    format.own = true;
    format.bits_per_value = 3.0625;
    format.recommended = true;
    format.fast = true;
    formats.formats = all_formats;
    formats.n_formats = 1;
    if (daemon->manner == ESCAPES)
        pair[0].name = "chat\033[31m";
    pong.version = "9.9.9";
    fill_status(&status);
    list.sessions = sessions;
    list.n_sessions = 1;
    reply.id = request->id;
    reply.status = daemon->status;
    reply.text = (char *)daemon->text;
    if (daemon->manner == OTHER_RESULT || request->command_case == KVQ__REQUEST__COMMAND_PING) {
        reply.result_case = KVQ__REPLY__RESULT_PONG;
        reply.pong = &pong;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_STATUS) {
        reply.result_case = KVQ__REPLY__RESULT_STATUS_REPLY;
        reply.status_reply = &status;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_SESSIONS) {
        reply.result_case = KVQ__REPLY__RESULT_SESSIONS;
        reply.sessions = &list;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_SESSION_INFO) {
        reply.result_case = KVQ__REPLY__RESULT_SESSION;
        reply.session = &pair[0];
    } else if (request->command_case == KVQ__REQUEST__COMMAND_LIST_FORMATS) {
        reply.result_case = KVQ__REPLY__RESULT_FORMATS;
        reply.formats = &formats;
    } else if (request->command_case == KVQ__REQUEST__COMMAND_PUSH_SESSION) {
        reply.result_case = KVQ__REPLY__RESULT_TRANSFER;
        reply.transfer = &transfer;
        transfer.name = request->push_session->ref->name;
        transfer.finished = true;
        transfer.again = request->push_session->again && daemon->manner != KNOWS_NO_AGAIN;
    }
    list.truncated = formats.truncated = daemon->manner == CUT_LISTS;
    if (daemon->manner == CUT_LISTS)
        answer_cut(request, &reply);
    if ((daemon->manner == PAGES || daemon->manner == CIRCLE) &&
        request->command_case == KVQ__REQUEST__COMMAND_LIST_SESSIONS)
        answer_page(daemon, request->list_sessions->cursor, &list, pair, &next);
    if (daemon->manner == STALE_ID_FIRST) {
        reply.id--;
        reply.status = KVQ_E_INTERNAL;
        send_reply(daemon->socket, identity, n, &reply);
        reply.id++;
        reply.status = daemon->status;
    }
    send_reply(daemon->socket, identity, n, &reply);
}

static void remember(struct daemon *daemon, const Kvq__Request *request)
{
    const char *name = "";
    if (request->command_case == KVQ__REQUEST__COMMAND_DROP_SESSION)
        name = request->drop_session->ref->name;
    if (request->command_case == KVQ__REQUEST__COMMAND_SESSION_INFO)
        name = request->session_info->ref->name;
    daemon->requests++;
    daemon->last = request->command_case;
    snprintf(daemon->last_name, sizeof daemon->last_name, "%s", name);
}

// The daemon's end, once what it has said is sent.
static void end_socket(struct daemon *daemon)
{
    const int wait = 10000;
    zmq_setsockopt(daemon->socket, ZMQ_LINGER, &wait, sizeof wait);
    zmq_close(daemon->socket);
    zmq_ctx_term(daemon->context);
    daemon->socket = NULL;
}

// Serves until an empty message comes from the test itself.
static void *serve(void *argument)
{
    struct daemon *daemon = argument;
    static uint8_t data[KVQ_MAX_MESSAGE];
    uint8_t identity[256];
    char text[KVQ_TEXT_BYTES];
    for (;;) {
        int n = zmq_recv(daemon->socket, identity, sizeof identity, 0);
        int size = zmq_recv(daemon->socket, data, sizeof data, 0);
        Kvq__Request *request;
        struct kvq_arena arena = fresh_arena();
        if (n <= 0 || size <= 0)
            return NULL;
        if (kvq_request_unpack(data, (size_t)size, &arena, &request, text) != 0)
            continue;
        remember(daemon, request);
        if (daemon->manner == GARBAGE) {
            zmq_send(daemon->socket, identity, (size_t)n, ZMQ_SNDMORE);
            zmq_send(daemon->socket, "\377\377\377", 3, 0);
        } else if (daemon->manner != SILENT && daemon->manner != ENDS) {
            answer(daemon, identity, (size_t)n, request);
        }
        if (daemon->manner == ENDS || daemon->manner == ANSWERS_AND_ENDS) {
            end_socket(daemon);
            return NULL;
        }
    }
}

static void start(struct fixture *f, enum manner manner, int status, const char *text)
{
    char endpoint[160];
    struct daemon *daemon = &f->daemon;
    *daemon = (struct daemon){.manner = manner, .status = status, .text = text};
    daemon->context = zmq_ctx_new();
    daemon->socket = zmq_socket(daemon->context, ZMQ_ROUTER);
    snprintf(endpoint, sizeof endpoint, "ipc://%s", f->path);
    assert_int_equal(zmq_bind(daemon->socket, endpoint), 0);
    assert_int_equal(pthread_create(&daemon->thread, NULL, serve, daemon), 0);
}

static void stop(struct fixture *f)
{
    char endpoint[160];
    int none = 0;
    if (f->daemon.manner == ENDS || f->daemon.manner == ANSWERS_AND_ENDS) {
        pthread_join(f->daemon.thread, NULL);
        return;
    }
    void *context = zmq_ctx_new();
    void *socket = zmq_socket(context, ZMQ_DEALER);
    snprintf(endpoint, sizeof endpoint, "ipc://%s", f->path);
    zmq_connect(socket, endpoint);
    zmq_send(socket, "", 0, 0);
    pthread_join(f->daemon.thread, NULL);
    zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
    zmq_close(socket);
    zmq_ctx_term(context);
    zmq_setsockopt(f->daemon.socket, ZMQ_LINGER, &none, sizeof none);
    zmq_close(f->daemon.socket);
    zmq_ctx_term(f->daemon.context);
}

// Runs kvqctl with the arguments through a shell, since they are the test's own words; output of
// both streams goes to `output`. Returns its exit status.
static int run(struct fixture *f, const char *arguments, char *output, size_t size)
{
    char command[1024];
    const char *bin = getenv("KVQ_BIN_DIR");
    snprintf(command, sizeof command, "exec %s/kvqctl --runtime-dir %s %s 2>&1", bin ? bin : "bin",
             f->dir, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t got = fread(output, 1, size - 1, pipe);
    output[got] = 0;
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

// Runs it against a daemon that answers in the given way.
static int run_with(struct fixture *f, enum manner manner, int status, const char *text,
                    const char *arguments, char *output, size_t size)
{
    start(f, manner, status, text);
    int result = run(f, arguments, output, size);
    stop(f);
    return result;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/kvqctl-test-XXXXXX");
    if (!mkdtemp(f->dir))
        return -1;
    snprintf(f->path, sizeof f->path, "%s/%s", f->dir, KVQ_CONTROL_SOCKET);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    unlink(f->path);
    rmdir(f->dir);
    free(f);
    return 0;
}

static void test_no_daemon(void **state)
{
    struct fixture *f = *state;
    char out[4096];
    assert_int_equal(run(f, "status", out, sizeof out), 3);
    assert_non_null(strstr(out, f->path));
    assert_non_null(strstr(out, "kvqd --runtime-dir"));
    assert_int_equal(run(f, "doctor", out, sizeof out), 7); // whatever the problem is
    assert_non_null(strstr(out, "PROBLEM"));
}

static void test_socket_left_behind(void **state)
{
    struct fixture *f = *state;
    char out[4096];
    // What a killed daemon leaves: a bound socket that nobody holds any more.
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s", f->path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    assert_int_equal(run(f, "ping", out, sizeof out), 3);
    assert_non_null(strstr(out, "left behind"));
}

static void test_usage(void **state)
{
    struct fixture *f = *state;
    static const char *const wrong[] = {"",
                                        "nonsense",
                                        "session",
                                        "session show",
                                        "session nonsense",
                                        "status more",
                                        "--nonsense status",
                                        "client kick x",
                                        "client kick -1",
                                        "--timeout 0 ping",
                                        "--timeout 5x ping",
                                        "--interval nan top"};
    char out[16384]; // all of --help
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(run(f, wrong[i], out, sizeof out), 2);
    run(f, "--namspace a status", out, sizeof out);
    assert_non_null(strstr(out, "no option '--namspace'; did you mean '--namespace'?"));
    run(f, "--zzzzzz status", out, sizeof out);
    assert_null(strstr(out, "did you mean"));
    static const struct {
        const char *given, *words;
    } letters[] = {{"-json status", "no option '-json'; did you mean '--json'?"},
                   {"status -xv", "no option '-xv'\n"},
                   {"status -x", "no option '-x'\n"},
                   {"--kind -x status -yx", "no option '-yx'\n"},
                   {"session show -dash", "as in kvqctl session show -- -dash.\n"},
                   {"session show -hash", "no option '-hash'"}};
    for (size_t i = 0; i < sizeof letters / sizeof *letters; i++) {
        assert_int_equal(run(f, letters[i].given, out, sizeof out), 2);
        assert_non_null(strstr(out, letters[i].words));
    }
    assert_int_equal(run(f, "--json=3 status", out, sizeof out), 2);
    assert_non_null(strstr(out, "--json takes no value: --json=3"));
    assert_int_equal(run(f, "status --kind", out, sizeof out), 2);
    assert_non_null(strstr(out, "--kind needs a value behind it: K[,K]"));
    assert_int_equal(run(f, "--help", out, sizeof out), 0);
    assert_non_null(strstr(out, "session drop NAME"));
    assert_non_null(strstr(out, "--offline DIR"));
    assert_int_equal(run(f, "session show --help", out, sizeof out), 0);
    assert_non_null(strstr(out, "  --exact")); // its own options, with what they mean
    assert_null(strstr(out, "--offline"));
    assert_non_null(strstr(out, "All commands take --runtime-dir"));
    assert_non_null(strstr(out, "see kvqctl --help."));
    assert_null(strstr(out, "Exit status"));
    assert_int_equal(run(f, "storage --help", out, sizeof out), 0);
    assert_non_null(strstr(out, "storage verify"));
    assert_null(strstr(out, "session drop"));
    assert_non_null(strstr(out, "  --offline DIR")); // of one of them
    assert_int_equal(run(f, "--version", out, sizeof out), 0);
    static const char shape[] = "size --layers 2 --kv-heads 2 --head-dim 64 --tokens 9 --format";
    char line[128];
    snprintf(line, sizeof line, "%s kvq3", shape);
    assert_int_equal(run(f, line, out, sizeof out), 2);
    assert_non_null(strstr(out, "format kvq3 is unknown; did you mean 'kvq2'?"));
    assert_non_null(strstr(out, "kvqctl format list shows the formats."));
    snprintf(line, sizeof line, "%s zzzzzz", shape);
    assert_int_equal(run(f, line, out, sizeof out), 2);
    assert_null(strstr(out, "did you mean"));
    assert_non_null(strstr(out, "zzzzzz is unknown; try kvq2, oscar3, kivi4, oscar4\n"));
}

// Groups, a command's own form, and what is missing or too much behind it.
static void test_help_of_commands(void **state)
{
    struct fixture *f = *state;
    char out[16384];
    assert_int_equal(run(f, "--help", out, sizeof out), 0);
    const char *pull = strstr(out, "  session pull NAME");
    const char *prefixes = strstr(out, "  prefix status");
    assert_non_null(strstr(out, "\n\nSessions:\n  session list "));
    assert_true(pull && prefixes && pull < prefixes); // commands of one group stand together
    static const char *const words[][2] = {
        {"session save", "NAME is missing; it is kvqctl session save NAME\n"
                         "kvqctl session save --help says more.\n"},
        {"session move a", "PLACE is missing; it is kvqctl session move NAME PLACE\n"},
        {"session save a b", "'b' is too much; it is kvqctl session save NAME\n"},
        {"config get a b", "'b' is too much; it is kvqctl config get [NAME]\n"},
        {"status x", "'x' is too much; it is kvqctl status\n"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        assert_int_equal(run(f, words[i][0], out, sizeof out), 2);
        assert_non_null(strstr(out, words[i][1]));
    }
    assert_int_equal(run(f, "session save --help", out, sizeof out), 0);
    assert_ptr_equal(strstr(out, "usage: kvqctl session save NAME [--namespace NAME] [--again]"),
                     out);
}

// What no message may hold is told at once, whether a daemon is there or not, and by each command.
static void test_texts_that_cannot_be_sent(void **state)
{
    struct fixture *f = *state;
    static const char *const wrong[] = {
        "session show \"$(printf 'a\\nb')\"", "session drop \"$(printf 'a\\tb')\"",
        "session show \"$(printf '\\377')\"", "session list --namespace \"$(printf '\\377')\"",
        "quota get \"$(printf 'a\\nb')\""};
    char out[1024];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(run(f, wrong[i], out, sizeof out), 2);
        assert_non_null(strstr(out, " holds control characters or is not UTF-8"));
    }
}

// A misspelt command is answered with the nearest one, if any is near; help is --help.
static void test_suggestions(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *given, *meant; // NULL: nothing is near
    } cases[] = {{"sesion list", "'sesion list'; did you mean 'session list'?"},
                 {"session lits", "'session lits'; did you mean 'session list'?"},
                 {"stauts", "'stauts'; did you mean 'status'?"},
                 {"sesion", "'sesion'; did you mean 'session'?"},
                 {"storage compct now", "'storage compct'; did you mean 'storage compact'?"},
                 {"help cleint kick", "'cleint kick'; did you mean 'client kick'?"},
                 {"xyzzy", NULL},
                 {"session frobnicate", NULL}};
    char out[16384], help[16384];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(run(f, cases[i].given, out, sizeof out), 2);
        assert_non_null(strstr(out, "kvqctl: there is no command '"));
        if (cases[i].meant ? !strstr(out, cases[i].meant) : !!strstr(out, "did you mean"))
            fail_msg("%s said: %s", cases[i].given, out);
    }
    static const char *const topics[] = {"", "session", "session list", "top"};
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++) {
        char command[64];
        snprintf(command, sizeof command, "help %s", topics[i]);
        assert_int_equal(run(f, command, out, sizeof out), 0);
        snprintf(command, sizeof command, "%s --help", topics[i]);
        assert_int_equal(run(f, command, help, sizeof help), 0);
        assert_string_equal(out, help);
    }
}

static void test_refusals(void **state)
{
    struct fixture *f = *state;
    static const struct {
        int status, exit;
    } cases[] = {
        {KVQ_E_NO_SESSION, 5}, {KVQ_E_NO_CLIENT, 5}, {KVQ_E_PERMISSION, 6}, {KVQ_E_DRAINING, 1}};
    char out[4096];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(run_with(f, ANSWER, cases[i].status, "because of this",
                                  "session drop a --exact", out, sizeof out),
                         cases[i].exit);
        assert_non_null(strstr(out, "because of this"));
        assert_int_equal(f->daemon.last, KVQ__REQUEST__COMMAND_DROP_SESSION);
        assert_string_equal(f->daemon.last_name, "a");
    }
}

static void test_silence_and_nonsense(void **state)
{
    struct fixture *f = *state;
    char out[4096];
    assert_int_equal(run_with(f, SILENT, 0, "", "--timeout 100 ping", out, sizeof out), 4);
    assert_non_null(strstr(out, "100 ms"));
    assert_int_equal(run_with(f, GARBAGE, 0, "", "ping", out, sizeof out), 1);
    assert_int_equal(run_with(f, OTHER_RESULT, 0, "", "status", out, sizeof out), 1);
    assert_int_equal(run_with(f, STALE_ID_FIRST, 0, "", "ping", out, sizeof out), 0);
    assert_non_null(strstr(out, "9.9.9"));
    assert_int_equal(f->daemon.requests, 2);
}

// Nobody waits for a daemon that has ended: not for an hour, as a save may take.
static void test_end_of_the_daemon(void **state)
{
    struct fixture *f = *state;
    char out[4096];
    assert_int_equal(run_with(f, ENDS, 0, "", "--timeout 600000 ping", out, sizeof out), 3);
    assert_non_null(strstr(out, "has ended before it answered"));
    assert_int_equal(run_with(f, ANSWERS_AND_ENDS, 0, "", "session list", out, sizeof out), 0);
    assert_non_null(strstr(out, "chat"));
}

static void test_session_json(void **state)
{
    struct fixture *f = *state;
    static const char *const wanted[] = {"\"tokens\":\t4096",
                                         "\"format\":\t\"mymix\"",
                                         "\"layer_formats\":\t\"0-1:k8v4, 2-31:oscar2\"",
                                         "\"bits_per_value\":\t3.0625",
                                         "\"bytes_per_token_head\":\t98",
                                         "\"compression\":\t4.25",
                                         "\"bytes_per_token_head_total\":\t120.5",
                                         "\"full_precision_tokens\":\t128",
                                         "\"packed_bytes\":\t1099511627776"};
    char out[8192];
    assert_int_equal(run_with(f, ANSWER, 0, "", "session show chat --json", out, sizeof out), 0);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        assert_non_null(strstr(out, wanted[i]));
    assert_string_equal(f->daemon.last_name, "chat");
    assert_int_equal(run_with(f, ANSWER, 0, "", "session list --json", out, sizeof out), 0);
    assert_int_equal(out[0], '[');
}

static void test_formats(void **state)
{
    struct fixture *f = *state;
    char out[8192];
    assert_int_equal(run_with(f, ANSWER, 0, "", "format list", out, sizeof out), 0);
    assert_non_null(strstr(out, "mymix *            2-31    oscar2            3.062  yes  "));
    assert_non_null(strstr(out, "* begin with these; quality.md"));
    assert_null(strstr(out, "GPU")); // of no format there is anything to say
    assert_int_equal(run_with(f, ANSWER, 0, "", "format list --columns gpu", out, sizeof out), 0);
    assert_non_null(strstr(out, "GPU\n no\n"));
    assert_int_equal(run_with(f, ANSWER, 0, "", "format list --csv", out, sizeof out), 0);
    assert_non_null(strstr(out, "bits,fast,gpu,prefix,needs,unit")); // scripts get all of them
    assert_int_equal(run_with(f, ANSWER, 0, "", "format list --json", out, sizeof out), 0);
    assert_non_null(strstr(out, "\"bits_per_value\":\t3.0625"));
    compression = 0.25;
    assert_int_equal(run_with(f, ANSWER, 0, "", "session show chat", out, sizeof out), 0);
    assert_non_null(strstr(out, "120.5 with everything; 4.00 times larger than 16 bits\n"));
    compression = 0; // without tokens there is nothing to compare
    assert_int_equal(run_with(f, ANSWER, 0, "", "session show chat", out, sizeof out), 0);
    assert_non_null(strstr(out, "120.5 with everything\n"));
    compression = 4.25;
    assert_int_equal(run_with(f, ANSWER, 0, "", "session show chat", out, sizeof out), 0);
    assert_non_null(strstr(out, "120.5 with everything; 4.25 times smaller than 16 bits\n"));
    assert_non_null(strstr(out, "format      mymix, 3.062"));
    assert_non_null(strstr(out, "layers      0-1:k8v4, 2-31:oscar2\n"));
    assert_non_null(strstr(out, "V           rotated by the daemon when packed, in some layers,"));
    assert_non_null(strstr(out, "state       on disk, pinned, 2 readers\n"));
}

// A key has no namespace: what a command would do there, no preview guesses.
static void test_previews_by_key(void **state)
{
    struct fixture *f = *state;
    static const char *const words[] = {"session drop a", "session pull a", "remote remove a",
                                        "session export a /b"};
    char out[1024], line[128];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        snprintf(line, sizeof line, "%s --dry-run --connect 127.0.0.1:1", words[i]);
        assert_int_equal(run(f, line, out, sizeof out), 2);
        assert_non_null(strstr(out, "name the session's, --namespace NAME\n"));
    }
}

// One is one session, and two are two sessions.
static void test_numbers(void **state)
{
    struct fixture *f = *state;
    static const char *const wanted[2][8] = {
        {", 1 worker\n", "1 session with 0 tokens, for 1 client\n", "1 client kicked\n",
         "failed to; 1 session there now\n", "came back; 1 session there now\n",
         "1 packed before its end, for room", "for room   1 request waited, ",
         " refused; 1 session could not go\n"},
        {", 2 workers\n", "2 sessions with 0 tokens, for 2 clients\n", "2 clients kicked\n",
         "failed to; 2 sessions there now\n", "came back; 2 sessions there now\n",
         "2 packed before their ends, for room", "for room   2 requests waited, ",
         " refused; 2 sessions could not go\n"}};
    char out[8192];
    for (each = 1; each <= 2; each++) {
        assert_int_equal(run_with(f, ANSWER, 0, "", "status", out, sizeof out), 0);
        for (size_t i = 0; i < 8; i++)
            if (!strstr(out, wanted[each - 1][i]))
                fail_msg("no \"%s\" in: %s", wanted[each - 1][i], out);
    }
    each = 0;
    assert_int_equal(run_with(f, ANSWER, 0, "", "status", out, sizeof out), 0);
    assert_null(strstr(out, "for room"));
}

// Nobody takes a part for the whole, neither people nor scripts.
static void test_cut_lists(void **state)
{
    struct fixture *f = *state;
    static const char *const lists[] = {"session list", "format list", "client list",  "quota list",
                                        "storage list", "remote list", "prefix status"};
    char out[8192], command[64];
    for (size_t i = 0; i < 2 * sizeof lists / sizeof *lists; i++) {
        snprintf(command, sizeof command, "%s%s", lists[i / 2], i % 2 ? " --json" : "");
        assert_int_equal(run_with(f, CUT_LISTS, 0, "", command, out, sizeof out), 1);
        if (!strstr(out, "the list is not whole"))
            fail_msg("%s said: %s", command, out);
    }
    assert_int_equal(run_with(f, ANSWER, 0, "", "session list", out, sizeof out), 0);
    assert_null(strstr(out, "not whole"));
}

// Pages are one list, for people, scripts and top; a daemon that goes in a circle is not followed.
static void test_pages(void **state)
{
    struct fixture *f = *state;
    char out[65536];
    assert_int_equal(run_with(f, PAGES, 0, "", "session list", out, sizeof out), 0);
    assert_int_equal(f->daemon.requests, 3);
    uint32_t lines = 0;
    for (const char *at = out; (at = strchr(at, '\n')); at++)
        lines++;
    assert_int_equal(lines, 5);
    assert_int_equal(run_with(f, PAGES, 0, "", "session list --json", out, sizeof out), 0);
    assert_non_null(strstr(out, "\"id\":\t100"));
    assert_non_null(strstr(out, "\"id\":\t101"));
    assert_null(strstr(out, "\"id\":\t102"));
    assert_non_null(strstr(out, "\"id\":\t105"));
    assert_int_equal(run_with(f, PAGES, 0, "", "top --count 1 --json", out, sizeof out), 0);
    assert_non_null(strstr(out, "\"id\":105"));
    assert_int_equal(f->daemon.requests, 4);
    assert_int_equal(run_with(f, CIRCLE, 0, "", "session list", out, sizeof out), 1);
    assert_non_null(strstr(out, "not whole"));
    assert_int_equal(f->daemon.requests, 2);
}

// Names come from other users; none of their bytes may steer a terminal.
static void test_escapes_are_tamed(void **state)
{
    struct fixture *f = *state;
    char out[8192];
    assert_int_equal(run_with(f, ESCAPES, 0, "", "session list", out, sizeof out), 1);
    assert_null(strchr(out, '\033'));
    assert_int_equal(run_with(f, ANSWER, 0, "", "session list", out, sizeof out), 0);
    assert_non_null(strstr(out, "chat "));
}

// An earlier daemon has not done what was asked for: nothing says that it was pushed.
static void test_push_again(void **state)
{
    struct fixture *f = *state;
    char out[8192];
    assert_int_equal(run_with(f, ANSWER, 0, "", "session push it --again", out, sizeof out), 0);
    assert_non_null(strstr(out, "pushed it: "));
    assert_int_equal(run_with(f, KNOWS_NO_AGAIN, 0, "", "session push it --again", out, sizeof out),
                     1);
    assert_null(strstr(out, "pushed"));
    assert_non_null(strstr(out, "does not know --again"));
    assert_int_equal(run_with(f, KNOWS_NO_AGAIN, 0, "", "session push it", out, sizeof out), 0);
    assert_non_null(strstr(out, "pushed it: "));
}

static void test_top(void **state)
{
    struct fixture *f = *state;
    char out[16384];
    assert_int_equal(
        run_with(f, ANSWER, 0, "", "top --count 2 --interval 0.1 --json", out, sizeof out), 0);
    char *second = strchr(out, '\n');
    assert_non_null(second);
    assert_int_equal(second[1], '{');
    assert_int_equal(f->daemon.requests, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_no_daemon, setup, teardown),
        cmocka_unit_test_setup_teardown(test_socket_left_behind, setup, teardown),
        cmocka_unit_test_setup_teardown(test_usage, setup, teardown),
        cmocka_unit_test_setup_teardown(test_help_of_commands, setup, teardown),
        cmocka_unit_test_setup_teardown(test_texts_that_cannot_be_sent, setup, teardown),
        cmocka_unit_test_setup_teardown(test_suggestions, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_silence_and_nonsense, setup, teardown),
        cmocka_unit_test_setup_teardown(test_end_of_the_daemon, setup, teardown),
        cmocka_unit_test_setup_teardown(test_session_json, setup, teardown),
        cmocka_unit_test_setup_teardown(test_formats, setup, teardown),
        cmocka_unit_test_setup_teardown(test_previews_by_key, setup, teardown),
        cmocka_unit_test_setup_teardown(test_numbers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cut_lists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pages, setup, teardown),
        cmocka_unit_test_setup_teardown(test_escapes_are_tamed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_push_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_top, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
