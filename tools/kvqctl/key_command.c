// SPDX-License-Identifier: Apache-2.0
// Keys for the daemon's control port: kvqctl key make, kvqctl key show. They ask no daemon.
#include <cJSON.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/key_file.h"
#include "tools/kvqctl/kvqctl.h"

// What is told of a key's file: nothing secret.
static void print_key(const struct kvq__ctl *ctl, const char *file, const struct kvq_key_file *key)
{
    char hex[KVQ_KEY_HEX], server[KVQ_KEY_HEX];
    const struct passwd *user = getpwuid(geteuid());
    kvq_key_to_hex(key->public_key, hex);
    kvq_key_to_hex(key->server, server);
    if (ctl->json) {
        cJSON *json = cJSON_CreateObject();
        cJSON_AddStringToObject(json, "file", file);
        cJSON_AddStringToObject(json, "public", hex);
        if (key->has_server)
            cJSON_AddStringToObject(json, "server", server);
        kvq__ctl_print_and_free(json);
    } else if (key->has_server) {
        printf("# For the configuration of the daemon; roles are read, operate and admin.\n"
               "[key %s]\npublic = %s\nrole = read\n",
               user ? user->pw_name : "NAME", hex);
    } else {
        printf("%s\n", hex);
    }
}

int kvq__ctl_key_make(struct kvq__ctl *ctl, char **args)
{
    struct kvq_key_file key;
    char text[KVQ_TEXT_BYTES] = "";
    int error = kvq_key_make(&key, text);
    if (error == 0 && ctl->server) {
        key.has_server = true;
        if (!kvq_key_from_hex(ctl->server, key.server)) {
            kvq_key_forget(&key);
            fprintf(stderr,
                    "kvqctl: --server is 64 hexadecimal digits, as kvqctl key show prints them for "
                    "the daemon's control_key_file, not '%s'\n",
                    kvq__ctl_clean(ctl->server));
            return KVQ_EXIT_USAGE;
        }
    }
    error = error ? error : kvq_key_write(args[0], &key, text);
    if (error)
        fprintf(stderr, "kvqctl: %s\n", kvq__ctl_clean(text));
    else
        print_key(ctl, args[0], &key);
    kvq_key_forget(&key);
    return error ? KVQ_EXIT_FAILED : KVQ_EXIT_OK;
}

int kvq__ctl_key_show(struct kvq__ctl *ctl, char **args)
{
    struct kvq_key_file key;
    char text[KVQ_TEXT_BYTES] = "";
    int error = kvq_key_read(args[0], &key, text);
    if (error)
        fprintf(stderr, "kvqctl: %s\n", kvq__ctl_clean(text));
    else
        print_key(ctl, args[0], &key);
    kvq_key_forget(&key);
    return error ? KVQ_EXIT_FAILED : KVQ_EXIT_OK;
}
