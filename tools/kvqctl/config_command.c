// SPDX-License-Identifier: Apache-2.0
// Commands about the daemon's configuration: get, set, reload.
#include <cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/json.h"
#include "tools/kvqctl/dry_run.h"
#include "tools/kvqctl/kvqctl.h"

static int at_least(int width, const char *text)
{
    int n = (int)strlen(text);
    return n > width ? n : width;
}

static void print_options(const Kvq__ConfigReply *r)
{
    int name = 6, value = 5, initial = 7, from = 11;
    for (size_t i = 0; i < r->n_options; i++) {
        name = at_least(name, r->options[i]->name);
        value = at_least(value, r->options[i]->value);
        initial = at_least(initial, r->options[i]->initial);
        from = at_least(from, r->options[i]->source);
    }
    value = value < 40 ? value : 40; // one long path does not push all others to the right
    initial = initial < 20 ? initial : 20;
    printf("%-*s  %-*s  %-*s  %-*s  %s\n", name, "OPTION", value, "VALUE", initial, "DEFAULT", from,
           "FROM", "TAKES EFFECT");
    for (size_t i = 0; i < r->n_options; i++) {
        const Kvq__ConfigOption *o = r->options[i];
        printf("%-*s  %-*s  ", name, kvq__ctl_clean(o->name), value, kvq__ctl_clean(o->value));
        printf("%-*s  %-*s  %s\n", initial, kvq__ctl_clean(o->initial), from,
               kvq__ctl_clean(o->source), o->live ? "live" : "restart");
    }
    if (r->file[0])
        printf("file: %s\n", kvq__ctl_clean(r->file));
}

int kvq__ctl_config_get(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__GetConfig command = KVQ__GET_CONFIG__INIT;
    Kvq__Reply *reply;
    if (args[0])
        command.name = args[0];
    request.command_case = KVQ__REQUEST__COMMAND_GET_CONFIG;
    request.get_config = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_CONFIG, &reply);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&reply->config->base);
    else
        print_options(reply->config);
    return KVQ_EXIT_OK;
}

static void print_changes(const char *title, Kvq__ConfigChange *const *changes, size_t n)
{
    if (n)
        printf("%s:\n", title);
    for (size_t i = 0; i < n; i++) {
        const Kvq__ConfigChange *c = changes[i];
        const char *before = c->before[0] ? kvq__ctl_clean(c->before) : "\"\"";
        const char *after = c->after[0] ? kvq__ctl_clean(c->after) : "\"\"";
        printf("  %s: %s to %s\n", kvq__ctl_clean(c->name), before, after);
    }
}

static void print_changes_json(const struct kvq__ctl *ctl, const Kvq__ConfigChanges *c)
{
    cJSON *json = kvq_json_of_message(&c->base);
    if (ctl->dry_run)
        cJSON_AddBoolToObject(json, "dry_run", true);
    kvq__ctl_print_and_free(json);
}

static int tell_changes(struct kvq__ctl *ctl, Kvq__Request *request, const char *nothing)
{
    Kvq__Reply *reply;
    bool dry = ctl->dry_run;
    int result = kvq__ctl_ask(ctl, request, KVQ__REPLY__RESULT_CONFIG_CHANGES, &reply);
    if (result)
        return result;
    const Kvq__ConfigChanges *c = reply->config_changes;
    if (ctl->json) {
        print_changes_json(ctl, c);
        return KVQ_EXIT_OK;
    }
    print_changes(dry ? "would be in effect" : "in effect", c->changed, c->n_changed);
    print_changes(dry ? "would need a restart of kvqd, and be as it is until then"
                      : "needs a restart of kvqd, and is as it was until then",
                  c->needs_restart, c->n_needs_restart);
    if (c->left_out)
        printf("and %" PRIu32 " more%s\n", c->left_out,
               dry ? "" : "; the daemon's log has the first of them");
    if (c->n_changed + c->n_needs_restart == 0)
        printf("%s\n", nothing);
    if (dry)
        printf("this was a dry run: nothing was done\n");
    return KVQ_EXIT_OK;
}

int kvq__ctl_config_set(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__SetConfig command = KVQ__SET_CONFIG__INIT;
    command.name = args[0];
    command.value = args[1];
    request.command_case = KVQ__REQUEST__COMMAND_SET_CONFIG;
    request.set_config = &command;
    return tell_changes(ctl, &request, "it had that value already");
}

int kvq__ctl_config_reload(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ReloadConfig command = KVQ__RELOAD_CONFIG__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_RELOAD_CONFIG;
    request.reload_config = &command;
    return tell_changes(ctl, &request, "nothing is new");
}

// A command of its own, as kvq__ctl_ask_import_look's, and for the same reason.
int kvq__ctl_preview_reload(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ReloadConfig command = KVQ__RELOAD_CONFIG__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LOOK_AT_RELOAD;
    request.look_at_reload = &command;
    return tell_changes(ctl, &request, "nothing is new");
}
