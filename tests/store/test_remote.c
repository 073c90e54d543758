// SPDX-License-Identifier: Apache-2.0
//
// The remote tier against servers that misbehave, on loopback: what they answer is written out
// here. Every answer must end in success or in an error with a sentence.
#include <dlfcn.h>
#include <netdb.h>
#include <pthread.h>

#include "tests/store/remote_check.h"

// ---- Answers to a GET of a small object ----

struct get_case {
    struct script_reply reply;
    int code;
    const char *words; // in the sentence
    int asked;         // times
};

static const struct get_case get_cases[] = {
    // The body is shorter than it was said to be, longer than is allowed, or has no end.
    {{.bytes = OK "Content-Length: 10\r\n\r\nabc"}, KVQ_E_REMOTE, "after 4 tries", 4},
    {{.bytes = OK "Content-Length: 101\r\n\r\nabc"}, KVQ_E_REMOTE, "", 4},
    {{.bytes = OK "\r\n", .end = SCRIPT_ENDLESS}, KVQ_E_REMOTE, "longer than the 100 bytes", 1},
    {{.bytes = OK "Content-Length: 99999999999\r\n\r\n", .end = SCRIPT_ENDLESS},
     KVQ_E_REMOTE,
     "longer than",
     1},
    {{.bytes = OK "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nx"},
     KVQ_E_REMOTE,
     "",
     4},
    {{.bytes = OK "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"}, KVQ_E_REMOTE, "", 4},
    {{.bytes = "HTTP/1.1 500 Broken\r\n\r\n", .end = SCRIPT_ENDLESS}, KVQ_E_REMOTE, "500", 4},
    // Nothing comes, or nearly nothing.
    {{.bytes = ""}, KVQ_E_REMOTE, "after 4 tries; check the endpoint", 4},
    {{.bytes = "\r\n\r\n"}, KVQ_E_REMOTE, "", 4},
    {{.bytes = "SSH-2.0-OpenSSH_9.2\r\n"}, KVQ_E_REMOTE, "", 4},
    {{.bytes = OK}, KVQ_E_REMOTE, "names no length", 1},
    {{.bytes = OK "\r\ncut here"}, KVQ_E_REMOTE, "names no length", 1},
    // Somewhere else, which is not gone to.
    {{.bytes = "HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\n\r\n"},
     KVQ_E_REMOTE,
     "redirects are not followed",
     1},
    {{.bytes = "HTTP/1.1 307 Moved\r\nLocation: file:///etc/passwd\r\n\r\n"},
     KVQ_E_REMOTE,
     "307",
     1},
    // Refusals, with and without words, and with words that are none.
    {{.bytes = "HTTP/1.1 403 No\r\n\r\n"}, KVQ_E_PERMISSION, "check the keys", 1},
    {{.bytes = "HTTP/1.1 403 No\r\n\r\n<Error><Code>RequestTimeTooSkewed</Code></Error>"},
     KVQ_E_PERMISSION,
     "set this machine's clock",
     1},
    {{.bytes = "HTTP/1.1 404 No\r\n\r\n<Error><Code>NoSuchKey</Code></Error>"},
     KVQ_E_NO_SESSION,
     "NoSuchKey",
     1},
    {{.bytes = "HTTP/1.1 400 No\r\n\r\n<Error><Code>\x01\x02"}, KVQ_E_REMOTE, "HTTP 400", 1},
    {{.bytes = "HTTP/1.1 400 No\r\n\r\n<!DOCTYPE x [<!ENTITY a \"aaaaaaaaaaaaaaaa\">"
               "<!ENTITY b \"&a;&a;&a;&a;\">]><Error><Code>&b;</Code></Error>"},
     KVQ_E_REMOTE,
     "HTTP 400",
     1},
    {{.bytes = "HTTP/1.1 400 No\r\n\r\n<Error><Code>RequestTimeout</Code></Error>"},
     KVQ_E_REMOTE,
     "RequestTimeout",
     4},
    {{.bytes = BUSY}, KVQ_E_REMOTE, "SlowDown: Please wait, after 4 tries; try again later", 4},
    {{.bytes = "HTTP/1.1 206 Part\r\nContent-Length: 2\r\n\r\nab"}, KVQ_E_REMOTE, "a part", 1},
};

