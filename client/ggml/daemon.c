// SPDX-License-Identifier: Apache-2.0
//
// See daemon.h.
#include "client/ggml/daemon.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROLLBACK = 32,        // tokens that llama.cpp takes back without loss, unless told otherwise
    MOST_ROLLBACK = 1024, // that kvqd takes
    PROBE_DIM = 128,
};

// ---- Words ----------------------------------------------------------------------------------

bool kvq_ggml_refuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("kvq: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return false;
}

const char *kvq_ggml_why(int code)
{
    assert(code != 0);
    return code == KVQ_E_DISCONNECTED
               ? "kvqd is gone or has closed the connection; its log says why. With a kvqd that "
                 "runs, the next prompt that begins at the first token goes on (llama-cpp-python: "
                 "after Llama.reset())"
               : kvq_error_text();
}

bool kvq_ggml_failed(const char *what, int code)
{
    return kvq_ggml_refuse("%s: %s", what, kvq_ggml_why(code));
}

// ---- The environment ------------------------------------------------------------------------

// NULL also if it is empty: compose files and systemd units leave variables so that nobody set.
static const char *from_environment(const char *variable)
{
    const char *value = getenv(variable);
    return value && *value ? value : NULL;
}

bool kvq_ggml_ask(struct kvq_ggml_asked *asked)
{
    const char *format = from_environment("KVQ_LLAMA_FORMAT");
    const char *path = from_environment("KVQ_LLAMA_ATTENTION");
    const char *back = from_environment("KVQ_LLAMA_ROLLBACK");
    *asked = (struct kvq_ggml_asked){.format = format ? format : "kvq2",
                                     .name = from_environment("KVQ_LLAMA_SESSION"),
                                     .attention = KVQ_ATTENTION_DEFAULT,
                                     .dtype = KVQ_DTYPE_F16,
                                     .rollback = ROLLBACK};
    if (strcmp(asked->format, "bf16") == 0) // holds K and V in nothing else
        asked->dtype = KVQ_DTYPE_BF16;
    if (path && strcmp(path, "exact") && strcmp(path, "fast"))
        return kvq_ggml_refuse("KVQ_LLAMA_ATTENTION is \"%s\"; give exact or fast", path);
    if (path)
        asked->attention = *path == 'e' ? KVQ_ATTENTION_EXACT : KVQ_ATTENTION_FAST;
    if (back) {
        const unsigned long told = strtoul(back, NULL, 10);
        if (strspn(back, "0123456789") != strlen(back) || told > MOST_ROLLBACK)
            return kvq_ggml_refuse("KVQ_LLAMA_ROLLBACK is \"%s\"; give tokens, 0 to %d", back,
                                   MOST_ROLLBACK);
        asked->rollback = (uint32_t)told;
    }
    if (asked->name && strlen(asked->name) > KVQ_GGML_NAME)
        return kvq_ggml_refuse("KVQ_LLAMA_SESSION has %zu bytes; give a name of at most %d",
                               strlen(asked->name), KVQ_GGML_NAME);
    return true;
}

// Whether kvqd has the format, before a model's first prompt finds out. A model's shape is not
// known yet: what a codebook has to say of another one is no answer.
static bool check_format(const struct kvq_ggml_daemon *daemon, const struct kvq_ggml_asked *asked)
{
    uint64_t tokens;
    kvq_buffer *ids = NULL;
    const struct kvq_layer layer = {
        .q_heads = 1, .kv_heads = 1, .k_dim = PROBE_DIM, .v_dim = PROBE_DIM};
    struct kvq_session_options options = {.size = sizeof options,
                                          .model = "llama.cpp",
                                          .layers = &layer,
                                          .n_layers = 1,
                                          .format = asked->format,
                                          .dtype = asked->dtype,
                                          .place = "host"};
    int code = kvq_buffer_create(daemon->client, sizeof(int32_t), &ids);
    if (code == 0) {
        options.prefix = (struct kvq_prefix){.buffer = ids, .tokens = 1};
        code = kvq_lookup(daemon->client, &options, &tokens); // opens nothing
    }
    const bool wrong = code == KVQ_E_FORMAT && !strstr(kvq_error_text(), "codebook");
    if (wrong)
        kvq_ggml_refuse("KVQ_LLAMA_FORMAT is \"%s\": %s", asked->format, kvq_error_text());
    kvq_buffer_close(&ids);
    return !wrong;
}

// ---- The connection -------------------------------------------------------------------------

bool kvq_ggml_daemon_open(struct kvq_ggml_daemon *daemon)
{
    struct kvq_ggml_asked asked;
    const struct kvq_connect_options options = {.size = sizeof options, .name = "llama.cpp"};
    *daemon = (struct kvq_ggml_daemon){.threads = 1};
    if (!kvq_ggml_ask(&asked))
        return false;
    if (kvq_connect(&options, &daemon->client) || kvq_queue_open(daemon->client, &daemon->queue)) {
        kvq_ggml_refuse("%s; llama.cpp runs without kvq if GGML_BACKEND_PATH is unset",
                        kvq_error_text());
        goto fail;
    }
    if (check_format(daemon, &asked))
        return true;
fail:
    kvq_ggml_daemon_close(daemon);
    return false;
}

void kvq_ggml_daemon_close(struct kvq_ggml_daemon *daemon)
{
    kvq_queue_close(&daemon->queue);
    kvq_disconnect(&daemon->client);
}

bool kvq_ggml_daemon_again(struct kvq_ggml_daemon *daemon)
{
    assert(daemon->client && daemon->queue);
    if (kvq_nop(daemon->queue, NULL, 0) == 0)
        return true;
    daemon->remade++; // also where it fails half-way: the library has forgotten the sessions
    const int code = kvq_reattach(daemon->client, NULL);
    if (code && code != KVQ_E_EPOCH)
        return kvq_ggml_refuse("%s; the next prompt that begins at the first token tries again",
                               kvq_error_text());
    kvq_ggml_refuse("connected again: %s; what it had of llama.cpp's sequences is gone",
                    code ? "kvqd was restarted" : "kvqd had closed the connection");
    return true;
}
