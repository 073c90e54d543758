// SPDX-License-Identifier: Apache-2.0
//
// The remote tier: objects on an S3-compatible store, and sessions pushed to it and pulled from it.
//
// The objects of a session, below the configured prefix (with escaped names, see
// kvq_remote_session_key):
//
//   SPACE/NAME/head          a text that names the chunks of the session's export file (segment.h)
//                            with their SHA-256, see storage/remote_index.h
//   SPACE/NAME/data/DIGEST   packs of chunks, each of one push
//
// Promises
//   - Readers see all of a push or nothing: the push writes the head after the data is complete,
//     and an upload in parts is no object until then. Until the head is written, readers see the
//     session of the push before.
//   - A pull checks every byte of the file against the head, and the store checks the file once
//     more when it imports the session. The file has another name until it is complete.
//   - A push sends neither chunks of earlier pushes (unless it is to replace them) nor parts that
//     the server has of a push that was cut off; a pull fetches no chunk that the file has.
//   - Whatever a server answers, a call ends with success, or with an error after a bounded time
//     and with bounded memory. No call follows a redirect, which could send data to a foreign host.
//   - No text and no file of ours contains keys; closing the remote wipes them from memory.
//
// Threads: all calls block. A remote belongs to one thread at a time; several remotes may work at
// the same time. The caller makes sure that one push or pull of a session runs at a time.
//
// Functions return 0 or a negative KVQ_E code, with a sentence in text[n], and accept n = 0. The
// sentence names the endpoint, bucket and key, the server's answer, and what to do:
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
    KVQ_REMOTE_CONNECTIONS = 16,
    KVQ_REMOTE_MAX_BUFFERS = 256 << 20, // bytes of parts under way
    KVQ_REMOTE_MAX_PARTS = 10000,       // of one object, by S3's rules
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

// Reads keys from a file in the form of AWS's tools (sections in brackets, aws_access_key_id and so
// on), which other users must not be able to read. file NULL: from the variables
// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN. section NULL: "default".
int kvq_remote_keys_load(const char *file, const char *section, struct kvq_remote_keys *keys,
                         char *text, size_t n);

// A watcher of transfers: tell() gets the bytes done and all of the transfer (0 of 0 while there is
// none) several times a second, also while no bytes move and between tries (done may then fall). If
// it returns something else than 0, the call ends within a quarter of a second. A watcher may be
// NULL in every call.
struct kvq_remote_watch {
    int (*tell)(void *context, uint64_t done, uint64_t all);
    void *context;
};

// 0 and NULL stand for defaults.
struct kvq_remote_options {
    const char *endpoint; // http[s]://HOST[:PORT]; http sends data unencrypted
    const char *bucket;
    const char *prefix;  // before all keys; letters, digits and . _ - / only
    const char *region;  // default us-east-1, which most other servers accept
    const char *ca_file; // certificates to trust instead of the system's
    bool virtual_host;   // the bucket is in the host's name, not in the path
    struct kvq_remote_keys keys;
    uint32_t connect_ms; // 10 s
    uint32_t stall_ms;   // 60 s; a request that moves less than 1 KiB in that time fails
    int32_t retries;     // 5 more tries; below 0: none
    uint32_t part_bytes; // 16 MiB; at least KVQ_REMOTE_PART_MIN (AWS refuses less than 5 MiB).
                         // A push needs that much memory for each connection, or two of the longest
                         // chunk of the session's file (remote_index.h) if that is more; a pull
                         // needs one such chunk, and for each connection a part or another one.
                         // Larger objects get larger parts
    uint32_t connections; // 4, at most KVQ_REMOTE_CONNECTIONS: parts that are sent or fetched side
                          // by side; fewer where they would hold KVQ_REMOTE_MAX_BUFFERS or more
    struct kvq_remote_clock *clock;
    struct kvq_io *io;
    struct kvq_remote_watch watch; // of calls without a watcher of their own
};

bool kvq_remote_built(void); // whether this build has the remote tier

// Whether the options but the keys can be a remote's: 0, or a code with a sentence in text.
int kvq_remote_check(const struct kvq_remote_options *options, char *text, size_t n);
// Checks the options, and opens no connection. Release *remote with kvq_remote_close.
int kvq_remote_open(const struct kvq_remote_options *options, struct kvq_remote **remote,
                    char *text, size_t n);
void kvq_remote_close(struct kvq_remote **remote); // accepts NULL and pointers to NULL

// ---- Objects ----
// Keys are made of letters, digits and . _ - / and come behind the prefix.

struct kvq_remote_object {
    char key[KVQ_REMOTE_KEY_BYTES]; // without the prefix
    uint64_t bytes;
    int64_t modified; // in a list: seconds since 1970 by the store's clock; 0: it does not say
};

// Uploads an object in one request: at most KVQ_REMOTE_MAX_SMALL bytes.
int kvq_remote_put(struct kvq_remote *remote, const char *key, const void *data, size_t bytes,
                   const struct kvq_remote_watch *watch, char *text, size_t n);
// Downloads an object of at most max bytes (up to KVQ_REMOTE_MAX_SMALL), else fails. *data has
// *bytes bytes and a NUL behind; the caller releases *data with free().
int kvq_remote_get(struct kvq_remote *remote, const char *key, size_t max, void **data,
                   size_t *bytes, const struct kvq_remote_watch *watch, char *text, size_t n);