PLAIN_TEST(bad_answers_end_in_errors)
{
    for (size_t i = 0; i < sizeof get_cases / sizeof *get_cases; i++) {
        const struct get_case *c = &get_cases[i];
        void *data = NULL;
        size_t n = 0;
        begin(&c->reply, 1);
        int rc = kvq_remote_get(remote, "x", 100, &data, &n, NULL, text, sizeof text);
        end();
        if (rc != c->code || server.n_asked != c->asked || data || !strstr(text, c->words))
            fail_msg("case %zu: %s after %d requests: %s", i, kvq_status_name(rc), server.n_asked,
                     text);
    }
}

PLAIN_TEST(a_server_that_stalls_is_left)
{
    static const struct script_reply hang = {.bytes = "", .end = SCRIPT_HANG};
    static const struct script_reply drip = {.bytes = OK "Content-Length: 50\r\n\r\n",
                                             .end = SCRIPT_DRIP};
    for (int i = 0; i < 2; i++) {
        void *data;
        size_t n;
        script_start(&server, i ? &drip : &hang, 1);
        test_clock_init(&test_clock);
        struct kvq_remote_options o = remote_options(server.port, &test_clock);
        o.stall_ms = 150;
        o.retries = -1;
        open_with(&o);
        assert_int_equal(kvq_remote_get(remote, "x", 100, &data, &n, NULL, text, sizeof text),
                         KVQ_E_REMOTE);
        assert_says(text, "moved for too long");
        end();
    }
}

PLAIN_TEST(nobody_listens)
{
    static const struct script_reply none = {.bytes = ""};
    begin(&none, 1);
    script_stop(&server);
    assert_int_equal(kvq_remote_put(remote, "x", "y", 1, NULL, text, sizeof text), KVQ_E_REMOTE);
    assert_says(text, "after 4 tries; check the endpoint, and that the store is up");
    kvq_remote_close(&remote);
}

// ---- Trying again ----

PLAIN_TEST(tries_are_spread_in_time)
{
    static const struct script_reply replies[] = {
        {.bytes = BUSY},
        {.bytes = ""},
        {.bytes = "HTTP/1.1 503 Wait\r\nRetry-After: 7\r\n\r\n"},
        {.bytes = OK "Content-Length: 2\r\n\r\nhi"},
    };
    void *data;
    size_t n;
    begin(replies, 4);
    assert_int_equal(kvq_remote_get(remote, "x", 100, &data, &n, NULL, text, sizeof text), 0);
    assert_memory_equal(data, "hi", 3);
    free(data);
    end();
    assert_int_equal(test_clock.waits, 3);
    assert_in_range(test_clock.slept[0], 100, 200);
    assert_in_range(test_clock.slept[1], 200, 400);
    assert_int_equal(test_clock.slept[2], 7000);
}

static int cancel(void *context, uint64_t done, uint64_t all)
{
    (void)context, (void)done, (void)all;
    return 1;
}

PLAIN_TEST(a_call_can_be_cancelled)
{
    static const struct script_reply hang = {.bytes = "", .end = SCRIPT_HANG};
    static const struct kvq_remote_watch watch = {cancel, NULL};
    begin(&hang, 1);
    assert_int_equal(kvq_remote_put(remote, "x", "y", 1, &watch, text, sizeof text),
                     KVQ_E_CANCELLED);
    assert_says(text, "cancelled");
    end();
    // Calls that take no watcher have the remote's.
    script_start(&server, &hang, 1);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    o.watch = watch;
    open_with(&o);
    assert_int_equal(kvq_remote_forget(remote, "u", "s", text, sizeof text), KVQ_E_CANCELLED);
    assert_int_equal(kvq_remote_delete(remote, "x", text, sizeof text), KVQ_E_CANCELLED);
    end();
}

// ---- A resolver that does not answer ----

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool asked, may_end, ended;
} resolver = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

typedef int resolve(const char *, const char *, const struct addrinfo *, struct addrinfo **);

