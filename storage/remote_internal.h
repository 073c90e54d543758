// SPDX-License-Identifier: Apache-2.0
//
// What the files of the remote tier share: the remote, and one request to it.
#ifndef KVQ_STORAGE_REMOTE_INTERNAL_H
#define KVQ_STORAGE_REMOTE_INTERNAL_H

#include <curl/curl.h>

#include "proto/limits.h"
#include "proto/status.h"
#include "storage/remote.h"
#include "storage/remote_index.h"
#include "storage/remote_reply.h"

struct kvq_remote {
    CURLM *multi;
    CURL *easy[KVQ_REMOTE_CONNECTIONS]; // the first `lanes` of them
    uint32_t lanes;
    char *base;    // http://HOST[:PORT]/BUCKET or http://BUCKET.HOST[:PORT]
    char *prefix;  // empty, or with a slash at its end
    char *ca_file; // may be NULL
    char sigv4[96];
    struct kvq_remote_keys keys;
    uint32_t connect_ms, stall_ms, retries, part_bytes;
    struct kvq_remote_clock *clock;
    struct kvq_io *io;
    struct kvq_remote_watch watch; // of calls that are given none
};

// Where a call's complaints go, and who looks on.
struct kvq__call {
    struct kvq_remote *remote;
    const struct kvq_remote_watch *watch; // may be NULL
    uint64_t done, all;                   // what the watcher is told, less what moves now
    char *text;
    size_t n;
};

struct kvq__request {
    const char *method; // GET, HEAD, PUT, POST, DELETE
    const char *key;    // behind the prefix; NULL: the bucket itself
    const char *query;  // sorted and encoded as it is to be signed, or NULL
    const void *body;
    size_t body_bytes;
    const uint8_t *sha;  // of the body; NULL: it is made here
    const char *range;   // "FROM-LAST", or NULL
    uint32_t patience;   // 0: 1; times stall_ms
    size_t max;          // bytes of a successful reply's body
    bool watched;        // what moves counts as progress
    bool absent_is_fine; // 404 to an object is no complaint, only KVQ_E_NO_SESSION
};

struct kvq__answer {
    long status;
    char *body; // by malloc, with a NUL behind; never NULL after success
    size_t bytes;
    uint64_t length; // Content-Length, UINT64_MAX: not said
    bool chunked;    // the body says by itself where it ends
    char etag[KVQ__ETAG_BYTES];
    char range[80]; // Content-Range
};

// Writes "METHOD URL: sentence" and returns code.
int kvq__remote_say(struct kvq__call *call, int code, const char *method, const char *key,
                    const char *format, ...) __attribute__((format(printf, 5, 6)));

// Sends a request, again for as long as that may help. 0 with an answer of status 200 to 206, or a
// code with a sentence. The answer's body is freed by kvq__answer_free in any case.
int kvq__request(struct kvq__call *call, const struct kvq__request *request,
                 struct kvq__answer *answer);
void kvq__answer_free(struct kvq__answer *answer);

// Requests of one call that may stand side by side.
struct kvq__requests {
    void *context;
    // Makes the next one. Body, query and range stay until it is taken; what is kept by lane, below
    // `lanes`, is free for it. 0; 1: there is none any more; or a code with a sentence.
    int (*make)(void *context, uint32_t lane, struct kvq__request *request);
    // Looks at a good answer, which is freed afterwards. 0; 1: the request is to be sent once more,
    // after a wait; or a code with a sentence.
    int (*take)(void *context, uint32_t lane, struct kvq__answer *answer);
    uint32_t lanes; // how many at a time, at most remote->lanes
    long status;    // out: HTTP's, of the last answer
};
// How many may, if each holds so many bytes in memory.
uint32_t kvq__lanes_of(const struct kvq_remote *remote, uint64_t bytes);
// 0 when all have been taken, or the first code: what is under way then is broken off.
int kvq__requests(struct kvq__call *call, struct kvq__requests *all);

