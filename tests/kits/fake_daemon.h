// SPDX-License-Identifier: Apache-2.0
//
// A daemon that does what a test tells it to, in a thread: it speaks the attach protocol well
// enough for libkvq, and misbehaves at one chosen place.
#ifndef KVQ_TESTS_FAKE_DAEMON_H
#define KVQ_TESTS_FAKE_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

// What it does when requests are on a ring.
enum fake_ring {
    FAKE_ANSWER,          // completes each with success; every second entry fails with value 77
    FAKE_SILENT,          // takes nothing
    FAKE_CLOSE,           // closes the connection
    FAKE_LAST_WORD,       // completes, and closes the connection at once
    FAKE_REVERSED,        // waits for two, completes the second first
    FAKE_WRONG_SEQ,       // completes a request that was never made
    FAKE_TWICE,           // completes each two times
    FAKE_WRONG_COUNT,     // one result too many
    FAKE_WRONG_SLOTS,     // says that the message is longer than it is
    FAKE_POSITIVE_STATUS, // a status above 0
    FAKE_POSITIVE_RESULT, // the same, of the second entry
    FAKE_TAIL_FAR,        // claims more completions than the ring holds
    FAKE_TAIL_BACK,       // takes completions back
    FAKE_HEAD_AHEAD,      // claims to have taken more requests than were made
    FAKE_NO_ROOM,         // completes each; of the first append all entries fail with KVQ_E_QUOTA
};

struct fake_script {
    // Hello.
    int hello_status;
    uint32_t hello_fds; // descriptors beside it; the right number is 1
    uint32_t protocol;
    uint32_t page_magic;
    uint32_t page_bytes;
    bool unsealed;   // the page could shrink
    bool hello_only; // the reply holds no result
    // Every reply.
    bool silent;      // receives, never answers
    bool garbage;     // bytes that are no message
    bool stale_first; // before each reply one to an earlier call, with a descriptor
    bool late_first;  // holds the reply to the first command until that is cancelled
    int late_command; // it holds the first of this kind; 0: of any
    bool tells_again; // says that it tells of extents again
    bool deaf;        // takes nothing off the socket after the first queue
    bool hang_up;     // closes the connection instead of answering anything but hello
    bool farewell;    // says why (a reply with number 0), then closes
    // Queues.
    uint32_t queue_fds; // the right number is 4
    uint32_t ring_magic;
    enum fake_ring ring;
    // Buffers.
    bool buffers;         // makes them; else the reply holds no result
    bool no_memory;       // the descriptors beside them are none of memory
    uint32_t busy_closes; // so many requests to close one get no answer
    bool saves; // takes a second connection, and answers a save on either at fake_end_save
    int other_hello_status; // on the second connection
    bool other_hang_up;     // which it closes instead of answering anything but hello
    // In-context mode: one session of one layer, with 77 tokens.
    const char *isa;   // that it names; NULL: none
    int pool_status;   // of OpenPool
    uint32_t pool_fds; // descriptors beside its reply; the right number is 0
    uint32_t tables, layout;
    uint64_t span, extent_bytes;
    uint32_t table_magic, table_version, table_layers, table_pages;
    uint64_t table_tokens, table_bytes;
    uint32_t moving;      // so many attempts to open a table find that the session is being moved
    uint32_t layer_pages; // of the layer in the table; the right number is 1
    uint32_t repeat, source, codec; // of the layer's row
    uint32_t extents, extent_fds;   // numbers and descriptors that MapExtents answers
    uint32_t extent;                // the first of these numbers
    uint64_t extent_memory;         // bytes of an extent; 0: extent_bytes
    uint32_t step_extents;          // that a step on a ring says its sessions have
    uint32_t cpus;                  // shown in the page: enough of them let clients spin
    uint64_t epoch;
};

// A script without faults.
struct fake_script fake_good(void);

struct fake_daemon;

// Listens on DIR/attach.sock until fake_stop. Aborts the test program when the system fails it.
struct fake_daemon *fake_start(const char *dir, const struct fake_script *script);
void fake_stop(struct fake_daemon **daemon);
// Waits until a save has begun; ends it.
void fake_await_save(const struct fake_daemon *daemon);
void fake_end_save(const struct fake_daemon *daemon);
// Requests that were cancelled by their right number. Once a later call was answered.
uint32_t fake_cancels(const struct fake_daemon *daemon);
// Requests to close a buffer. Once a later call was answered.
uint32_t fake_closes(const struct fake_daemon *daemon);
// Sessions that were restored by the first connection. Once a later call was answered.
uint32_t fake_restores(const struct fake_daemon *daemon);
// Requests to close a queue. Once a later call was answered.
uint32_t fake_queue_closes(const struct fake_daemon *daemon);
// Appends on a ring. Once the last of them was answered.
uint32_t fake_appends(const struct fake_daemon *daemon);

#endif