// libcurl finds this one in place of the system's, on a thread of its own.
__attribute__((visibility("default"))) int getaddrinfo(const char *node, const char *service,
                                                       const struct addrinfo *hints,
                                                       struct addrinfo **found)
{
    struct timespec until;
    if (!node || strcmp(node, "nobody.invalid") != 0)
        return ((resolve *)dlsym(RTLD_NEXT, "getaddrinfo"))(node, service, hints, found);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 30; // where somebody waits for it, the test is to fail, and not to hang
    pthread_mutex_lock(&resolver.lock);
    resolver.asked = true;
    int rc = 0;
    while (!resolver.may_end && rc == 0)
        rc = pthread_cond_timedwait(&resolver.news, &resolver.lock, &until);
    resolver.ended = true;
    pthread_cond_broadcast(&resolver.news);
    pthread_mutex_unlock(&resolver.lock);
    return EAI_AGAIN;
}

static int cancel_once_asked(void *context, uint64_t done, uint64_t all)
{
    (void)context, (void)done, (void)all;
    pthread_mutex_lock(&resolver.lock);
    bool asked = resolver.asked;
    pthread_mutex_unlock(&resolver.lock);
    return asked;
}

PLAIN_TEST(a_resolver_is_not_waited_for)
{
    static const struct kvq_remote_watch watch = {cancel_once_asked, NULL};
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(1, &test_clock);
    o.endpoint = "http://nobody.invalid:1";
    open_with(&o);
    assert_int_equal(kvq_remote_put(remote, "x", "y", 1, &watch, text, sizeof text),
                     KVQ_E_CANCELLED);
    pthread_mutex_lock(&resolver.lock);
    assert_true(resolver.asked && !resolver.ended);
    resolver.may_end = true;
    pthread_cond_broadcast(&resolver.news);
    while (!resolver.ended)
        pthread_cond_wait(&resolver.news, &resolver.lock);
    pthread_mutex_unlock(&resolver.lock);
    kvq_remote_close(&remote);
}

// ---- What is sent ----

PLAIN_TEST(requests_are_signed)
{
    static const struct script_reply good = {.bytes = OK "Content-Length: 0\r\n\r\n"};
    script_start(&server, &good, 1);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    o.region = "eu-west-7";
    o.prefix = "a/b";
    snprintf(o.keys.token, sizeof o.keys.token, "temporary-token");
    open_with(&o);
    assert_int_equal(kvq_remote_put(remote, "c", "hello", 5, NULL, text, sizeof text), 0);
    end();
    const char *asked = server.asked[0];
    assert_true(strncmp(asked, "PUT /sessions/a/b/c HTTP/1.1\r\n", 30) == 0);
    assert_says(asked, "AWS4-HMAC-SHA256 Credential=" REMOTE_ID "/");
    assert_says(asked, "/eu-west-7/s3/aws4_request");
    assert_says(asked, "SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date;"
                       "x-amz-security-token");
    assert_says(asked, "x-amz-security-token: temporary-token\r\n");
    assert_says(asked, "x-amz-content-sha256: 2cf24dba5fb0a30e26e83b2ac5b9e29e"
                       "1b161e5c1fa7425e73043362938b9824\r\n"); // of "hello"
    assert_says(asked, "\r\n\r\nhello");
    assert_null(strstr(asked, REMOTE_SECRET));
}

PLAIN_TEST(the_bucket_may_be_in_the_name)
{
    static const struct script_reply good = {.bytes = OK "Content-Length: 0\r\n\r\n"};
    char endpoint[64];
    script_start(&server, &good, 1);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    snprintf(endpoint, sizeof endpoint, "http://localhost:%d", server.port);
    o.endpoint = endpoint;
    o.virtual_host = true;
    setenv("no_proxy", "localhost,sessions.localhost", 1);
    open_with(&o);
    assert_int_equal(kvq_remote_put(remote, "c", "", 0, NULL, text, sizeof text), 0);
    end();
    assert_true(strncmp(server.asked[0], "PUT /c HTTP/1.1\r\nHost: sessions.localhost:", 42) == 0);
}

// ---- Uploads ----

struct push_case {
    const char *words;      // in the sentence
    const char *replies[8]; // behind a head and data that are not there
};

