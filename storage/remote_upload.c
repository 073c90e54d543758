// SPDX-License-Identifier: Apache-2.0
//
// Uploads: in one request if there is one part, else in parts, several side by side.
//
// The key of a session's data holds its checksum, so an upload of that key which a server still
// has is of the same file: parts of the right size are left out. Should one of them be wrong
// nevertheless, the checksum of that part says so to whoever pulls.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/remote_internal.h"

int kvq__source_read(struct kvq_io *io, const struct kvq__source *source, void *out, size_t n,
                     uint64_t at)
{
    uint8_t *to = out;
    for (uint32_t i = 0; i < source->n && n > 0; i++) {
        const struct kvq__stretch *s = &source->stretches[i];
        if (at < s->at || at - s->at >= s->bytes)
            continue;
        uint64_t skip = at - s->at, left = s->bytes - skip;
        size_t some = n < left ? n : (size_t)left, got = 0;
        int rc = kvq_io_read(io, source->file, to, some, s->from + skip, &got);
        if (rc != 0 || got != some)
            return rc ? rc : -EIO;
        to += some;
        at += some;
        n -= some;
    }
    return n == 0 ? 0 : -EIO;
}

// An upload in parts, under way.
struct upload {
    struct kvq__call *call;
    const char *key;
    const struct kvq__source *source;
    const struct kvq__parts *parts;
    bool replace; // an object that is there already is not this one
    uint64_t *sent;
    char id[KVQ__UPLOAD_BYTES];
    bool resumed;                   // some of it is from before
    uint32_t after;                 // the number behind which parts are being listed
    char (*etags)[KVQ__ETAG_BYTES]; // of parts that are there; else empty
    uint32_t next;                  // part that is sent next, unless it is there
    struct sending {
        uint32_t part;
        char *query;
        uint8_t *buffer;
    } lanes[KVQ_REMOTE_CONNECTIONS];
};

static int no_memory_for_upload(struct kvq__call *call, const char *key)
{
    return kvq__remote_say(call, KVQ_E_NO_MEMORY, "PUT", key, "no memory for the upload");
}

// Reads a part and compares it with its checksum: the file may have changed, or its disk be bad.
static int read_part(struct upload *u, uint32_t i, uint8_t **buffer)
{
    struct kvq__call *call = u->call;
    size_t size = kvq__part_size(u->parts, i);
    uint8_t sha[KVQ__SHA_BYTES];
    *buffer = *buffer ? *buffer : malloc(kvq__part_size(u->parts, 0));
    if (!*buffer)
        return no_memory_for_upload(call, u->key);
    int rc = kvq__source_read(call->remote->io, u->source, *buffer, size, i * u->parts->part_bytes);
    if (rc != 0)
        return kvq__remote_say(call, KVQ_E_SYSTEM, "PUT", u->key, "reading the file: %s",
                               strerror(-rc));
    if (kvq__sha256(*buffer, size, sha) != 0 || memcmp(sha, u->parts->sha[i], sizeof sha) != 0)
        return kvq__remote_say(call, KVQ_E_DAMAGED, "PUT", u->key,
                               "the file has changed while it was uploaded; push again");
    return 0;
}

// An ETag goes into a document and must not be more than a tag there.
static bool etag_is_plain(const char *etag)
{
    return *etag && etag[strspn(etag, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
                                      "YZ\"-_.+/=:")] == '\0';
}

// ---- Uploads that a server still has ----

struct found_upload {
    const char *key; // with the prefix
    char id[KVQ__UPLOAD_BYTES];
};

static int on_upload(void *context, const struct kvq__reply_item *item)
{
    struct found_upload *f = context;
    if (strcmp(item->kind, "Upload") == 0 && strcmp(item->key, f->key) == 0 && item->upload[0])
        memcpy(f->id, item->upload, sizeof f->id);
    return 0;
}

// One page of uploads below a prefix: more than one is more than anybody should have.
static int list_uploads(struct kvq__call *call, const char *start,
                        int (*each)(void *context, const struct kvq__reply_item *item),
                        void *context)
{
    char *escaped = curl_easy_escape(call->remote->easy[0], start, 0), *query = NULL;
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    struct kvq__answer answer = {0};
    int rc = KVQ_E_NO_MEMORY;
    if (!escaped || !reply || asprintf(&query, "prefix=%s&uploads=", escaped) < 0) {
        query = NULL;
        goto out;
    }
    // Some servers say 404 where there is no upload.
    struct kvq__request q = {
        .method = "GET", .query = query, .max = KVQ__REPLY_MAX, .absent_is_fine = true};
    rc = kvq__request(call, &q, &answer);
    if (rc == 0)
        rc = kvq__remote_parse(call, &q, &answer, "ListMultipartUploadsResult", reply, each,
                               context);
    else if (rc == KVQ_E_NO_SESSION)
        rc = 0;
out:
    kvq__answer_free(&answer);
    curl_free(escaped);
    free(query);
    free(reply);
    return rc == KVQ_E_NO_MEMORY ? no_memory_for_upload(call, NULL) : rc;
}

