// SPDX-License-Identifier: Apache-2.0
//
// Objects: put, get, head, list, delete, and ranges of large ones.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "storage/remote_internal.h"

int kvq_remote_put(struct kvq_remote *remote, const char *key, const void *data, size_t bytes,
                   const struct kvq_remote_watch *watch, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .watch = watch, .all = bytes, .text = text, .n = n};
    struct kvq__request q = {.method = "PUT",
                             .key = key,
                             .body = bytes ? data : "",
                             .body_bytes = bytes,
                             .max = KVQ__REPLY_MAX,
                             .watched = true};
    struct kvq__answer answer;
    int rc = kvq__remote_key_check(&call, key);
    if (rc == 0 && bytes > KVQ_REMOTE_MAX_SMALL)
        rc = kvq__remote_say(&call, KVQ_E_LIMIT, "PUT", key, "%zu bytes are more than 64 MiB",
                             bytes);
    if (rc != 0)
        return rc;
    rc = kvq__request(&call, &q, &answer);
    kvq__answer_free(&answer);
    return rc;
}

int kvq_remote_get(struct kvq_remote *remote, const char *key, size_t max, void **data,
                   size_t *bytes, const struct kvq_remote_watch *watch, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .watch = watch, .text = text, .n = n};
    size_t most = max < KVQ_REMOTE_MAX_SMALL ? max : KVQ_REMOTE_MAX_SMALL;
    struct kvq__request q = {.method = "GET", .key = key, .max = most, .watched = true};
    struct kvq__answer answer;
    *data = NULL;
    *bytes = 0;
    int rc = kvq__remote_key_check(&call, key);
    if (rc != 0)
        return rc;
    rc = kvq__request(&call, &q, &answer);
    if (rc == 0 && answer.status != 200) {
        rc = kvq__remote_say(&call, KVQ_E_REMOTE, "GET", key,
                             "HTTP %ld, a part of the object, though all of it was asked for",
                             answer.status);
    }
    // A body that ends with the connection may have been cut, and nobody would know.
    if (rc == 0 && answer.length == UINT64_MAX && !answer.chunked)
        rc = kvq__remote_say(&call, KVQ_E_REMOTE, "GET", key, "the reply names no length");
    if (rc == 0) {
        *data = answer.body;
        *bytes = answer.bytes;
        return 0;
    }
    kvq__answer_free(&answer);
    return rc;
}

int kvq_remote_head(struct kvq_remote *remote, const char *key, struct kvq_remote_object *out,
                    char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .text = text, .n = n};
    struct kvq__request q = {.method = "HEAD", .key = key};
    struct kvq__answer answer;
    memset(out, 0, sizeof *out);
    int rc = kvq__remote_key_check(&call, key);
    if (rc != 0)
        return rc;
    rc = kvq__request(&call, &q, &answer);
    if (rc == 0 && answer.length == UINT64_MAX)
        rc = kvq__remote_say(&call, KVQ_E_REMOTE, "HEAD", key, "the reply names no length");
    kvq__answer_free(&answer);
    if (rc != 0)
        return rc;
    memcpy(out->key, key, strlen(key) + 1);
    out->bytes = answer.length;
    return 0;
}

int kvq_remote_delete(struct kvq_remote *remote, const char *key, char *text, size_t n)
{
    struct kvq__call call = {.remote = remote, .text = text, .n = n};
    struct kvq__request q = {
        .method = "DELETE", .key = key, .max = KVQ__REPLY_MAX, .absent_is_fine = true};
    struct kvq__answer answer;
    int rc = kvq__remote_key_check(&call, key);
    if (rc != 0)
        return rc;
    rc = kvq__request(&call, &q, &answer);
    kvq__answer_free(&answer);
    return rc == KVQ_E_NO_SESSION ? 0 : rc;
}

struct kvq__request kvq__range_request(struct kvq__range *r)
{
    assert(r->n > 0 && r->from < r->all && r->n <= r->all - r->from);
    snprintf(r->text, sizeof r->text, "%" PRIu64 "-%" PRIu64, r->from, r->from + r->n - 1);
    return (struct kvq__request){
        .method = "GET", .key = r->key, .range = r->text, .max = (size_t)r->n, .watched = true};
}

int kvq__range_check(struct kvq__call *call, const struct kvq__range *r,
                     const struct kvq__answer *answer)
{
    uint64_t first = 0, last = r->n - 1, length = 0;
    // Some servers say 200 though they send, and name, just the range.
    bool right = kvq__reply_range(answer->range, &first, &last, &length) && first == r->from &&
                 last == r->from + r->n - 1 && length == r->all;
    bool whole = r->from == 0 && r->n == r->all && answer->status == 200 && !answer->range[0];
    if (answer->bytes == r->n && (right || whole))
        return 0;
    if (length != 0 && length != r->all)
        return kvq__remote_say(call, KVQ_E_DAMAGED, "GET", r->key,
                               "it is %" PRIu64 " bytes long instead of %" PRIu64
                               "; push the session again",
                               length, r->all);
    return kvq__remote_say(call, KVQ_E_REMOTE, "GET", r->key,
                           "bytes %s were asked for, HTTP %ld came with %zu bytes; does the store "
                           "know ranges?",
                           r->text, answer->status, answer->bytes);
}