static const struct push_case push_cases[] = {
    {"makes no sense", {"HTTP/1.1 200 OK\r\n\r\n<html>It works!</html>"}},
    {"makes no sense", {XML "<ListMultipartUploadsResult>"}},
    {"elements where there should be text",
     {XML "<ListMultipartUploadsResult><Upload><Key><a/></Key></Upload></"
          "ListMultipartUploadsResult>"}},
    {"names no upload", {NO_UPLOADS, XML "<InitiateMultipartUploadResult/>"}},
    {"no ETag", {NO_UPLOADS, BEGUN, OK "Content-Length: 0\r\n\r\n"}},
    {"no ETag that can be used",
     {NO_UPLOADS, BEGUN, OK "ETag: </ETag><x>\r\nContent-Length: 0\r\n\r\n"}},
    // It says 200 and then that it failed.
    {"InternalError: oh",
     {NO_UPLOADS, BEGUN, PART_DONE, PART_DONE,
      XML "<Error><Code>InternalError</Code><Message>oh</Message></Error>"}},
    // It says that all is well, and has less than it was given.
    {"has 5 bytes of",
     {NO_UPLOADS, BEGUN, PART_DONE, PART_DONE, XML "<CompleteMultipartUploadResult/>",
      OK "Content-Length: 5\r\n\r\n"}},
    {"names no length",
     {NO_UPLOADS, BEGUN, PART_DONE, PART_DONE, XML "<CompleteMultipartUploadResult/>", OK "\r\n"}},
    // It forgets the upload each time.
    {"forgets uploads",
     {NO_UPLOADS, BEGUN, "HTTP/1.1 404 No\r\n\r\n<Error><Code>NoSuchUpload</Code></Error>", ABSENT,
      BEGUN, "HTTP/1.1 404 No\r\n\r\n<Error><Code>NoSuchUpload</Code></Error>", ABSENT}},
};

PLAIN_TEST(bad_uploads_end_in_errors)
{
    make_file(source, KVQ_REMOTE_PART_MIN + 10, 1);
    for (size_t i = 0; i < sizeof push_cases / sizeof *push_cases; i++) {
        const struct push_case *c = &push_cases[i];
        struct script_reply replies[10] = {{.bytes = ABSENT}, {.bytes = ABSENT}};
        int count = 2;
        for (int k = 0; k < 8 && c->replies[k]; k++)
            replies[count++].bytes = c->replies[k];
        int rc = push_to(replies, count);
        if (rc != KVQ_E_REMOTE || !strstr(text, c->words))
            fail_msg("case %zu, \"%s\": %s: %s", i, c->words, kvq_status_name(rc), text);
        for (int k = 0; k < server.n_asked && k < SCRIPT_REQUESTS; k++)
            assert_null(strstr(server.asked[k], "PUT /sessions/s/n/head")); // never the head
    }
}

// The reply to "complete" got lost, the repeated request finds no upload, and all is well.
PLAIN_TEST(a_lost_reply_is_no_failure)
{
    static const struct script_reply replies[] = {
        {.bytes = ABSENT},
        {.bytes = ABSENT},
        {.bytes = NO_UPLOADS},
        {.bytes = BEGUN},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = ""},
        {.bytes = "HTTP/1.1 404 No\r\n\r\n<Error><Code>NoSuchUpload</Code></Error>"},
        {.bytes = OK "Content-Length: 65546\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = NO_UPLOADS},
    };
    make_file(source, KVQ_REMOTE_PART_MIN + 10, 1);
    pushed_to(replies, 11);
    assert_says(server.asked[4], "partNumber=1&uploadId=id%2F1");
    assert_says(server.asked[6], "<PartNumber>2</PartNumber><ETag>\"e\"</ETag>");
    assert_says(server.asked[9], "PUT /sessions/s/n/head");
}

