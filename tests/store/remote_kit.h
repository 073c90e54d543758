// SPDX-License-Identifier: Apache-2.0
//
// What tests of the remote tier share: a server that says what a test wants it to say, rclone as a
// real S3-compatible server, and a clock that does not wait. Everything is on loopback.
#ifndef KVQ_TESTS_REMOTE_KIT_H
#define KVQ_TESTS_REMOTE_KIT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "storage/remote.h"
#include "tests/kits/folder.h"

#define REMOTE_ID     "AKIDEXAMPLE"
#define REMOTE_SECRET "wJalrXUtnFEMI-secret-never-shown"
#define REMOTE_BUCKET "sessions"

// ---- A server with a script ----

enum script_end {
    SCRIPT_CLOSE,   // the connection is closed behind the bytes
    SCRIPT_BODY,    // the same, and headers of a good answer come before them
    SCRIPT_HANG,    // nothing follows, the connection stays
    SCRIPT_ENDLESS, // 64 KiB of 'x' follow again and again, for as long as somebody reads
    SCRIPT_DRIP,    // one byte follows, and one more every 20 ms
};

struct script_reply {
    const char *bytes;
    enum script_end end;
    size_t n; // of bytes; 0: up to the NUL
};

enum { SCRIPT_REQUESTS = 64 };

// Gives the replies one after the other, one to a connection; the last one again and again.
struct script {
    const struct script_reply *replies;
    int count, at_first;
    int port;
    // What was asked, up to 2 KiB each with a NUL; to be read after script_stop.
    char asked[SCRIPT_REQUESTS][2048];
    int n_asked;
    int listener;
    int wake[2];
    pthread_t thread;
};

void script_start(struct script *s, const struct script_reply *replies, int count);
// The same; it answers nobody until so many requests are there, each on a connection of its own.
void script_start_together(struct script *s, const struct script_reply *replies, int count,
                           int at_first);
void script_stop(struct script *s);

// ---- A clock that does not wait ----

struct test_clock {
    struct kvq_remote_clock clock;
    struct kvq_remote_clock *real; // now_ms is real: a stalled server has to be noticed
    uint32_t slept[64];            // whole waits, in ms, pieces added up
    int waits;
    uint32_t seed;
};
void test_clock_init(struct test_clock *c);

// ---- rclone ----

struct s3 {
    pid_t pid;
    int port, log;
    char folder[256]; // objects are files below folder/REMOTE_BUCKET
    char program[512];
};

// False, with the reason printed: there is no rclone that can serve S3.
bool s3_start(struct s3 *s);
void s3_kill(struct s3 *s);  // kill -9
void s3_again(struct s3 *s); // after s3_kill, on the same port with the same files
void s3_stop(struct s3 *s);  // and removes the folder

// ---- Both ----

// Options for a server on that port, with the clock, 3 retries, the smallest parts, one connection.
struct kvq_remote_options remote_options(int port, struct test_clock *clock);
// Makes a file of pseudo-random bytes.
void make_file(const char *path, size_t bytes, uint32_t seed);
bool same_file(const char *a, const char *b);

#endif
