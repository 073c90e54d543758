// SPDX-License-Identifier: Apache-2.0
//
// The remote tier: objects on an S3-compatible store, and sessions pushed to it and pulled from it.
//
// What is stored for a session, below the configured prefix (names are escaped, see
// kvq_remote_session_key):
//
//   SPACE/NAME/head          a text that names the chunks of the session's export file (segment.h)
//                            with their SHA-256, see storage/remote_index.h
//   SPACE/NAME/data/DIGEST   packs of chunks, each of one push
//
// Promises
//   - A push is seen as a whole or not at all: the head is written after the data is complete, and
//     an upload in parts is no object until then. Before that the session pushed earlier is there.
//   - A pull gives a file whose every byte was checked against the head, and the store checks it
//     once more when it imports it. Until the end it has another name.
//   - What is there is not transferred: chunks that earlier pushes have brought, parts that the
//     server has of a push that broke, and chunks that the file of a pull has.
//   - Whatever a server answers ends in success, or in an error after a bounded time and with
//     bounded memory. Redirects are not followed: they would take data to a place nobody named.
//   - Keys are in no text and no file of ours, and are wiped from memory with the remote.
//
// Threads: everything blocks. A remote is for one thread at a time; several remotes may be used at
// the same time. One push or pull of a session at a time; that is the caller's affair.
//
// Functions return 0 or a negative KVQ_E code, with a sentence in text[n], and accept n = 0. It
// names the endpoint, bucket and key, what the server said, and what to do:
//   E_REMOTE      not reached, or it failed or answered nonsense   E_PERMISSION  it refuses us
//   E_NO_SESSION  no such object                                   E_DAMAGED     wrong checksums
//   E_CANCELLED   by the watcher                                   E_UNSUPPORTED built without curl
//   E_INVALID, E_LIMIT, E_NO_SPACE, E_BUSY, E_NO_MEMORY, E_SYSTEM  on this side
#ifndef KVQ_STORAGE_REMOTE_H
#define KVQ_STORAGE_REMOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "storage/io.h"

struct kvq_remote;
struct kvq_store;

enum {
    KVQ_REMOTE_KEY_BYTES = 1024, // of an object's key, a NUL included
    KVQ_REMOTE_PART_MIN = 64 << 10,
    KVQ_REMOTE_MAX_PARTS = 10000, // of one object, by S3's rules
    KVQ_REMOTE_MAX_SMALL = 64 << 20,
};

// ---- Opening ----

// Time and chance, so that tests need not wait. Never fails.
struct kvq_remote_clock {
    uint64_t (*now_ms)(struct kvq_remote_clock *clock); // monotonic
    void (*sleep_ms)(struct kvq_remote_clock *clock, uint32_t ms);
    uint32_t (*random)(struct kvq_remote_clock *clock);
};
struct kvq_remote_clock *kvq_remote_clock_real(void); // for any number of threads

struct kvq_remote_keys {
    char id[129], secret[257];
    char token[4097]; // of temporary keys; may be empty
};

// From a file in the form that AWS's tools use (sections in brackets, aws_access_key_id and so on),
// which must not be readable by others; file NULL: from the variables AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN. section NULL: "default".
int kvq_remote_keys_load(const char *file, const char *section, struct kvq_remote_keys *keys,
                         char *text, size_t n);

// Who looks on: told bytes done and all of the transfer that runs (0 of 0 while there is none),
// several times a second, also while nothing moves and between tries (done may go back then).
// Something else than 0 from it ends the call within a quarter of a second. May be NULL wherever it
// is taken.
struct kvq_remote_watch {
    int (*tell)(void *context, uint64_t done, uint64_t all);
    void *context;
};

// 0 and NULL stand for defaults.
struct kvq_remote_options {
    const char *endpoint; // http[s]://HOST[:PORT]; http carries the data as it is, for all to read
    const char *bucket;
    const char *prefix;  // before all keys; letters, digits and . _ - / only
    const char *region;  // us-east-1, which most other makes take
    const char *ca_file; // certificates to trust instead of the system's
    bool virtual_host;   // the bucket is part of the host's name, not of the path
    struct kvq_remote_keys keys;
    uint32_t connect_ms; // 10 s
    uint32_t stall_ms;   // 60 s; a request that moves less than 1 KiB in that time is given up
    int32_t retries;     // 5 more tries; below 0: none
    uint32_t part_bytes; // 16 MiB; at least KVQ_REMOTE_PART_MIN (AWS refuses less than 5 MiB).
                         // A transfer has that much in memory. Doubled where there were too many
    struct kvq_remote_clock *clock;
    struct kvq_io *io;
    struct kvq_remote_watch watch; // of all calls that are given none
};

bool kvq_remote_built(void); // whether this build can do any of it

// Checks the options; connects to nobody. *remote is closed by kvq_remote_close.
int kvq_remote_open(const struct kvq_remote_options *options, struct kvq_remote **remote,
                    char *text, size_t n);