// AWS may say 200, and then that it failed: what would be tried again with status 500 is here, too.
PLAIN_TEST(a_late_failure_is_tried_again)
{
    static const struct script_reply replies[] = {
        {.bytes = ABSENT},
        {.bytes = ABSENT},
        {.bytes = NO_UPLOADS},
        {.bytes = BEGUN},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = XML "<Error><Code>InternalError</Code><Message>oh</Message></Error>"},
        {.bytes = XML "<Error><Code>SlowDown</Code><Message>ah</Message></Error>"},
        {.bytes = XML "<CompleteMultipartUploadResult/>"},
        {.bytes = OK "Content-Length: 65546\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = NO_UPLOADS},
    };
    make_file(source, KVQ_REMOTE_PART_MIN + 10, 1);
    pushed_to(replies, 12);
    assert_int_equal(test_clock.waits, 2);
    assert_says(server.asked[8], "<CompleteMultipartUpload>");
    assert_says(server.asked[10], "PUT /sessions/s/n/head");
}

// Parts that a server has from before, and does not like in the end, are sent again.
PLAIN_TEST(a_refused_upload_is_begun_anew)
{
    static const struct script_reply replies[] = {
        {.bytes = ABSENT},
        {.bytes = ABSENT},
        {.bytes = XML "<ListMultipartUploadsResult><Upload><Key>other</Key><UploadId>z</UploadId>"
                      "</Upload><Upload><Key>KEY</Key><UploadId>old</UploadId></Upload>"
                      "</ListMultipartUploadsResult>"},
        {.bytes = XML "<ListPartsResult><Part><PartNumber>1</PartNumber><Size>65536</Size>"
                      "<ETag>\"a\"</ETag></Part><Part><PartNumber>2</PartNumber><Size>9</Size>"
                      "<ETag>\"b\"</ETag></Part></ListPartsResult>"},
        {.bytes = PART_DONE}, // of part 2, whose size was wrong
        {.bytes = "HTTP/1.1 400 No\r\n\r\n<Error><Code>InvalidPart</Code></Error>"},
        {.bytes = "HTTP/1.1 204 Gone\r\n\r\n"},
        {.bytes = ABSENT},
        {.bytes = BEGUN},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = XML "<CompleteMultipartUploadResult/>"},
        {.bytes = OK "Content-Length: 65546\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = NO_UPLOADS},
    };
    enum { COUNT = sizeof replies / sizeof *replies };
    // The key is known once a push has asked for it.
    char uploads[1024], key[256];
    struct script_reply filled[COUNT];
    make_file(source, KVQ_REMOTE_PART_MIN + 10, 1);
    assert_int_not_equal(push_to(replies, 2), 0);
    assert_int_equal(sscanf(server.asked[1], "HEAD /sessions/%255s ", key), 1);
    const char *hole = strstr(replies[2].bytes, "KEY");
    snprintf(uploads, sizeof uploads, "%.*s%s%s", (int)(hole - replies[2].bytes), replies[2].bytes,
             key, hole + 3);
    memcpy(filled, replies, sizeof replies);
    filled[2].bytes = uploads;
    pushed_to(filled, COUNT);
    assert_says(server.asked[3], "?uploadId=old");
    assert_says(server.asked[4], "?partNumber=2&uploadId=old");
    assert_says(server.asked[5], "<ETag>\"a\"</ETag>");
    assert_says(server.asked[6], "DELETE /sessions/s/n/data/");
    assert_says(server.asked[9], "?partNumber=1&uploadId=id%2F1");
    assert_int_equal(server.n_asked, COUNT);
    assert_int_equal(moved.bytes, KVQ_REMOTE_PART_MIN + 10);
}

// ---- Downloads ----

#define HEX32 "0123456789abcdef0123456789abcdef"
#define PACKS "kvq-session 2\nbytes 10\npacks 1\n" HEX32 HEX32 " 10\n"
#define HEAD  "kvq-session 1\nbytes 10\npart 65536\n" HEX32 HEX32 "\nend\n"

struct pull_case {
    const char *replies[3]; // bodies, unless they start with HTTP/
    int code;
    const char *words;
};