// ---- Lists ----

struct lister {
    struct kvq__call *call;
    const char *start, *after;
    int (*each)(void *context, const struct kvq_remote_object *object);
    void *context;
    int given; // what each() gave if that ended it
};

// "2009-10-12T17:50:30.000Z"; 0: it is not that.
static int64_t read_time(const char *at)
{
    struct tm time = {0};
    const char *end = strptime(at, "%Y-%m-%dT%H:%M:%S", &time);
    return end && (*end == '.' || *end == 'Z') ? (int64_t)timegm(&time) : 0;
}

static int on_object(void *context, const struct kvq__reply_item *item)
{
    struct lister *l = context;
    const char *prefix = l->call->remote->prefix;
    size_t skip = strlen(prefix);
    if (strcmp(item->kind, "Contents") != 0)
        return 0;
    // Somebody else's keys may hold anything; ours do not, and no others can be given to get().
    size_t n = strlen(item->key);
    if (strncmp(item->key, prefix, skip) != 0 ||
        strncmp(item->key + skip, l->start, strlen(l->start)) != 0 ||
        strcmp(item->key + skip, l->after) <= 0 || // from a store that does not know start-after
        n - skip >= KVQ_REMOTE_KEY_BYTES)
        return 0;
    struct kvq_remote_object object = {.bytes = item->bytes, .modified = read_time(item->modified)};
    memcpy(object.key, item->key + skip, n - skip + 1);
    l->given = l->each(l->context, &object);
    return l->given;
}

// One page of a list, from `next` on, which is replaced; empty at the end.
static int list_page(struct lister *l, char *next, size_t size)
{
    struct kvq__call *call = l->call;
    CURL *easy = call->remote->easy[0];
    char *query = NULL;
    char *token = curl_easy_escape(easy, next, 0), *start = NULL, *behind = NULL;
    struct kvq__answer answer = {0};
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    int rc = KVQ_E_NO_MEMORY;
    char *full = NULL, *last = NULL;
    if (asprintf(&full, "%s%s", call->remote->prefix, l->start) < 0)
        full = NULL;
    if (asprintf(&last, "%s%s", call->remote->prefix, l->after) < 0)
        last = NULL;
    start = full ? curl_easy_escape(easy, full, 0) : NULL;
    behind = last ? curl_easy_escape(easy, last, 0) : NULL;
    bool skips = l->after[0] && !*next; // a token says where it goes on by itself
    if (!token || !start || !behind || !reply ||
        asprintf(&query, "%s%s%slist-type=2&prefix=%s%s%s", *next ? "continuation-token=" : "",
                 token, *next ? "&" : "", start, skips ? "&start-after=" : "",
                 skips ? behind : "") < 0)
        goto out;
    struct kvq__request q = {.method = "GET", .query = query, .max = KVQ__REPLY_MAX};
    rc = kvq__request(call, &q, &answer);
    if (rc == 0)
        rc = kvq__remote_parse(call, &q, &answer, "ListBucketResult", reply, on_object, l);
    if (l->given != 0)
        rc = l->given;
    if (rc == 0 && reply->more && !reply->next[0])
        rc = kvq__remote_say(call, KVQ_E_REMOTE, q.method, NULL,
                             "the list is cut, and does not say how it goes on; does the store "
                             "know ListObjectsV2?");
    if (rc == 0)
        snprintf(next, size, "%s", reply->more ? reply->next : "");
out:
    kvq__answer_free(&answer);
    curl_free(token);
    curl_free(start);
    curl_free(behind);
    free(full);
    free(last);
    free(query);
    free(reply);
    return rc;
}

int kvq_remote_list(struct kvq_remote *remote, const char *start, const char *after,
                    int (*each)(void *context, const struct kvq_remote_object *object),
                    void *context, char *text, size_t n)
{
    enum { MAX_PAGES = 10000 }; // ten million objects: no bucket of ours, or a server in a circle
    struct kvq__call call = {.remote = remote, .text = text, .n = n};
    struct lister l = {
        .call = &call, .start = start, .after = after, .each = each, .context = context};
    char next[1025] = "", last[1025];
    int rc = *start ? kvq__remote_key_check(&call, start) : 0;
    for (int page = 0; rc == 0; page++) {
        memcpy(last, next, sizeof last);
        rc = list_page(&l, next, sizeof next);
        if (rc != 0 || !*next)
            break;
        if (page == MAX_PAGES || strcmp(last, next) == 0)
            rc = kvq__remote_say(&call, KVQ_E_REMOTE, "GET", NULL, "the list has no end");
    }
    return rc;
}