// A request that names the upload, and perhaps a part: QUERY&uploadId=ID.
static char *upload_query(struct kvq__call *call, const char *before, const char *id)
{
    char *query = NULL, *escaped = curl_easy_escape(call->remote->easy[0], id, 0);
    if (!escaped || asprintf(&query, "%suploadId=%s", before, escaped) < 0)
        query = NULL;
    curl_free(escaped);
    return query;
}

static int abort_upload(struct kvq__call *call, const char *key, const char *id)
{
    char *query = upload_query(call, "", id);
    if (!query)
        return no_memory_for_upload(call, key);
    struct kvq__request q = {.method = "DELETE",
                             .key = key,
                             .query = query,
                             .max = KVQ__REPLY_MAX,
                             .absent_is_fine = true};
    struct kvq__answer answer;
    int rc = kvq__request(call, &q, &answer);
    kvq__answer_free(&answer);
    free(query);
    return rc == KVQ_E_NO_SESSION ? 0 : rc;
}

static int on_part(void *context, const struct kvq__reply_item *item)
{
    struct upload *u = context;
    if (strcmp(item->kind, "Part") != 0)
        return 0;
    // Some servers count from 1 again on a list's next page: such a part is sent once more.
    if (item->number > u->after && item->number <= u->parts->count && etag_is_plain(item->etag) &&
        item->bytes == kvq__part_size(u->parts, item->number - 1))
        memcpy(u->etags[item->number - 1], item->etag, KVQ__ETAG_BYTES);
    return 0;
}

// Notes the parts that are there. KVQ_E_NO_SESSION: the server has forgotten the upload.
static int list_parts(struct upload *u)
{
    bool more = true;
    int rc = 0;
    assert(u->id[0] && u->after == 0);
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    while (rc == 0 && more && reply) {
        char before[48] = "";
        if (u->after)
            snprintf(before, sizeof before, "part-number-marker=%" PRIu32 "&", u->after);
        char *query = upload_query(u->call, before, u->id);
        struct kvq__request q = {.method = "GET",
                                 .key = u->key,
                                 .query = query,
                                 .max = KVQ__REPLY_MAX,
                                 .absent_is_fine = true};
        struct kvq__answer answer = {0};
        rc = query ? kvq__request(u->call, &q, &answer) : no_memory_for_upload(u->call, u->key);
        if (rc == 0)
            rc = kvq__remote_parse(u->call, &q, &answer, "ListPartsResult", reply, on_part, u);
        // Markers must grow, so that a list has an end.
        more = rc == 0 && reply->more && reply->next_number > u->after;
        u->after = reply->next_number;
        kvq__answer_free(&answer);
        free(query);
    }
    free(reply);
    return reply ? rc : no_memory_for_upload(u->call, u->key);
}

// ---- An upload's steps ----

static int begin_upload(struct upload *u)
{
    struct kvq__request q = {
        .method = "POST", .key = u->key, .query = "uploads=", .body = "", .max = KVQ__REPLY_MAX};
    struct kvq__answer answer = {0};
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    if (!reply)
        return no_memory_for_upload(u->call, u->key);
    int rc = kvq__request(u->call, &q, &answer);
    if (rc == 0)
        rc = kvq__remote_parse(u->call, &q, &answer, "InitiateMultipartUpload", reply, NULL, NULL);
    if (rc == 0 && !reply->upload[0])
        rc = kvq__remote_say(u->call, KVQ_E_REMOTE, q.method, u->key, "the reply names no upload");
    memcpy(u->id, reply->upload, sizeof u->id);
    memset(u->etags, 0, u->parts->count * sizeof *u->etags);
    kvq__answer_free(&answer);
    free(reply);
    return rc;
}

// The next part that is not there, for kvq__requests.
static int make_part(void *context, uint32_t lane, struct kvq__request *request)
{
    struct upload *u = context;
    struct sending *l = &u->lanes[lane];
    char before[40];
    assert(u->id[0]);
    for (; u->next < u->parts->count && u->etags[u->next][0]; u->next++)
        u->call->done += kvq__part_size(u->parts, u->next);
    if (u->next == u->parts->count)
        return 1;
    l->part = u->next++;
    snprintf(before, sizeof before, "partNumber=%" PRIu32 "&", l->part + 1);
    free(l->query);
    l->query = upload_query(u->call, before, u->id);
    int rc = l->query ? read_part(u, l->part, &l->buffer) : no_memory_for_upload(u->call, u->key);
    *request = (struct kvq__request){.method = "PUT",
                                     .key = u->key,
                                     .query = l->query,
                                     .body = l->buffer,
                                     .body_bytes = kvq__part_size(u->parts, l->part),
                                     .sha = u->parts->sha[l->part],
                                     .max = KVQ__REPLY_MAX,
                                     .watched = true};
    return rc;
}

