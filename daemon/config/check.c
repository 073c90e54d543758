// SPDX-License-Identifier: Apache-2.0
//
// What a start with this configuration would refuse, as far as it can be told without a start: for
// kvqd --print-config and `kvqctl config reload`, so that a configuration which both of them take
// is one that the daemon comes back with.
#include <assert.h>
#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/address.h"
#include "daemon/config/internal.h"
#include "daemon/config/machine.h"
#include "proto/key_file.h"
#include "proto/status.h"
#include "storage/remote.h"
#include "storage/store.h"

// What can be told without opening it; see kvq__jobs_remote_open.
int kvq__config_check_remote(const struct kvq_config *config, char *text)
{
    const char *const others[][2] = {{"remote_bucket", config->remote_bucket},
                                     {"remote_prefix", config->remote_prefix},
                                     {"remote_region", config->remote_region},
                                     {"remote_ca_file", config->remote_ca_file},
                                     {"remote_keys_file", config->remote_keys_file},
                                     {"remote_keys_section", config->remote_keys_section}};
    if (!config->remote_endpoint[0]) {
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
            if (others[i][1][0])
                return kvq__config_refuse(text, others[i][0],
                                          "is set, but remote_endpoint, which says where the "
                                          "store is, is not");
        return 0;
    }
    if (strchr(config->remote_endpoint, '@')) // not repeated: it may hold a password
        return kvq__config_refuse(text, "remote_endpoint",
                                  "holds a user's name; keys come from remote_keys_file or the "
                                  "environment");
    if (!config->remote_bucket[0])
        return kvq__config_refuse(text, "remote_bucket", "is empty; remote_endpoint needs one");
    if (!config->storage_dir[0])
        return kvq__config_refuse(text, "storage_dir",
                                  "is empty; what goes to and from remote_endpoint is saved "
                                  "there first");
    return 0;
}

// What the store's options say, as far as it can be told without its keys and without a request.
static int check_remote_names(const struct kvq_config *c, char *text)
{
    char why[KVQ_TEXT_BYTES];
    struct kvq_remote_options options = {.endpoint = c->remote_endpoint,
                                         .bucket = c->remote_bucket,
                                         .prefix = c->remote_prefix,
                                         .region = c->remote_region,
                                         .virtual_host = c->remote_virtual_host};
    if (!c->remote_endpoint[0] || kvq_remote_check(&options, why, sizeof why) == 0)
        return 0;
    return kvq__config_refuse(text, "remote store", "%.460s", why);
}

// The runtime directory is not looked at: the service manager may make it only for a start.
static int check_runtime(const struct kvq_config *c, char *text)
{
    if (!(c->runtime_mode & (S_IWGRP | S_IWOTH)))
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "runtime_mode = %04o lets others write to %.200s and so replace its sockets; take "
             "write from group and others (0750, 0755)",
             (unsigned)c->runtime_mode, c->runtime_dir);
    return KVQ_E_INVALID;
}

// A group may come from a directory service that starts later than kvqd.
static int check_group(const struct kvq_config *c, char *text)
{
    struct group group, *found = NULL;
    char memory[1 << 14];
    if (!c->runtime_group[0])
        return 0;
    int error = getgrnam_r(c->runtime_group, &group, memory, sizeof memory, &found);
    if (found || error == ERANGE) // there is one, of many
        return 0;
    if (error)
        return kvq__config_refuse(text, "runtime_group", "looking \"%.64s\" up: %s",
                                  c->runtime_group, strerror(error));
    return kvq__config_refuse(text, "runtime_group",
                              "\"%.64s\" is no group of this system (getent group lists them); "
                              "make it (groupadd), or name another",
                              c->runtime_group);
}

static int check_addresses(const struct kvq_config *c, char *text)
{
    struct kvq__listen_address address;
    if (c->http && c->http_address[0] &&
        (!kvq__listen_address_parse(c->http_address, &address) || !address.loopback))
        return kvq__config_refuse(
            text, "http_address",
            "\"%.100s\" has to be a loopback address and a port, as 127.0.0.1:9647 or "
            "[::1]:9647, or empty: what should be seen from other machines needs a proxy with TLS "
            "in front",
            c->http_address);
    if (c->control_address[0] && !kvq__listen_address_parse(c->control_address, &address))
        return kvq__config_refuse(text, "control_address",
                                  "\"%.100s\" has to be a numeric address and a port, as "
                                  "0.0.0.0:9648 or [::]:9648, or empty",
                                  c->control_address);
    return 0;
}

static int check_remote_files(const struct kvq_config *c, char *text)
{
    struct kvq_remote_keys keys;
    char why[KVQ_TEXT_BYTES];
    const char *section = c->remote_keys_section;
    if (c->remote_ca_file[0] && access(c->remote_ca_file, R_OK) != 0)
        return kvq__config_refuse(text, "remote_ca_file", "cannot read %.200s: %s",
                                  c->remote_ca_file, strerror(errno));
    if (!c->remote_keys_file[0]) // the environment of who asks now is not the service's
        return 0;
    int error = kvq_remote_keys_load(c->remote_keys_file, section[0] ? section : NULL, &keys, why,
                                     sizeof why);
    explicit_bzero(&keys, sizeof keys);
    return error ? kvq__config_refuse(text, "remote_keys_file", "%.400s", why) : 0;
}

int kvq__config_check_files(const struct kvq_config *c, char *text)
{
    struct kvq_key_file key;
    char why[KVQ_TEXT_BYTES];
    int error = check_group(c, text);
    error = error || !c->remote_endpoint[0] ? error : check_remote_files(c, text);
    if (error || !c->control_address[0])
        return error;
    error = kvq_key_read(c->control_key_file, &key, why);
    kvq_key_forget(&key);
    return error ? kvq__config_refuse(text, "control_key_file", "%.400s", why) : 0;
}

int kvq__config_check_memory(const struct kvq_config *c, char *text)
{
    struct kvq__machine machine;
    kvq__machine_read("", &machine);
    int error = kvq__machine_check(&machine, "pool_bytes", c->pool_bytes, c->pool_bytes, text);
    if (error == 0 && kvq__config_sets_buffer_bytes(c, &machine))
        error = kvq__machine_check(&machine, "buffer_bytes", c->buffer_bytes, 0, text);
    return error;
}

int kvq__config_check(const struct kvq_config *c, char *text)
{
    assert(c->pool_bytes > 0); // it was resolved
    if (c->storage_dir[0] && c->storage_bytes && c->storage_bytes < KVQ_STORE_MIN_CAP)
        return kvq__config_refuse(text, "storage_bytes",
                                  "%llu bytes are too few; allowed is %dmb and more, or 0 for no "
                                  "limit but the disk's",
                                  (unsigned long long)c->storage_bytes, KVQ_STORE_MIN_CAP >> 20);
    int error = check_runtime(c, text);
    error = error ? error : check_addresses(c, text);
    error = error ? error : check_remote_names(c, text);
    return error ? error : kvq__config_check_memory(c, text);
}
