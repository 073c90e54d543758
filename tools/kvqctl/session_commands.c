// SPDX-License-Identifier: Apache-2.0
// Commands about sessions: list, show, drop.
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "tools/kvqctl/table.h"

static const struct kvq__ctl_kind kind = KVQ__CTL_KIND(
    SESSIONS, Kvq__SessionList, sessions, "sessions", "narrow it with --namespace NAME");

int kvq__ctl_ask_sessions(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListSessions command = KVQ__LIST_SESSIONS__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_SESSIONS;
    request.list_sessions = &command;
    if (ctl->ns)
        command.namespace_ = (char *)ctl->ns;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &kind, list);
}

int kvq__ctl_session_list(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    struct kvq__ctl_list list;
    int result = kvq__ctl_ask_sessions(ctl, &list);
    if (result)
        return result;
    return kvq__ctl_show_list(ctl, &list, &kind, &kvq__ctl_sessions);
}

static void print_shards(const Kvq__Session *s)
{
    if (s->n_shard_list == 0)
        return;
    printf("shards      %" PRIu32 ", committed by all: %s%s\n", s->shards,
           kvq__ctl_count(s->group_tokens, "token"),
           s->n_shard_list < s->shards ? "; some were never opened" : "");
    for (size_t i = 0; i < s->n_shard_list; i++) {
        const Kvq__Shard *one = s->shard_list[i];
        printf("  %-9" PRIu32 " %s on %s, id %" PRIu64, one->shard,
               kvq__ctl_count(one->tokens, "token"), kvq__ctl_clean(one->place), one->id);
        if (one->writer_client)
            printf(", client %" PRIu64, one->writer_client);
        printf("%s\n", one->ended ? ", its step waits for the others" : "");
    }
}

static void print_rotation(const char *by)
{
    if (strcmp(by, "engine") == 0)
        printf("V           rotated by the engine, as outputs are\n");
    else if (strcmp(by, "none") != 0 && *by)
        printf("V           rotated by the daemon when packed%s, outputs are rotated back\n",
               strcmp(by, "mixed") == 0 ? ", in some layers" : "");
}

// What a token takes. Memory comes in blocks: a short session may take more than 16 bits would.
static void print_size(const Kvq__Session *s)
{
    double times = s->compression;
    printf("a token     %.1f bytes per KV head packed, %.1f with everything",
           s->bytes_per_token_head, s->bytes_per_token_head_total);
    if (times > 0)
        printf("; %.2f times %s than 16 bits", times < 1 ? 1 / times : times,
               times < 1 ? "larger" : "smaller");
    printf("\n");
}

static void print_session(const Kvq__Session *s)
{
    printf("session     %s in namespace %s (id %" PRIu64 ")\n", kvq__ctl_session_label(s),
           kvq__ctl_clean(s->namespace_), s->id);
    printf("model       %s\n", s->model && *s->model ? kvq__ctl_clean(s->model) : "not said");
    printf("shape       %s, %s, %s, head_dim %" PRIu32 "\n", kvq__ctl_count(s->layers, "layer"),
           kvq__ctl_count(s->q_heads, "query head"), kvq__ctl_count(s->kv_heads, "KV head"),
           s->head_dim);
    printf("format      %s, %.3f bits per value with parameters; %s attention on %s\n",
           kvq__ctl_clean(s->format), s->bits_per_value, kvq__ctl_clean(s->path),
           kvq__ctl_clean(s->isa));
    if (s->place && *s->place)
        printf("place       %s%s\n", kvq__ctl_clean(s->place),
               s->tier && strcmp(s->tier, "disk") == 0 ? ", when it is back from disk" : "");
    if (s->layer_formats && *s->layer_formats)
        printf("layers      %s\n", kvq__ctl_clean(s->layer_formats));
    print_rotation(s->v_rotation ? s->v_rotation : "");
    printf("tokens      %" PRIu64 ", of which %" PRIu64 " still in 16 bits; rollback up to %" PRIu32
           "\n",
           s->tokens, s->full_precision_tokens, s->max_rollback);
    printf("memory      %s packed, %s windows, %s tables\n", kvq__ctl_bytes(s->packed_bytes),
           kvq__ctl_bytes(s->window_bytes), kvq__ctl_bytes(s->table_bytes));
    if (s->shared_bytes)
        printf("shared      %s of the packed bytes are there once for several, %s are its own\n",
               kvq__ctl_bytes(s->shared_bytes), kvq__ctl_bytes(s->packed_bytes - s->shared_bytes));
    if (s->shared_unknown)
        printf("shared      not counted: the session has too many blocks to look at\n");
    if (s->exact_tokens)
        printf("prompt      read in 16 bits up to its end, at %s\n",
               kvq__ctl_count(s->exact_tokens, "token"));
    if (s->packs_early)
        printf("prompt      packed before its end, since others needed the room\n");
    if (s->prefix_tokens)
        printf("prefix      it began with %s that others had computed\n",
               kvq__ctl_count(s->prefix_tokens, "token"));
    print_size(s);
    if (s->saturated_values)
        printf("clamped     %s beyond the 16-bit range\n",
               kvq__ctl_count(s->saturated_values, "value"));
    print_shards(s);
    printf("state       %s\n", kvq__ctl_session_state(s));
}

int kvq__ctl_ask_session(struct kvq__ctl *ctl, char *name, const Kvq__Session **session)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__SessionInfo command = KVQ__SESSION_INFO__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, name);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_SESSION_INFO;
    request.session_info = &command;
    command.which_case = KVQ__SESSION_INFO__WHICH_REF;
    command.ref = &ref;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_SESSION, &reply);
    if (result == KVQ_EXIT_OK && session)
        *session = reply->session;
    return result;
}

int kvq__ctl_session_show(struct kvq__ctl *ctl, char **args)
{
    const Kvq__Session *session;
    int result = kvq__ctl_ask_session(ctl, args[0], &session);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&session->base);
    else
        print_session(session);
    return result;
}

int kvq__ctl_session_drop(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__DropSession command = KVQ__DROP_SESSION__INIT;
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_DROP_SESSION;
    request.drop_session = &command;
    command.which_case = KVQ__DROP_SESSION__WHICH_REF;
    command.ref = &ref;
    ref.name = args[0];
    if (ctl->ns)
        ref.namespace_ = (char *)ctl->ns;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
    if (result)
        return result;
    kvq__ctl_print_done(ctl, "dropped", args[0]);
    return KVQ_EXIT_OK;
}