int kvq_remote_head(struct kvq_remote *remote, const char *key, struct kvq_remote_object *out,
                    char *text, size_t n);
// 0 also if there is no such object.
int kvq_remote_delete(struct kvq_remote *remote, const char *key, char *text, size_t n);
// Calls each() for all objects whose keys start with `start` and are above `after` (empty: for
// all), in the order of their bytes, until each() returns something else than 0, which the call
// returns.
int kvq_remote_list(struct kvq_remote *remote, const char *start, const char *after,
                    int (*each)(void *context, const struct kvq_remote_object *object),
                    void *context, char *text, size_t n);

// ---- Sessions as files ----

struct kvq_remote_moved {
    uint64_t bytes;       // of the session's file
    uint64_t transferred; // of them in this call; the rest was there already
};

// Makes the escaped SPACE/NAME of a session's keys: letters, digits, dots and minus signs stay (but
// not a leading dot), any other byte becomes _ and two hexadecimal digits.
int kvq_remote_session_key(const char *space, const char *name, char out[KVQ_REMOTE_KEY_BYTES]);

// Pushes a file as a session: uploads the chunks that the remote lacks, and afterwards removes the
// packs of earlier pushes that the session does not use. With `again` the push uploads all chunks,
// over what is there: the remote tells the length of an object, and not whether its bytes are still
// right. KVQ_E_REMOTE if others remove its packs meanwhile, never KVQ_E_NO_SESSION.
int kvq_remote_push_file(struct kvq_remote *remote, const char *path, const char *space,
                         const char *name, bool again, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n);
// Downloads a session to PATH.part, and renames that to `path` when it is complete. After a failure
// PATH.part stays, and the next call goes on with it. The call takes a file at `path` for the
// result of an earlier call, and downloads only the chunks that differ.
int kvq_remote_pull_file(struct kvq_remote *remote, const char *space, const char *name,
                         const char *path, const struct kvq_remote_watch *watch,
                         struct kvq_remote_moved *moved, char *text, size_t n);
// Deletes a session, its head first. After a failure the next call goes on. KVQ_E_NO_SESSION if
// there is neither a head nor data.
int kvq_remote_forget(struct kvq_remote *remote, const char *space, const char *name, char *text,
                      size_t n);
// Calls each() for every session of a namespace, or (NULL) of all, in an order that never changes,
// until each() returns something else than 0, which the call returns. Skips all sessions up to
// `after` (may be NULL), a session that an earlier call listed and that need not exist any more.
// bytes: of the session's packs, those included that a push has left behind or is uploading.
struct kvq_remote_name {
    const char *space, *name;
};
int kvq_remote_sessions(struct kvq_remote *remote, const char *space,
                        const struct kvq_remote_name *after,
                        int (*each)(void *context, const char *space, const char *name,
                                    uint64_t bytes),
                        void *context, char *text, size_t n);

// ---- Sessions between stores ----
// `folder` holds temporary files; the calls create it if its parent exists. It should be a folder
// of its own next to the store's. The store's cap does not count the space of these files.

// Exports a session (all shards) and pushes the file, `again` as above. After a failure the file
// stays, and the next call goes on where this one ended, unless the session was saved again, the
// store begun anew, or the file spoiled.
int kvq_remote_push(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const char *space, const char *name, bool again,
                    const struct kvq_remote_watch *watch, struct kvq_remote_moved *moved,
                    char *text, size_t n);

// Pulls a session and imports it. as_space and as_name, if not NULL, replace its namespace and
// name. KVQ_E_EXISTS without `replace` if the store has a session of that name.
struct kvq_remote_pull {
    const char *space, *name;       // on the remote
    const char *as_space, *as_name; // in the store
    bool replace;
};
int kvq_remote_pull(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                    const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                    struct kvq_remote_moved *moved, char *text, size_t n);

// kvq_remote_pull in two steps, for callers that must not block the store's writer during a
// transfer. kvq_remote_fetch downloads the session to a file in the folder, *path, which the caller
// releases with free(), also after a failure, which may have left some of the file there (NULL: it
// came not so far). kvq_remote_take imports that file and removes it, unless a later try may
// succeed: it stays but for success, KVQ_E_DAMAGED, _INVALID, _VERSION, _LIMIT and _QUOTA.
int kvq_remote_fetch(struct kvq_remote *remote, struct kvq_store *store, const char *folder,
                     const struct kvq_remote_pull *what, const struct kvq_remote_watch *watch,
                     struct kvq_remote_moved *moved, char **path, char *text, size_t n);
int kvq_remote_take(struct kvq_store *store, const struct kvq_remote_pull *what, const char *path,
                    const struct kvq_remote_watch *watch, char *text, size_t n);

// Removes the files that failed transfers left in the folder to go on with: unfinished exports,
// files older than max_age_s seconds, then the oldest until at most `most` are left. No transfer
// may use the folder meanwhile but the one whose file is `keep` (may be NULL): that stays, also
// unfinished. The folder need not exist. Returns how many bytes they had on disk.
uint64_t kvq_remote_sweep(const char *folder, const char *keep, uint64_t max_age_s, uint32_t most);

#endif
