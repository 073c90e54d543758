// SPDX-License-Identifier: Apache-2.0
//
// Changing the configuration while the daemon runs: which options can, in what two configurations
// differ, and what the core has of one. Thread-safe: every function touches only its arguments.
#ifndef KVQ_DAEMON_CONFIG_CHANGE_H
#define KVQ_DAEMON_CONFIG_CHANGE_H

#include "daemon/config/config.h"

enum { KVQ_OPTION_VALUE = KVQ_CONFIG_GPUS + 16, KVQ_OPTION_NAME = KVQ_NAME_BYTES + 48 };

// An option of a configuration, as text.
struct kvq__option_text {
    const char *name;
    char source[KVQ_CONFIG_NAME + 16]; // default, file, conf.d/NAME, environment, flag, command
    bool live;                         // it can change while the daemon runs
    char value[KVQ_OPTION_VALUE], initial[KVQ_OPTION_VALUE];
};
// The option of that number, from 0 on. False: there are no more.
bool kvq__config_option(const struct kvq_config *config, uint32_t number,
                        struct kvq__option_text *out);
// The number of the option of that name. KVQ_E_INVALID, with the nearest name in text.
int kvq__config_find(const char *name, char *text);

// One difference: of an option, of a key of a namespace (as "[namespace team-a] host_bytes"),
// or of a whole section ("[namespace team-a]", which is "not there" or "there"); of keys likewise.
struct kvq__config_change {
    char name[KVQ_OPTION_NAME];
    char before[KVQ_OPTION_VALUE], after[KVQ_OPTION_VALUE];
    bool live;
};
// Calls tell() for each difference of two resolved configurations.
void kvq__config_compare(const struct kvq_config *before, const struct kvq_config *after,
                         void (*tell)(void *context, const struct kvq__config_change *change),
                         void *context);

// Makes of `next` what the running daemon can have of it: options that need a restart become as
// they are in `running`, and namespaces that are no more in `next` stay. KVQ_E_INVALID with a text
// if these are too many together.
int kvq__config_merge(struct kvq_config *next, const struct kvq_config *running, char *text);
// Then: the running one gets its live options, namespaces and keys. Its other options and its
// formats are not written to: other threads may read them.
void kvq__config_adopt(struct kvq_config *running, const struct kvq_config *next);
// Sets a live option. KVQ_E_INVALID with a text, and nothing has changed.
int kvq__config_set(struct kvq_config *config, const char *name, const char *value, char *text);

// What the core has of it, in memory that the caller frees with free(); it points into config.
// NULL: no memory.
struct kvq__core_settings *kvq__config_settings(const struct kvq_config *config);

#endif