void kvq_remote_close(struct kvq_remote **remote); // accepts NULL and pointers to NULL

// ---- Objects ----
// Keys are made of letters, digits and . _ - / and come behind the prefix.

struct kvq_remote_object {
    char key[KVQ_REMOTE_KEY_BYTES]; // without the prefix
    uint64_t bytes;
};

// In one request, at most KVQ_REMOTE_MAX_SMALL bytes.
int kvq_remote_put(struct kvq_remote *remote, const char *key, const void *data, size_t bytes,
                   const struct kvq_remote_watch *watch, char *text, size_t n);
// *data has *bytes bytes, and a NUL behind, and is freed by the caller with free(). An object that
// is larger than max (at most KVQ_REMOTE_MAX_SMALL) is refused.
int kvq_remote_get(struct kvq_remote *remote, const char *key, size_t max, void **data,
                   size_t *bytes, const struct kvq_remote_watch *watch, char *text, size_t n);
int kvq_remote_head(struct kvq_remote *remote, const char *key, struct kvq_remote_object *out,
                    char *text, size_t n);
int kvq_remote_delete(struct kvq_remote *remote, const char *key, char *text, size_t n); // or gone
// Calls each() for all objects whose keys start so and stand behind `after` (empty: for all), in
// the order of their bytes, until it gives something else than 0, which is passed on.
int kvq_remote_list(struct kvq_remote *remote, const char *start, const char *after,
                    int (*each)(void *context, const struct kvq_remote_object *object),
                    void *context, char *text, size_t n);

// ---- Sessions as files ----

struct kvq_remote_moved {
    uint64_t bytes;       // of the session's file
    uint64_t transferred; // of them in this call; the rest was there already
};

// SPACE/NAME as they stand before /head and /data: letters, digits, dots and minus signs are
// themselves (not a dot in front), any other byte is _ and two hexadecimal digits.
int kvq_remote_session_key(const char *space, const char *name, char out[KVQ_REMOTE_KEY_BYTES]);

// Uploads what is new of a file as a session. What was pushed before under that name, and is not
// part of it, is removed afterwards.
int kvq_remote_push_file(struct kvq_remote *remote, const char *path, const char *space,
                         const char *name, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n);
// Downloads a session to `path`, through PATH.part, which stays there when the call fails and with
// which the next call goes on. A file at `path` is taken for what an earlier call has made.
int kvq_remote_pull_file(struct kvq_remote *remote, const char *space, const char *name,
                         const char *path, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n);
// Deletes a session. KVQ_E_NO_SESSION if there is none.
int kvq_remote_forget(struct kvq_remote *remote, const char *space, const char *name, char *text,
                      size_t n);
// Calls each() for every session there is, of a namespace or (NULL) of all, in an order that never
// changes, until it gives something else than 0, which is passed on. `after`, which may be NULL,
// is one that was listed before, there or not: it and those before it are left out. bytes: of its
// data, and of data that another push has left or is about to bring.
struct kvq_remote_name {
    const char *space, *name;
};
int kvq_remote_sessions(struct kvq_remote *remote, const char *space,
                        const struct kvq_remote_name *after,
                        int (*each)(void *context, const char *space, const char *name,
                                    uint64_t bytes),
                        void *context, char *text, size_t n);

// ---- Sessions between stores ----
// `folder` holds the files in between; it is made if its parent is there, and should be one of its
// own next to the store's. Space that these files take does not count for the store's cap.

// Exports a session (all shards) and pushes it. After a failure the exported file stays for the
// next call, which goes on where this one ended unless the session was saved again since.
int kvq_remote_push(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const char *space, const char *name, const struct kvq_remote_watch *watch,
                    struct kvq_remote_moved *moved, char *text, size_t n);

// Pulls a session and imports it, under another namespace and name where they are given (may be
// NULL). KVQ_E_EXISTS without `replace` if the store has one of that name.
struct kvq_remote_pull {
    const char *space, *name;       // on the remote
    const char *as_space, *as_name; // in the store
    bool replace;
};
int kvq_remote_pull(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                    struct kvq_remote_moved *moved, char *text, size_t n);

// The same in two steps, for who must not write to the store for as long as a transfer takes: the
// session comes to a file in the folder, *path, which is freed by the caller with free(), and is
// imported from there. kvq_remote_take removes the file, unless it may go better later.
int kvq_remote_fetch(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                     const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                     struct kvq_remote_moved *moved, char **path, char *text, size_t n);
int kvq_remote_take(struct kvq_store *store, const struct kvq_remote_pull *what, const char *path,
                    const struct kvq_remote_watch *watch, char *text, size_t n);

// What is in the folder of transfers that failed is there to go on with. Removes what is older than
// max_age_s seconds, then the oldest until at most `most` files are left, and unfinished exports.
// Nothing may use the folder meanwhile. It need not be there.
void kvq_remote_sweep(const char *folder, uint64_t max_age_s, uint32_t most);

#endif