static int take_part(void *context, uint32_t lane, struct kvq__answer *answer)
{
    struct upload *u = context;
    uint32_t i = u->lanes[lane].part;
    if (!etag_is_plain(answer->etag))
        return kvq__remote_say(u->call, KVQ_E_REMOTE, "PUT", u->key,
                               "the reply to part %" PRIu32 " has no ETag that can be used", i + 1);
    memcpy(u->etags[i], answer->etag, KVQ__ETAG_BYTES);
    *u->sent += kvq__part_size(u->parts, i);
    u->call->done += kvq__part_size(u->parts, i);
    return 0;
}

static int send_parts(struct upload *u)
{
    struct kvq__requests all = {.context = u,
                                .make = make_part,
                                .take = take_part,
                                .lanes = kvq__lanes_of(u->call->remote, u->parts->part_bytes)};
    u->next = 0;
    int rc = kvq__requests(u->call, &all);
    return rc ? rc : kvq__remote_tell(u->call, 0);
}

static char *part_list(struct upload *u, size_t *bytes)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, bytes);
    if (!out)
        return NULL;
    fputs("<CompleteMultipartUpload>", out);
    for (uint32_t i = 0; i < u->parts->count; i++) {
        assert(u->etags[i][0]); // sent, or found there
        fprintf(out, "<Part><PartNumber>%" PRIu32 "</PartNumber><ETag>%s</ETag></Part>", i + 1,
                u->etags[i]);
    }
    fputs("</CompleteMultipartUpload>", out);
    if (fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

// A store may begin to answer with status 200 while it puts the parts together, and then say that
// it failed.
static int ask_to_complete(struct upload *u, const struct kvq__request *q,
                           struct kvq__answer *answer, struct kvq__reply *reply)
{
    for (uint32_t tries = 0;; tries++) {
        int rc = kvq__request(u->call, q, answer);
        if (rc != 0)
            return rc;
        rc = kvq__remote_parse(u->call, q, answer, "CompleteMultipartUpload", reply, NULL, NULL);
        if (rc != KVQ_E_REMOTE || !kvq__remote_may_pass(reply) || tries >= u->call->remote->retries)
            return rc;
        kvq__answer_free(answer);
        rc = kvq__remote_wait(u->call, tries + 1, 0);
        if (rc != 0)
            return rc;
    }
}

static int complete_upload(struct upload *u)
{
    enum { PATIENCE = 10 }; // a store may copy all parts before it answers
    size_t bytes = 0;
    char *list = part_list(u, &bytes), *query = upload_query(u->call, "", u->id);
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    struct kvq__answer answer = {0};
    struct kvq__request q = {.method = "POST",
                             .key = u->key,
                             .query = query,
                             .body = list,
                             .body_bytes = bytes,
                             .patience = PATIENCE,
                             .max = KVQ__REPLY_MAX};
    int rc = list && query && reply ? ask_to_complete(u, &q, &answer, reply)
                                    : no_memory_for_upload(u->call, u->key);
    if (rc == KVQ_E_REMOTE && answer.status == 400) {
        // It will not do with these parts, now or later: the next try must not find them.
        struct kvq__call quiet = *u->call;
        quiet.n = 0;
        (void)abort_upload(&quiet, u->key, u->id);
        rc = u->resumed ? KVQ_E_NO_SESSION : rc;
    }
    kvq__answer_free(&answer);
    free(reply);
    free(query);
    free(list);
    return rc;
}

// Whether the object is there as a whole. 0, or a code with a sentence.
static int check_object(struct kvq__call *call, const char *key, uint64_t bytes)
{
    struct kvq_remote_object object;
    int rc = kvq_remote_head(call->remote, key, &object, call->text, call->n);
    if (rc == 0 && object.bytes != bytes)
        rc = kvq__remote_say(call, KVQ_E_REMOTE, "HEAD", key,
                             "the store has %" PRIu64 " bytes of %" PRIu64 " that it said to have",
                             object.bytes, bytes);
    return rc;
}

// Goes on with an upload that the server has, or (id empty) begins one, up to its end.
static int upload_once(struct upload *u, const char *id)
{
    snprintf(u->id, sizeof u->id, "%s", id);
    u->resumed = *id != '\0';
    u->after = 0;
    int rc = *id ? list_parts(u) : begin_upload(u);
    if (rc == 0)
        rc = send_parts(u);
    if (rc == 0)
        rc = complete_upload(u);
    return rc == 0 ? check_object(u->call, u->key, u->parts->bytes) : rc;
}

static int upload_parts(struct upload *u)
{
    enum { ROUNDS = 2 };
    char full[KVQ_REMOTE_KEY_BYTES];
    snprintf(full, sizeof full, "%s%s", u->call->remote->prefix, u->key);
    struct found_upload found = {.key = full};
    uint64_t before = u->call->done;
    int rc = list_uploads(u->call, full, on_upload, &found);
    for (int round = 0; rc == 0 && round < ROUNDS; round++) {
        u->call->done = before;
        rc = upload_once(u, found.id);
        if (rc != KVQ_E_NO_SESSION)
            return rc;
        // The server does not know the upload (any more). Either it forgot it, and we begin anew;
        // or it has completed it, and only its reply got lost, which cannot be told from an object
        // that was there before.
        struct kvq__call quiet = *u->call;
        quiet.n = 0;
        rc = u->replace ? KVQ_E_NO_SESSION : check_object(&quiet, u->key, u->parts->bytes);
        if (rc == 0)
            return 0;
        rc = rc == KVQ_E_NO_SESSION ? 0 : rc;
        found.id[0] = '\0';
    }
    if (rc != 0)
        return rc;
    return kvq__remote_say(u->call, KVQ_E_REMOTE, "PUT", u->key,
                           "the store forgets uploads in parts while they are under way");
}

static int upload_whole(struct upload *u)
{
    struct kvq__answer answer;
    assert(u->parts->count == 1);
    uint8_t **buffer = &u->lanes[0].buffer;
    int rc = read_part(u, 0, buffer);
    if (rc != 0)
        return rc;
    struct kvq__request q = {.method = "PUT",
                             .key = u->key,
                             .body = *buffer,
                             .body_bytes = (size_t)u->parts->bytes,
                             .sha = u->parts->sha[0],
                             .max = KVQ__REPLY_MAX,
                             .watched = true};
    rc = kvq__request(u->call, &q, &answer);
    kvq__answer_free(&answer);
    if (rc != 0)
        return rc;
    *u->sent += u->parts->bytes;
    u->call->done += u->parts->bytes;
    return check_object(u->call, u->key, u->parts->bytes);
}

int kvq__remote_upload(struct kvq__call *call, const char *key, const struct kvq__source *source,
                       const struct kvq__parts *parts, bool replace, uint64_t *sent)
{
    struct upload u = {.call = call,
                       .key = key,
                       .source = source,
                       .parts = parts,
                       .replace = replace,
                       .sent = sent};
    assert(parts->count > 0);
    u.etags = calloc(parts->count, sizeof *u.etags);
    int rc = u.etags ? 0 : no_memory_for_upload(call, key);
    if (rc == 0)
        rc = parts->count == 1 ? upload_whole(&u) : upload_parts(&u);
    for (uint32_t i = 0; i < KVQ_REMOTE_CONNECTIONS; i++) {
        free(u.lanes[i].query);
        free(u.lanes[i].buffer);
    }
    free(u.etags);
    return rc;
}

// ---- Giving up ----

// Uploads of one page, kept since the connection is in use while the reply is read.
struct upload_list {
    struct kvq__reply_item *items;
    uint32_t count;
};

static int on_any_upload(void *context, const struct kvq__reply_item *item)
{
    struct upload_list *l = context;
    assert(l->count < KVQ__REPLY_ITEMS);
    if (strcmp(item->kind, "Upload") == 0)
        l->items[l->count++] = *item;
    return 0;
}

int kvq__remote_abort_uploads(struct kvq__call *call, const char *start)
{
    const char *prefix = call->remote->prefix;
    char full[KVQ_REMOTE_KEY_BYTES];
    snprintf(full, sizeof full, "%s%s", prefix, start);
    struct upload_list l = {.items = calloc(KVQ__REPLY_ITEMS, sizeof *l.items)};
    int rc =
        l.items ? list_uploads(call, full, on_any_upload, &l) : no_memory_for_upload(call, start);
    for (uint32_t i = 0; rc == 0 && i < l.count; i++) {
        const char *key = l.items[i].key + strlen(prefix);
        if (strncmp(l.items[i].key, full, strlen(full)) == 0 &&
            kvq__remote_key_check(call, key) == 0)
            rc = abort_upload(call, key, l.items[i].upload);
    }
    free(l.items);
    return rc;
}
