// SPDX-License-Identifier: Apache-2.0
//
// Requests to the remote store: signed, sent, watched, and sent again where that may help; several
// side by side, each on a connection of its own.
//
// curl's multi interface drives the transfers, so that between its steps we can look at the watcher
// and at our own clock. A request's body and a reply's body are in memory as a whole, which the
// size of parts bounds.
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

// A connection with its request, and the try of it that is under way.
struct lane {
    struct kvq__call *call;
    CURL *easy;
    enum { IDLE, MOVING, WAITING } state; // WAITING: to be sent once more
    struct kvq__request request;
    struct kvq__answer answer;
    char *url;
    struct curl_slist *headers;
    size_t room;            // of answer.body
    uint64_t heard;         // bytes of headers and body
    uint64_t since, before; // since when it is being looked at, and what had moved by then
    bool too_long;          // the reply went past its limit
    bool no_memory, stalled;
    uint32_t tries; // before this one
    uint32_t retry_after_ms;
    uint64_t until; // WAITING: when it is sent again, by crew_now()
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

// How long to wait before try number `tries`.
static uint32_t wait_before(struct kvq_remote_clock *clock, uint32_t tries, uint32_t at_least_ms)
{
    assert(tries > 0);
    uint32_t most = tries < 8 ? FIRST_WAIT_MS << (tries - 1) : LONGEST_WAIT_MS;
    most = most < LONGEST_WAIT_MS ? most : LONGEST_WAIT_MS;
    // Between half and all of it, so that many clients do not come back at the same time.
    uint32_t ms = most / 2 + clock->random(clock) % (most / 2 + 1);
    return ms > at_least_ms ? ms : at_least_ms;
}

int kvq__remote_wait(struct kvq__call *call, uint32_t tries, uint32_t at_least_ms)
{
    struct kvq_remote_clock *clock = call->remote->clock;
    uint32_t left = wait_before(clock, tries, at_least_ms);
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
    struct lane *l = context;
    struct kvq__answer *answer = &l->answer;
    size_t n = size * count;
    long status = 0;
    curl_easy_getinfo(l->easy, CURLINFO_RESPONSE_CODE, &status);
    size_t max = is_success(status) ? l->request.max : ERROR_BODY;
    l->heard += n;
    if (n > max - answer->bytes) {
        l->too_long = true;
        return 0;
    }
    if (answer->bytes + n + 1 > l->room) {
        size_t room = 2 * (answer->bytes + n + 1);
        room = room < max + 1 ? room : max + 1;
        char *bigger = realloc(answer->body, room);
        if (!bigger) {
            l->no_memory = true;
            return 0;
        }
        answer->body = bigger;
        l->room = room;
    }
    assert(answer->bytes + n < l->room);
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
    struct lane *l = context;
    struct kvq__answer *answer = &l->answer;
    size_t n = size * count;
    char digits[24];
    uint64_t seconds;
    l->heard += n;
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
        l->retry_after_ms = (uint32_t)seconds * 1000;
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

static void set_up_transfer(struct lane *l)
{
    struct kvq_remote *r = l->call->remote;
    CURL *easy = l->easy;
    curl_easy_reset(easy); // connections stay
    curl_easy_setopt(easy, CURLOPT_URL, l->url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L); // what is signed is what is sent
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)r->connect_ms);
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L); // nobody waits for a resolver to give up
    curl_easy_setopt(easy, CURLOPT_EXPECT_100_TIMEOUT_MS, (long)CONTINUE_MS);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, l->error);
    if (r->ca_file)
        curl_easy_setopt(easy, CURLOPT_CAINFO, r->ca_file);
    curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, r->sigv4);
    curl_easy_setopt(easy, CURLOPT_USERNAME, r->keys.id);
    curl_easy_setopt(easy, CURLOPT_PASSWORD, r->keys.secret);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, l->headers);
    set_method(easy, &l->request);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, l);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, l);
}

