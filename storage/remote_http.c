// SPDX-License-Identifier: Apache-2.0
//
// One request to the remote store: signed, sent, watched, and sent again where that may help.
//
// curl's multi interface drives a single transfer, so that between its steps we can look at the
// watcher and at our own clock. A request's body and a reply's body are in memory as a whole, which
// the size of parts bounds.
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "storage/remote_internal.h"

enum {
    STALL_BYTES = 1024, // that must move in stall_ms
    STEP_MS = 100,      // how often the watcher is asked
    CONTINUE_MS = 200,  // that a server has to refuse a large body before it comes
    ERROR_BODY = 64 << 10,
    FIRST_WAIT_MS = 200,
    LONGEST_WAIT_MS = 20 * 1000,
};

// One try of a request.
struct attempt {
    struct kvq__call *call;
    const struct kvq__request *request;
    struct kvq__answer *answer;
    size_t room;    // of answer->body
    uint64_t heard; // bytes of headers and body
    bool too_long;  // the reply went past its limit
    bool no_memory, stalled, cancelled;
    uint32_t tries; // before this one
    uint32_t retry_after_ms;
    char error[CURL_ERROR_SIZE];
};

// ---- Words ----

// A server's words as part of ours: one line, without control characters.
static void put_words(char *out, size_t size, const char *words)
{
    size_t used = 0;
    for (; *words && used + 1 < size; words++)
        out[used++] = (unsigned char)*words < 32 || *words == 127 ? ' ' : *words;
    out[used] = '\0';
}

int kvq__remote_say(struct kvq__call *call, int code, const char *method, const char *key,
                    const char *format, ...)
{
    assert(code < 0);
    if (call->n == 0)
        return code;
    int used =
        snprintf(call->text, call->n, "%s %.160s%s%.100s%.150s: ", method, call->remote->base,
                 key ? "/" : "", key ? call->remote->prefix : "", key ? key : "");
    if (used < 0 || (size_t)used >= call->n)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(call->text + used, call->n - (size_t)used, format, args);
    va_end(args);
    return code;
}

int kvq__remote_tell(struct kvq__call *call, uint64_t moved)
{
    const struct kvq_remote_watch *w = call->watch ? call->watch : &call->remote->watch;
    if (!w->tell || w->tell(w->context, call->done + moved, call->all) == 0)
        return 0;
    if (call->n)
        snprintf(call->text, call->n,
                 "the transfer was cancelled; what was transferred is kept for the next try");
    return KVQ_E_CANCELLED;
}

// ---- Waiting ----

int kvq__remote_wait(struct kvq__call *call, uint32_t tries, uint32_t at_least_ms)
{
    assert(tries > 0);
    struct kvq_remote_clock *clock = call->remote->clock;
    uint32_t most = tries < 8 ? FIRST_WAIT_MS << (tries - 1) : LONGEST_WAIT_MS;
    most = most < LONGEST_WAIT_MS ? most : LONGEST_WAIT_MS;
    // Between half and all of it, so that many clients do not come back at the same time.
    uint32_t left = most / 2 + clock->random(clock) % (most / 2 + 1);
    left = left > at_least_ms ? left : at_least_ms;
    int rc = kvq__remote_tell(call, 0);
    while (left > 0 && rc == 0) {
        uint32_t now = left < STEP_MS ? left : STEP_MS;
        clock->sleep_ms(clock, now);
        left -= now;
        rc = kvq__remote_tell(call, 0);
    }
    return rc;
}

// ---- What curl hands us ----

static bool is_success(long status)
{
    return status >= 200 && status <= 206;
}

static size_t on_body(char *data, size_t size, size_t count, void *context)
{
    struct attempt *a = context;
    struct kvq__answer *answer = a->answer;
    size_t n = size * count;
    long status = 0;
    curl_easy_getinfo(a->call->remote->easy, CURLINFO_RESPONSE_CODE, &status);
    size_t max = is_success(status) ? a->request->max : ERROR_BODY;
    a->heard += n;
    if (n > max - answer->bytes) {
        a->too_long = true;
        return 0;
    }
    if (answer->bytes + n + 1 > a->room) {
        size_t room = 2 * (answer->bytes + n + 1);
        room = room < max + 1 ? room : max + 1;
        char *bigger = realloc(answer->body, room);
        if (!bigger) {
            a->no_memory = true;
            return 0;
        }
        answer->body = bigger;
        a->room = room;
    }
    assert(answer->bytes + n < a->room);
    memcpy(answer->body + answer->bytes, data, n);
    answer->bytes += n;
    answer->body[answer->bytes] = '\0';
    return n;
}