static const struct pull_case pull_cases[] = {
    {{"nonsense"}, KVQ_E_DAMAGED, "not the head of a session"},
    {{"kvq-session 3\n"}, KVQ_E_VERSION, "newer version"},
    {{PACKS "chunks 1\n10 1 0 " HEX32 HEX32 "\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{PACKS "chunks 1\n10 0 1 " HEX32 HEX32 "\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{PACKS "chunks 1\n9 0 0 " HEX32 HEX32 "\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{PACKS "chunks 2\n10 0 0 " HEX32 HEX32 "\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{PACKS "chunks 1\n10 0 0 " HEX32 HEX32 "\nend\n", "0123456789"},
     KVQ_E_DAMAGED,
     "wrong checksum, 3 times"},
    {{"kvq-session 1\nbytes 10\npart 65536\n" HEX32 "\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{"kvq-session 1\nbytes 9223372036854775807\npart 1\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{"kvq-session 1\nbytes 10\npart 0\nend\n"}, KVQ_E_DAMAGED, "head"},
    {{HEAD "x"}, KVQ_E_DAMAGED, "head"},
    {{HEAD, "0123456789"}, KVQ_E_DAMAGED, "wrong checksum, 3 times"},
    {{HEAD, "012345678"}, KVQ_E_REMOTE, "were asked for"},
    {{HEAD, "0123456789a"}, KVQ_E_REMOTE, "longer than the 10 bytes"},
    {{HEAD, "HTTP/1.1 206 P\r\nContent-Range: bytes 1-10/11\r\n\r\n0123456789"},
     KVQ_E_DAMAGED,
     "it is 11 bytes long instead of 10"},
    {{HEAD, "HTTP/1.1 206 P\r\nContent-Range: bytes 0-9/nine\r\n\r\n0123456789"},
     KVQ_E_REMOTE,
     "does the store know ranges"},
    {{HEAD, ABSENT, HEAD}, KVQ_E_DAMAGED, "data is not there"},
    {{ABSENT}, KVQ_E_NO_SESSION, "404"},
};

PLAIN_TEST(bad_downloads_end_in_errors)
{
    for (size_t i = 0; i < sizeof pull_cases / sizeof *pull_cases; i++) {
        const struct pull_case *c = &pull_cases[i];
        struct script_reply replies[3] = {{0}};
        int count = 0;
        for (; count < 3 && c->replies[count]; count++) {
            bool raw = strncmp(c->replies[count], "HTTP/", 5) == 0;
            replies[count] = (struct script_reply){.bytes = c->replies[count],
                                                   .end = raw ? SCRIPT_CLOSE : SCRIPT_BODY};
        }
        unlink(part);
        begin(replies, count);
        int rc = kvq_remote_pull_file(remote, "s", "n", target, NULL, &moved, text, sizeof text);
        end();
        if (rc != c->code || !strstr(text, c->words))
            fail_msg("case %zu: %s: %s", i, kvq_status_name(rc), text);
        assert_int_not_equal(access(target, F_OK), 0);
    }
}

// ---- Lists without end ----

static int count_one(void *context, const struct kvq_remote_object *object)
{
    ++*(int *)context;
    return 0;
}

PLAIN_TEST(lists_have_an_end)
{
    static const struct script_reply again = {
        .bytes = XML "<ListBucketResult><Contents><Key>a</Key></Contents><IsTruncated>true"
                     "</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
                     "</ListBucketResult>"};
    int n = 0;
    begin(&again, 1);
    assert_int_equal(kvq_remote_list(remote, "", "", count_one, &n, text, sizeof text),
                     KVQ_E_REMOTE);
    assert_says(text, "no end");
    end();
    assert_int_equal(n, 2);
}

// A server of the first version of lists says that there is more, and not how to get it: what it
// does not list is not to look as if it were not there.
PLAIN_TEST(a_list_that_is_cut_is_none)
{
    static const struct script_reply cut = {
        .bytes = XML "<ListBucketResult><Contents><Key>a</Key></Contents><IsTruncated>true"
                     "</IsTruncated></ListBucketResult>"};
    int n = 0;
    begin(&cut, 1);
    assert_int_equal(kvq_remote_list(remote, "", "", count_one, &n, text, sizeof text),
                     KVQ_E_REMOTE);
    assert_says(text, "does the store know ListObjectsV2");
    end();
}

static int note_session(void *context, const char *space, const char *name, uint64_t bytes)
{
    char *all = context;
    size_t used = strlen(all);
    snprintf(all + used, 256 - used, "[%s|%s|%d]", space, name, (int)bytes);
    return 0;
}

// A list goes on behind a session, also where the server does not know how to.
PLAIN_TEST(lists_go_on)
{
    static const struct script_reply all = {
        .bytes = XML "<ListBucketResult>" KEY("s/a/data/1", "5") KEY("s/a/head", "1")
            KEY("s/b/data/1", "7") KEY("s/b/head", "1")
                KEY("s/c/head", "1") "<IsTruncated>false</IsTruncated></ListBucketResult>"};
    static const struct kvq_remote_name names[] = {{"s", "a"}, {"s", "bb"}, {"s", ""}};
    char found[256] = "";
    begin(&all, 1);
    assert_int_equal(kvq_remote_sessions(remote, "s", NULL, note_session, found, text, sizeof text),
                     0);
    assert_string_equal(found, "[s|a|5][s|b|7][s|c|0]");
    found[0] = '\0';
    assert_int_equal(
        kvq_remote_sessions(remote, "s", &names[0], note_session, found, text, sizeof text), 0);
    assert_string_equal(found, "[s|b|7][s|c|0]");
    found[0] = '\0';
    assert_int_equal( // one that is gone
        kvq_remote_sessions(remote, NULL, &names[1], note_session, found, text, sizeof text), 0);
    assert_string_equal(found, "[s|c|0]");
    assert_int_equal(
        kvq_remote_sessions(remote, "s", &names[2], note_session, found, text, sizeof text),
        KVQ_E_INVALID);
    end();
    assert_null(strstr(server.asked[0], "start-after"));
    assert_says(server.asked[1], "prefix=s%2F&start-after=s%2Fa%2Fhead");
    assert_says(server.asked[2], "start-after=s%2Fbb%2Fhead");
}

// ---- Documents ----

PLAIN_TEST(documents_without_sense_are_refused)
{
    static const char *const bad[] = {
        "",
        "<a>",
        "<!DOCTYPE a><a></a>",
        "<!DOCTYPE a [<!ENTITY b \"c\">]><Error><Code>&b;</Code></Error>",
        "<ListPartsResult><Part><PartNumber>-1</PartNumber></Part></ListPartsResult>",
        "<ListPartsResult><Part><Size>9223372036854775808</Size></Part></ListPartsResult>",
        "<a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a></a></a></a></a></a></a></a></a></a></"
        "a>"
        "</a></a></a></a></a></a></a>",
    };
    struct kvq__reply reply;
    const char *why;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        why = NULL;
        if (kvq__reply_parse(bad[i], strlen(bad[i]), &reply, NULL, NULL, &why) != KVQ_E_REMOTE ||
            !why)
            fail_msg("document %zu was taken", i);
    }
    char longer[2000] = "<Error><UploadId>";
    memset(longer + 17, 'u', KVQ__UPLOAD_BYTES);
    snprintf(longer + 17 + KVQ__UPLOAD_BYTES, 100, "</UploadId></Error>");
    assert_int_equal(kvq__reply_parse(longer, strlen(longer), &reply, NULL, NULL, &why),
                     KVQ_E_REMOTE);
}

// ---- Options and keys ----

static void does_not_open(struct kvq_remote_options o, int code, const char *what)
{
    int rc = kvq_remote_open(&o, &remote, text, sizeof text);
    if (rc != code)
        fail_msg("%s: %s", what, kvq_status_name(rc));
    assert_null(strstr(text, ":p@"));
}

PLAIN_TEST(bad_options_are_named)
{
    struct kvq_remote_options good = remote_options(1, &test_clock);
    static const char *const endpoints[] = {"ftp://h",       "http://",    "http://u:p@h",
                                            "http://h/path", "http://h?q", "",
                                            "h h",           "http://h#x"};
    for (size_t i = 0; i < sizeof endpoints / sizeof *endpoints; i++)
        does_not_open(WITH(good, endpoint = endpoints[i]), KVQ_E_INVALID, endpoints[i]);
    static const char *const prefixes[] = {"/a", "a//b", "../a", "a/./b", "a b", "a%2f"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        does_not_open(WITH(good, prefix = prefixes[i]), KVQ_E_INVALID, prefixes[i]);
    does_not_open(WITH(good, bucket = "Has Capitals"), KVQ_E_INVALID, "Has Capitals");
    does_not_open(WITH(good, keys.secret[0] = '\0'), KVQ_E_PERMISSION, "no secret");
    open_with(&good);
    assert_int_equal(kvq_remote_delete(remote, "a/../b", text, sizeof text), KVQ_E_INVALID);
    kvq_remote_close(&remote);
}

static int load(const char *content, mode_t mode, struct kvq_remote_keys *keys)
{
    FILE *file = fopen(source, "w");
    assert_non_null(file);
    fputs(content, file);
    fclose(file);
    chmod(source, mode);
    return kvq_remote_keys_load(source, NULL, keys, text, sizeof text);
}

PLAIN_TEST(keys_come_from_files_and_variables)
{
    static const char good[] = "[other]\naws_access_key_id = no\n[default]\n"
                               "aws_access_key_id = ID\naws_secret_access_key = S/+=x\n";
    struct kvq_remote_keys keys;
    assert_int_equal(load(good, 0600, &keys), 0);
    assert_string_equal(keys.id, "ID");
    assert_string_equal(keys.secret, "S/+=x");
    char token[1001], with_token[1200];
    memset(token, 'T', sizeof token - 1);
    memcpy(token + sizeof token - 3, "==", 3); // as base64 ends
    snprintf(with_token, sizeof with_token, "; of a role\n%saws_session_token=%s\r\n", good, token);
    assert_int_equal(load(with_token, 0600, &keys), 0);
    assert_string_equal(keys.token, token);
    assert_int_equal(load(good, 0644, &keys), KVQ_E_PERMISSION);
    assert_says(text, "chmod 600");
    assert_int_equal(load("[other]\n", 0600, &keys), KVQ_E_INVALID);
    assert_int_equal(load("[default]\nrubbish\n", 0600, &keys), KVQ_E_INVALID);
    assert_says(text, "line 2");
    assert_null(strstr(text, "rubbish")); // it may have been a key
    unsetenv("AWS_ACCESS_KEY_ID");
    assert_int_equal(kvq_remote_keys_load(NULL, NULL, &keys, text, sizeof text), KVQ_E_PERMISSION);
    setenv("AWS_ACCESS_KEY_ID", "E", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "F", 1);
    assert_int_equal(kvq_remote_keys_load(NULL, NULL, &keys, text, sizeof text), 0);
    assert_string_equal(keys.secret, "F");
}

// ---- Leftovers ----

static void make_old(const char *name, int64_t seconds)
{
    static const char bytes[20000];
    char path[128];
    struct timespec times[2] = {{.tv_sec = time(NULL) - seconds}};
    times[1] = times[0];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, sizeof bytes, file), sizeof bytes);
    fclose(file);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

// Whether it is there; it is not, after.
static bool take_away(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return unlink(path) == 0;
}

static uint64_t on_disk(const char *name)
{
    char path[128];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(stat(path, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

PLAIN_TEST(leftovers_have_an_end)
{
    make_old("push-1-2.kvq", 1000);
    make_old("pull-2.kvq.part", 10);
    make_old("pull-3.kvq", 30);
    make_old("push-4-5.kvq", 20);
    make_old("push-6-7.kvq.tmp", 0);
    make_old("keep.kvq", 5000);
    make_old("pull-7.kvq.part", 6000);
    assert_int_equal(kvq_remote_sweep("/nowhere/at/all", NULL, 100, 2), 0);
    uint64_t bytes = on_disk("push-1-2.kvq") + on_disk("pull-3.kvq") + on_disk("push-6-7.kvq.tmp");
    assert_true(bytes > 0);
    assert_int_equal(kvq_remote_sweep(folder, "/far/pull-7.kvq", 100, 2), bytes);
    assert_false(take_away("push-1-2.kvq")); // too old
    assert_false(take_away("pull-3.kvq"));   // one too many
    assert_false(take_away("push-6-7.kvq.tmp"));
    assert_true(take_away("pull-2.kvq.part"));
    assert_true(take_away("push-4-5.kvq"));
    assert_true(take_away("keep.kvq")); // not ours
    assert_true(take_away("pull-7.kvq.part"));
}

int main(void)
{
    return run_all(start, stop);
}