// What has moved of a transfer that is under way.
static uint64_t moved_by(const struct lane *l)
{
    curl_off_t sent = 0;
    curl_easy_getinfo(l->easy, CURLINFO_SIZE_UPLOAD_T, &sent);
    return l->heard + (uint64_t)sent;
}

static int say_broken(struct lane *l, CURLcode result, bool again)
{
    char repeated[32] = "";
    const char *what = l->error[0] ? l->error : curl_easy_strerror(result);
    if (l->stalled)
        what = "nothing, or next to nothing, moved for too long";
    if (again && l->tries > 0)
        snprintf(repeated, sizeof repeated, ", after %u tries", l->tries + 1);
    return kvq__remote_say(l->call, KVQ_E_REMOTE, l->request.method, l->request.key,
                           "%s%s; check the endpoint, and that the store is up", what, repeated);
}

static void free_try(struct lane *l)
{
    curl_easy_reset(l->easy); // it points to this lane, the headers and the keys
    curl_slist_free_all(l->headers);
    free(l->url);
    l->headers = NULL;
    l->url = NULL;
    l->state = IDLE;
}

// Sends the request, for the first time or once more.
static int begin_try(struct lane *l)
{
    struct kvq__call *call = l->call;
    const struct kvq__request *q = &l->request;
    assert(l->state != MOVING && !l->answer.body && !l->url);
    l->answer = (struct kvq__answer){.length = UINT64_MAX};
    l->room = 0;
    l->heard = l->before = 0;
    l->too_long = l->no_memory = l->stalled = false;
    l->retry_after_ms = 0;
    l->error[0] = '\0';
    l->url = make_url(call->remote, q);
    int rc = l->url ? make_headers(call, q, &l->headers)
                    : kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key, "no memory");
    if (rc == 0) {
        set_up_transfer(l);
        if (curl_multi_add_handle(call->remote->multi, l->easy) != CURLM_OK)
            rc = kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key,
                                 "no memory for a transfer");
    }
    if (rc != 0) {
        free_try(l);
        return rc;
    }
    l->state = MOVING;
    l->since = call->remote->clock->now_ms(call->remote->clock);
    return 0;
}

// A transfer has ended or been broken off. 0 with an answer of whatever status, or a code; *again
// says whether to repeat the request.
static int end_try(struct lane *l, CURLcode result, bool *again)
{
    struct kvq__call *call = l->call;
    const struct kvq__request *q = &l->request;
    assert(l->state == MOVING);
    *again = false;
    curl_multi_remove_handle(call->remote->multi, l->easy);
    curl_easy_getinfo(l->easy, CURLINFO_RESPONSE_CODE, &l->answer.status);
    free_try(l);
    if (l->no_memory)
        return kvq__remote_say(call, KVQ_E_NO_MEMORY, q->method, q->key,
                               "no memory for a transfer");
    if (l->too_long && !is_success(l->answer.status))
        return 0; // who cares for the rest of an error
    if (l->too_long)
        return kvq__remote_say(call, KVQ_E_REMOTE, q->method, q->key,
                               "the reply is longer than the %zu bytes that it may have", q->max);
    if (!l->stalled && result == CURLE_OK)
        return 0;
    *again = l->stalled ||
             (result != CURLE_PEER_FAILED_VERIFICATION && result != CURLE_SSL_CACERT_BADFILE);
    return say_broken(l, result, *again);
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
static int judge_answer(struct lane *l, bool *again)
{
    const struct kvq__request *q = &l->request;
    struct kvq__answer *answer = &l->answer;
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
    if (*again && l->tries > 0)
        snprintf(repeated, sizeof repeated, ", after %u tries", l->tries + 1);
    int rc = answer->status == 401 || answer->status == 403 ? KVQ_E_PERMISSION
             : absent                                       ? KVQ_E_NO_SESSION
                                                            : KVQ_E_REMOTE;
    return kvq__remote_say(l->call, rc, q->method, q->key, "HTTP %ld%s%s%s%s%s%s", answer->status,
                           code[0] ? " " : "", code, message[0] ? ": " : "", message, repeated,
                           advice_for(answer->status, code));
}

void kvq__answer_free(struct kvq__answer *answer)
{
    free(answer->body);
    answer->body = NULL;
}

// ---- All requests of a call ----

struct crew {
    struct kvq__call *call;
    struct kvq__requests *all;
    struct lane lanes[KVQ_REMOTE_CONNECTIONS];
    uint32_t n;
    bool none_left;
    uint64_t slept; // ms that a clock slept without going on, as those of tests do
};

static uint64_t crew_now(const struct crew *c)
{
    struct kvq_remote_clock *clock = c->call->remote->clock;
    return clock->now_ms(clock) + c->slept;
}

// The time since `began` was spent on reading, checking or writing: nothing could move meanwhile.
static void forgive(struct crew *c, uint64_t began)
{
    uint64_t spent = crew_now(c) - began;
    for (uint32_t i = 0; i < c->n; i++)
        c->lanes[i].since += spent;
}

// Gives lanes that are free their next requests, and sends those again whose time has come.
static int send_more(struct crew *c)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < c->n; i++) {
        struct lane *l = &c->lanes[i];
        if (l->state == WAITING && crew_now(c) >= l->until) {
            rc = begin_try(l);
        } else if (l->state == IDLE && !c->none_left) {
            uint64_t began = crew_now(c);
            l->request = (struct kvq__request){0};
            l->tries = 0;
            rc = c->all->make(c->all->context, i, &l->request);
            forgive(c, began);
            c->none_left = rc != 0;
            rc = rc == 1 ? 0 : rc ? rc : begin_try(l);
        }
    }
    return rc;
}