// Copies a header's value if this is the header. A value that has no room counts as not there.
static bool header_value(const char *line, size_t n, const char *name, char *out, size_t size)
{
    size_t length = strlen(name);
    if (n <= length || strncasecmp(line, name, length) != 0 || line[length] != ':')
        return false;
    const char *at = line + length + 1, *end = line + n;
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    while (end > at && (end[-1] == '\r' || end[-1] == '\n' || end[-1] == ' '))
        end--;
    size_t bytes = (size_t)(end - at);
    if (bytes >= size || memchr(at, '\0', bytes))
        return false;
    memcpy(out, at, bytes);
    out[bytes] = '\0';
    return true;
}

static size_t on_header(char *data, size_t size, size_t count, void *context)
{
    struct attempt *a = context;
    struct kvq__answer *answer = a->answer;
    size_t n = size * count;
    char digits[24];
    uint64_t seconds;
    a->heard += n;
    if (header_value(data, n, "ETag", answer->etag, sizeof answer->etag) ||
        header_value(data, n, "Content-Range", answer->range, sizeof answer->range))
        return n;
    if (header_value(data, n, "Content-Length", digits, sizeof digits)) {
        if (!kvq__reply_number(digits, INT64_MAX, &answer->length))
            answer->length = UINT64_MAX;
    } else if (header_value(data, n, "Transfer-Encoding", digits, sizeof digits)) {
        answer->chunked = strcasecmp(digits, "chunked") == 0;
    } else if (header_value(data, n, "Retry-After", digits, sizeof digits) &&
               kvq__reply_number(digits, 60, &seconds)) {
        a->retry_after_ms = (uint32_t)seconds * 1000;
    }
    return n;
}

// ---- One try ----

static bool add_header(struct curl_slist **list, const char *name, const char *value)
{
    char line[sizeof((struct kvq_remote_keys *)0)->token + 64];
    int used = snprintf(line, sizeof line, "%s: %s", name, value);
    assert(used > 0 && (size_t)used < sizeof line);
    struct curl_slist *longer = curl_slist_append(*list, line);
    explicit_bzero(line, sizeof line);
    if (!longer)
        return false;
    *list = longer;
    return true;
}

static int make_headers(struct kvq__call *call, const struct kvq__request *q,
                        struct curl_slist **list)
{
    uint8_t sha[KVQ__SHA_BYTES];
    char hex[KVQ__SHA_HEX];
    const struct kvq_remote_keys *keys = &call->remote->keys;
    if (q->sha)
        memcpy(sha, q->sha, sizeof sha);
    else if (kvq__sha256(q->body_bytes ? q->body : "", q->body_bytes, sha) != 0)
        return kvq__remote_say(call, KVQ_E_SYSTEM, q->method, q->key, "SHA-256 is not to be had");
    kvq__sha_hex(sha, hex);
    // The server compares the body with this, which is part of what is signed.
    if (add_header(list, "x-amz-content-sha256", hex) &&
        (!keys->token[0] || add_header(list, "x-amz-security-token", keys->token)) &&
        (!q->body || add_header(list, "Content-Type", "application/octet-stream")))
        return 0;
    return kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key, "no memory for a request");
}

static char *make_url(const struct kvq_remote *r, const struct kvq__request *q)
{
    char *url = NULL;
    const char *key = q->key ? q->key : "", *prefix = q->key ? r->prefix : "";
    if (asprintf(&url, "%s/%s%s%s%s", r->base, prefix, key, q->query ? "?" : "",
                 q->query ? q->query : "") < 0)
        return NULL;
    return url;
}

static void set_method(CURL *easy, const struct kvq__request *q)
{
    if (strcmp(q->method, "HEAD") == 0)
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    else
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, q->method);
    if (q->body) { // curl reads it where it lies
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)q->body_bytes);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, q->body);
    }
    curl_easy_setopt(easy, CURLOPT_RANGE, q->range);
}

static void set_up_transfer(struct attempt *a, const char *url, struct curl_slist *headers)
{
    struct kvq_remote *r = a->call->remote;
    CURL *easy = r->easy;
    curl_easy_reset(easy); // connections stay
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L); // what is signed is what is sent
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)r->connect_ms);
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L); // nobody waits for a resolver to give up
    curl_easy_setopt(easy, CURLOPT_EXPECT_100_TIMEOUT_MS, (long)CONTINUE_MS);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, a->error);
    if (r->ca_file)
        curl_easy_setopt(easy, CURLOPT_CAINFO, r->ca_file);
    curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, r->sigv4);
    curl_easy_setopt(easy, CURLOPT_USERNAME, r->keys.id);
    curl_easy_setopt(easy, CURLOPT_PASSWORD, r->keys.secret);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    set_method(easy, a->request);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, a);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, a);
}

