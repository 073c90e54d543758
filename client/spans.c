// SPDX-License-Identifier: Apache-2.0
//
// Spans: which of a session's tokens stand for images or audio.
#include "client/internal.h"

#include <stdlib.h>

int kvq__spans_put(struct kvq__spans *s, const struct kvq_span *spans, uint32_t n)
{
    *s = (struct kvq__spans){0};
    if (n > KVQ_MAX_SPANS || (n && !spans))
        return kvq__set_error(spans ? KVQ_E_LIMIT : KVQ_E_INVALID,
                              "%u spans of images or audio%s; a session has %d at most", n,
                              spans ? "" : " at NULL", KVQ_MAX_SPANS);
    s->spans = calloc(n + 1, sizeof *s->spans);
    s->pointers = calloc(n + 1, sizeof *s->pointers);
    if (!s->spans || !s->pointers) {
        kvq__spans_free(s);
        return kvq__set_error(KVQ_E_NO_MEMORY, "no memory for a message");
    }
    for (uint32_t i = 0; i < n; i++) {
        kvq__span__init(&s->spans[i]);
        s->spans[i].first = spans[i].first;
        s->spans[i].tokens = spans[i].tokens;
        s->spans[i].digest.data = (uint8_t *)(uintptr_t)spans[i].digest; // only read
        s->spans[i].digest.len = sizeof spans[i].digest;
        s->pointers[i] = &s->spans[i];
    }
    return KVQ_OK;
}

void kvq__spans_free(struct kvq__spans *s)
{
    free(s->spans);
    free(s->pointers);
    *s = (struct kvq__spans){0};
}

int kvq_session_spans(kvq_client *client, kvq_session session, const struct kvq_span *spans,
                      uint32_t n)
{
    Kvq__TellSpans message = KVQ__TELL_SPANS__INIT;
    struct kvq__spans own;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "telling what tokens stand for"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_spans: client is NULL");
    int rc = kvq__spans_put(&own, spans, n);
    if (rc)
        return rc;
    message.handle = session;
    message.n_spans = n;
    message.spans = own.pointers;
    call.request.command_case = KVQ__REQUEST__COMMAND_TELL_SPANS;
    call.request.tell_spans = &message;
    rc = kvq__ask(client, &call);
    kvq__spans_free(&own);
    return rc;
}