static int take_answer(struct crew *c, struct lane *l)
{
    uint64_t began = crew_now(c);
    int rc = c->all->take(c->all->context, (uint32_t)(l - c->lanes), &l->answer);
    forgive(c, began);
    return rc;
}

// What becomes of a request whose transfer has ended.
static int settle(struct crew *c, struct lane *l, CURLcode result)
{
    bool again = false;
    int rc = end_try(l, result, &again);
    bool good = rc == 0 && is_success(l->answer.status);
    if (good && !l->answer.body)
        l->answer.body = calloc(1, 1);
    if (good && !l->answer.body)
        rc = kvq__remote_say(c->call, KVQ_E_NO_MEMORY, l->request.method, l->request.key,
                             "no memory");
    else if (good)
        rc = take_answer(c, l);
    else if (rc == 0)
        rc = judge_answer(l, &again);
    c->all->status = l->answer.status;
    kvq__answer_free(&l->answer);
    if (rc != 1 && (!again || l->tries >= c->call->remote->retries))
        return rc;
    l->tries++;
    l->until = crew_now(c) + wait_before(c->call->remote->clock, l->tries, l->retry_after_ms);
    l->state = WAITING;
    return 0;
}
static int settle_ended(struct crew *c, bool *some)
{
    int left = 0, rc = 0;
    CURLMsg *message;
    *some = false;
    while (rc == 0 && (message = curl_multi_info_read(c->call->remote->multi, &left))) {
        for (uint32_t i = 0; message->msg == CURLMSG_DONE && i < c->n; i++) {
            if (c->lanes[i].easy != message->easy_handle)
                continue;
            *some = true;
            rc = settle(c, &c->lanes[i], message->data.result);
            break; // the message is gone
        }
    }
    return rc;
}

// Breaks stalled transfers off, and tells the watcher what has moved.
static int look_after(struct crew *c)
{
    struct kvq_remote *r = c->call->remote;
    uint64_t now = r->clock->now_ms(r->clock), all = 0;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < c->n; i++) {
        struct lane *l = &c->lanes[i];
        if (l->state != MOVING)
            continue;
        uint64_t moved = moved_by(l), most = l->request.patience ? l->request.patience : 1;
        if (now - l->since >= r->stall_ms * most) {
            l->stalled = moved - l->before < STALL_BYTES;
            l->since = now;
            l->before = moved;
        }
        all += l->request.watched ? moved : 0;
        if (l->stalled)
            rc = settle(c, l, CURLE_OPERATION_TIMEDOUT);
    }
    return rc ? rc : kvq__remote_tell(c->call, all);
}