// Drives a transfer to its end, or until it stalls or somebody has had enough.
static CURLMcode drive_transfer(struct attempt *a)
{
    struct kvq_remote *r = a->call->remote;
    uint64_t patience = (uint64_t)r->stall_ms * (a->request->patience ? a->request->patience : 1);
    uint64_t since = r->clock->now_ms(r->clock), before = 0;
    int running = 1;
    for (;;) {
        CURLMcode rc = curl_multi_perform(r->multi, &running);
        if (rc != CURLM_OK || running == 0)
            return rc;
        curl_off_t sent = 0;
        curl_easy_getinfo(r->easy, CURLINFO_SIZE_UPLOAD_T, &sent);
        uint64_t moved = a->heard + (uint64_t)sent, now = r->clock->now_ms(r->clock);
        if (now - since >= patience) {
            a->stalled = moved - before < STALL_BYTES;
            since = now;
            before = moved;
        }
        a->cancelled = kvq__remote_tell(a->call, a->request->watched ? moved : 0) != 0;
        if (a->stalled || a->cancelled)
            return CURLM_OK;
        rc = curl_multi_poll(r->multi, NULL, 0, STEP_MS, NULL);
        if (rc != CURLM_OK)
            return rc;
    }
}

static int say_broken(struct attempt *a, CURLcode result, bool again)
{
    char repeated[32] = "";
    const char *what = a->error[0] ? a->error : curl_easy_strerror(result);
    if (a->stalled)
        what = "nothing, or next to nothing, moved for too long";
    if (again && a->tries > 0)
        snprintf(repeated, sizeof repeated, ", after %u tries", a->tries + 1);
    return kvq__remote_say(a->call, KVQ_E_REMOTE, a->request->method, a->request->key,
                           "%s%s; check the endpoint, and that the store is up", what, repeated);
}

// Sends it once. 0 with an answer of whatever status, or a code; *again says whether to repeat it.
static int try_once(struct attempt *a, bool *again)
{
    struct kvq__call *call = a->call;
    const struct kvq__request *q = a->request;
    struct kvq_remote *r = call->remote;
    struct curl_slist *headers = NULL;
    CURLcode result = CURLE_FAILED_INIT;
    assert(!a->answer->body);
    *again = false;
    a->answer->length = UINT64_MAX;
    char *url = make_url(r, q);
    int rc = url ? make_headers(call, q, &headers)
                 : kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key, "no memory");
    if (rc != 0)
        goto out;
    set_up_transfer(a, url, headers);
    if (curl_multi_add_handle(r->multi, r->easy) != CURLM_OK || drive_transfer(a) != CURLM_OK)
        a->no_memory = true;
    int left = 0;
    CURLMsg *message = curl_multi_info_read(r->multi, &left);
    if (message && message->msg == CURLMSG_DONE)
        result = message->data.result;
    curl_multi_remove_handle(r->multi, r->easy);
    curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &a->answer->status);
    curl_easy_reset(r->easy); // it points to this attempt, the headers and the keys
    if (a->cancelled)
        rc = KVQ_E_CANCELLED; // the sentence stands already
    else if (a->no_memory)
        rc = kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key, "no memory for a transfer");
    else if (a->too_long && !is_success(a->answer->status))
        rc = 0; // who cares for the rest of an error
    else if (a->too_long)
        rc = kvq__remote_say(call, KVQ_E_REMOTE, q->method, q->key,
                             "the reply is longer than the %zu bytes that it may have", q->max);
    else if (a->stalled || result != CURLE_OK) {
        *again = a->stalled ||
                 (result != CURLE_PEER_FAILED_VERIFICATION && result != CURLE_SSL_CACERT_BADFILE);
        rc = say_broken(a, result, *again);
    }
out:
    curl_slist_free_all(headers);
    free(url);
    return rc;
}

// ---- What an answer means ----

static bool is_transient(long status, const char *code)
{
    return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
           status == 504 || strcmp(code, "RequestTimeout") == 0 ||
           strcmp(code, "XAmzContentSHA256Mismatch") == 0 || strcmp(code, "BadDigest") == 0;
}

bool kvq__remote_may_pass(const struct kvq__reply *reply)
{
    const char *code = reply->code;
    return strcmp(reply->root, "Error") == 0 &&
           (strcmp(code, "InternalError") == 0 || strcmp(code, "SlowDown") == 0 ||
            strcmp(code, "ServiceUnavailable") == 0 || is_transient(200, code));
}