// Tells the watcher. KVQ_E_CANCELLED if it has had enough.
int kvq__remote_tell(struct kvq__call *call, uint64_t moved);
// Waits before try number `tries` (1: the first repetition). 0 or KVQ_E_CANCELLED.
int kvq__remote_wait(struct kvq__call *call, uint32_t tries, uint32_t at_least_ms);

// Whether a key is one that we write, and of no more than the length that is left to it.
int kvq__remote_key_check(struct kvq__call *call, const char *key);

// Reads an answer that should be a document whose root's name starts so (servers differ in the
// rest). 0, what each() gave, or a code with a sentence.
int kvq__remote_parse(struct kvq__call *call, const struct kvq__request *request,
                      const struct kvq__answer *answer, const char *root, struct kvq__reply *reply,
                      int (*each)(void *context, const struct kvq__reply_item *item),
                      void *context);

// Whether such an answer, which came with a status of success, tells of a failure that may pass.
bool kvq__remote_may_pass(const struct kvq__reply *reply);

// Bytes [from, from + n) of an object that is `all` bytes long.
struct kvq__range {
    const char *key;
    uint64_t from, n, all;
    char text[64]; // as the request names it
};
// The request for it, and whether an answer is exactly that: 0, or a code with a sentence.
struct kvq__request kvq__range_request(struct kvq__range *range);
int kvq__range_check(struct kvq__call *call, const struct kvq__range *range,
                     const struct kvq__answer *answer);

// ---- Sessions (remote_session.c) ----

// Keys of one session, and what is under them.
struct kvq__session_keys {
    char base[KVQ_REMOTE_KEY_BYTES]; // SPACE/NAME
    char head[KVQ_REMOTE_KEY_BYTES + 8];
    char data[KVQ_REMOTE_KEY_BYTES + 80];
};

// Names of a session that cannot be one are complained about.
int kvq__session_keys_make(struct kvq__call *call, const char *space, const char *name,
                           struct kvq__session_keys *keys);
// Makes keys->data that of the pack with that digest.
void kvq__session_name_data(struct kvq__session_keys *keys, const char *digest);
// Gets the head, by malloc. KVQ_E_NO_SESSION, with a sentence: there is none.
int kvq__session_get_head(struct kvq__call *call, const struct kvq__session_keys *keys, char **head,
                          size_t *n);
// Complains about a file on this side; `error` is a negative errno.
int kvq__remote_say_file(struct kvq__call *call, const char *path, const char *what, int error);

// Objects that are to be deleted, kept while a list is read.
struct kvq__doomed {
    char (*keys)[KVQ_REMOTE_KEY_BYTES]; // by malloc
    size_t count, room;
};
// Adds one, for kvq_remote_list. 1: there are enough for now.
int kvq__remote_doom(void *doomed, const struct kvq_remote_object *object);
void kvq__doomed_free(struct kvq__doomed *doomed);

// ---- Uploads (remote_upload.c) ----

// What an object is made of: stretches of an open file, one after the other.
struct kvq__stretch {
    uint64_t at, from, bytes; // in the object, and in the file
};
struct kvq__source {
    int file;
    struct kvq__stretch *stretches; // by malloc
    uint32_t n, room;
};
// Reads n bytes of what the object will be, all of which it has. 0 or a negative errno.
int kvq__source_read(struct kvq_io *io, const struct kvq__source *source, void *out, size_t n,
                     uint64_t at);

// Uploads an object whose parts are known, with parts that are there already left out. With
// `replace` an object of the same length may be there, whose bytes are not trusted. *sent is
// increased by the bytes that were sent.
int kvq__remote_upload(struct kvq__call *call, const char *key, const struct kvq__source *source,
                       const struct kvq__parts *parts, bool replace, uint64_t *sent);
// Gives up all uploads of objects whose keys start so.
int kvq__remote_abort_uploads(struct kvq__call *call, const char *start);

#endif