// Until something moves, or a request is to be sent again.
static int pause_crew(struct crew *c)
{
    struct kvq_remote *r = c->call->remote;
    uint64_t now = crew_now(c), ms = STEP_MS;
    bool moving = false;
    for (uint32_t i = 0; i < c->n; i++) {
        const struct lane *l = &c->lanes[i];
        uint64_t left = l->state == WAITING && l->until > now ? l->until - now : 0;
        moving |= l->state == MOVING;
        if (l->state == WAITING && left < ms)
            ms = left;
    }
    if (moving) {
        if (curl_multi_poll(r->multi, NULL, 0, (int)ms, NULL) != CURLM_OK)
            return kvq__remote_say(c->call, KVQ_E_NO_MEMORY, "GET", NULL, "no memory to wait");
        return 0;
    }
    r->clock->sleep_ms(r->clock, (uint32_t)ms);
    uint64_t then = crew_now(c);
    if (then < now + ms)
        c->slept += now + ms - then;
    return 0;
}

static bool is_busy(const struct crew *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (c->lanes[i].state != IDLE)
            return true;
    return false;
}

// Breaks off what is under way still.
static void dismiss(struct crew *c)
{
    for (uint32_t i = 0; i < c->n; i++) {
        struct lane *l = &c->lanes[i];
        if (l->state == MOVING) {
            curl_multi_remove_handle(c->call->remote->multi, l->easy);
            free_try(l);
        }
        kvq__answer_free(&l->answer);
    }
}

uint32_t kvq__lanes_of(const struct kvq_remote *remote, uint64_t bytes)
{
    assert(bytes > 0 && remote->lanes > 0);
    uint64_t most = KVQ_REMOTE_MAX_BUFFERS / bytes;
    return most >= remote->lanes ? remote->lanes : most > 1 ? (uint32_t)most : 1;
}

int kvq__requests(struct kvq__call *call, struct kvq__requests *all)
{
    struct kvq_remote *r = call->remote;
    struct crew c = {.call = call, .all = all, .n = all->lanes};
    assert(c.n > 0 && c.n <= r->lanes);
    for (uint32_t i = 0; i < c.n; i++)
        c.lanes[i] = (struct lane){.call = call, .easy = r->easy[i]};
    int rc = send_more(&c), running = 0;
    while (rc == 0 && is_busy(&c)) {
        bool some = false;
        if (curl_multi_perform(r->multi, &running) != CURLM_OK)
            rc = kvq__remote_say(call, KVQ_E_NO_MEMORY, "GET", NULL, "no memory for transfers");
        rc = rc ? rc : settle_ended(&c, &some);
        rc = rc ? rc : send_more(&c);
        rc = rc || !is_busy(&c) ? rc : look_after(&c);
        rc = rc || some || !is_busy(&c) ? rc : pause_crew(&c);
    }
    dismiss(&c);
    return rc;
}

// ---- A single one ----

struct single {
    const struct kvq__request *request;
    struct kvq__answer *answer;
    bool made;
};

static int make_single(void *context, uint32_t lane, struct kvq__request *request)
{
    struct single *s = context;
    assert(lane == 0);
    if (s->made)
        return 1;
    s->made = true;
    *request = *s->request;
    return 0;
}

static int take_single(void *context, uint32_t lane, struct kvq__answer *answer)
{
    struct single *s = context;
    assert(lane == 0);
    *s->answer = *answer;
    answer->body = NULL; // it is the caller's now
    return 0;
}

int kvq__request(struct kvq__call *call, const struct kvq__request *request,
                 struct kvq__answer *answer)
{
    assert(request->body || request->body_bytes == 0);
    struct single s = {.request = request, .answer = answer};
    struct kvq__requests all = {
        .context = &s, .make = make_single, .take = take_single, .lanes = 1};
    memset(answer, 0, sizeof *answer);
    int rc = kvq__requests(call, &all);
    answer->status = all.status;
    return rc;
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