static const char *advice_for(long status, const char *code)
{
    static const struct {
        const char *code, *text;
    } known[] = {
        {"SignatureDoesNotMatch", "; check the secret key and the region"},
        {"InvalidAccessKeyId", "; check the access key"},
        {"AccessDenied", "; these keys may not do that in this bucket"},
        {"RequestTimeTooSkewed", "; set this machine's clock"},
        {"ExpiredToken", "; get new keys, these were temporary"},
        {"NoSuchBucket", "; make the bucket, or correct its name"},
        {"EntityTooSmall", "; set a larger size of parts, 5 MiB or more"},
        {"AuthorizationHeaderMalformed", "; check the region"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].code, code) == 0)
            return known[i].text;
    }
    if (status >= 300 && status < 400)
        return "; redirects are not followed: correct the endpoint or the region";
    if (status == 401 || status == 403)
        return "; check the keys, the region and what they may do";
    return status >= 500 || status == 429 ? "; try again later" : "";
}

// A code and a sentence for an answer that is none of success.
static int judge_answer(struct attempt *a, bool *again)
{
    const struct kvq__request *q = a->request;
    struct kvq__answer *answer = a->answer;
    assert(!is_success(answer->status));
    struct kvq__reply *reply = calloc(1, sizeof *reply);
    const char *why;
    char code[64] = "", message[200] = "", repeated[32] = "";
    if (reply && answer->bytes &&
        kvq__reply_parse(answer->body, answer->bytes, reply, NULL, NULL, &why) == 0 &&
        strcmp(reply->root, "Error") == 0) {
        put_words(code, sizeof code, reply->code);
        put_words(message, sizeof message, reply->message);
    }
    free(reply);
    *again = is_transient(answer->status, code);
    bool absent = answer->status == 404 && (q->key || strcmp(code, "NoSuchUpload") == 0) &&
                  strcmp(code, "NoSuchBucket") != 0;
    if (absent && q->absent_is_fine)
        return KVQ_E_NO_SESSION;
    if (*again && a->tries > 0)
        snprintf(repeated, sizeof repeated, ", after %u tries", a->tries + 1);
    int rc = answer->status == 401 || answer->status == 403 ? KVQ_E_PERMISSION
             : absent                                       ? KVQ_E_NO_SESSION
                                                            : KVQ_E_REMOTE;
    return kvq__remote_say(a->call, rc, q->method, q->key, "HTTP %ld%s%s%s%s%s%s", answer->status,
                           code[0] ? " " : "", code, message[0] ? ": " : "", message, repeated,
                           advice_for(answer->status, code));
}

void kvq__answer_free(struct kvq__answer *answer)
{
    free(answer->body);
    answer->body = NULL;
}

int kvq__request(struct kvq__call *call, const struct kvq__request *request,
                 struct kvq__answer *answer)
{
    assert(request->body || request->body_bytes == 0);
    for (uint32_t tries = 0;; tries++) {
        memset(answer, 0, sizeof *answer);
        struct attempt a = {.call = call, .request = request, .answer = answer, .tries = tries};
        bool again = false;
        int rc = try_once(&a, &again);
        if (rc == 0 && is_success(answer->status)) {
            if (!answer->body)
                answer->body = calloc(1, 1);
            return answer->body ? 0
                                : kvq__remote_say(call, KVQ_E_NO_MEMORY, request->method,
                                                  request->key, "no memory");
        }
        if (rc == 0)
            rc = judge_answer(&a, &again);
        kvq__answer_free(answer);
        if (!again || tries >= call->remote->retries)
            return rc;
        int waited = kvq__remote_wait(call, tries + 1, a.retry_after_ms);
        if (waited != 0)
            return waited;
    }
}

int kvq__remote_parse(struct kvq__call *call, const struct kvq__request *request,
                      const struct kvq__answer *answer, const char *root, struct kvq__reply *reply,
                      int (*each)(void *context, const struct kvq__reply_item *item), void *context)
{
    assert(answer->body);
    const char *why = "";
    int rc = kvq__reply_parse(answer->body, answer->bytes, reply, each, context, &why);
    if (rc == 0 && strncmp(reply->root, root, strlen(root)) == 0)
        return 0;
    char words[200];
    if (rc == 0 && strcmp(reply->root, "Error") == 0) { // with status 200, which may come late
        put_words(words, sizeof words, reply->message);
        rc = strcmp(reply->code, "NoSuchUpload") == 0 ? KVQ_E_NO_SESSION : KVQ_E_REMOTE;
        return kvq__remote_say(call, rc, request->method, request->key, "%.64s: %s%s", reply->code,
                               words, advice_for(500, reply->code));
    }
    if (rc == 0)
        why = "it is not the document that was asked for";
    else if (rc != KVQ_E_REMOTE)
        return rc;
    return kvq__remote_say(call, rc == 0 ? KVQ_E_REMOTE : rc, request->method, request->key,
                           "the reply makes no sense: %s; is an S3-compatible store there?", why);
}
