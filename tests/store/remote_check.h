// SPDX-License-Identifier: Apache-2.0
//
// What tests with a scripted server share: a remote that talks to it, and what its answers begin
// with.
#ifndef KVQ_TESTS_REMOTE_CHECK_H
#define KVQ_TESTS_REMOTE_CHECK_H

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/status.h"
#include "storage/remote_index.h"
#include "storage/remote_reply.h"
#include "tests/kits/unit.h"
#include "tests/store/remote_kit.h"

#define OK  "HTTP/1.1 200 OK\r\n"
#define XML OK "Content-Type: application/xml\r\n\r\n"
#define BUSY                                                                                       \
    "HTTP/1.1 503 Slow Down\r\n\r\n<Error><Code>SlowDown</Code><Message>Please\nwait"              \
    "</Message></Error>"
#define ABSENT     "HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
#define NO_UPLOADS XML "<ListMultipartUploadsResult></ListMultipartUploadsResult>"
#define BEGUN                                                                                      \
    XML "<InitiateMultipartUploadResult><UploadId>id/1</UploadId></InitiateMultipartUploadResult>"
#define PART_DONE        OK "ETag: \"e\"\r\nContent-Length: 0\r\n\r\n"
#define KEY(NAME, BYTES) "<Contents><Key>" NAME "</Key><Size>" BYTES "</Size></Contents>"
#define LIST(KEYS)       XML "<ListBucketResult>" KEYS "</ListBucketResult>"

static struct script server;
static struct test_clock test_clock;
static struct kvq_remote *remote;
static char text[512];
static struct kvq_remote_moved moved;

static void open_with(const struct kvq_remote_options *o)
{
    int rc = kvq_remote_open(o, &remote, text, sizeof text);
    if (rc != 0)
        fail_msg("%s: %s", kvq_status_name(rc), text);
}

static void begin(const struct script_reply *replies, int count)
{
    script_start(&server, replies, count);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    open_with(&o);
    text[0] = '\0';
}

static void end(void)
{
    kvq_remote_close(&remote);
    script_stop(&server);
    assert_null(strstr(text, REMOTE_SECRET));
}

// ---- A folder with a file to push ----

static char folder[] = "/tmp/kvq-remote-XXXXXX";
static char source[64], target[64], part[64];

static bool push_again; // all of it, over what is there

static int push(void)
{
    return kvq_remote_push_file(remote, source, "s", "n", push_again, NULL, &moved, text,
                                sizeof text);
}

// A push to a server that says this.
static inline int push_to(const struct script_reply *replies, int count)
{
    begin(replies, count);
    int rc = push();
    end();
    return rc;
}

// The same; the push works.
static inline void pushed_to(const struct script_reply *replies, int count)
{
    if (push_to(replies, count) != 0)
        fail_msg("%s", text);
}

static inline int start(void **state)
{
    assert_non_null(mkdtemp(folder));
    snprintf(source, sizeof source, "%s/source", folder);
    snprintf(target, sizeof target, "%s/target", folder);
    snprintf(part, sizeof part, "%s/target.part", folder);
    return 0;
}

static inline int stop(void **state)
{
    unlink(source);
    unlink(part);
    rmdir(folder);
    return 0;
}

#endif
