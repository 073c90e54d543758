// SPDX-License-Identifier: Apache-2.0
//
// Who has which role: uids and gids of the options, and sections [key NAME] of the file.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/config/internal.h"
#include "proto/key_file.h"
#include "proto/status.h"

static_assert(sizeof((struct kvq_config_key *)0)->public_key == KVQ_KEY_BYTES, "a key fits");

static const char *const role_names[] = {"none", "read", "operate", "admin"};
enum { N_ROLES = sizeof role_names / sizeof *role_names };

static const char *const keys[] = {"public", "role"};
enum { KEY_PUBLIC, KEY_ROLE, N_KEYS };

static const char nowhere[] = "";

const char *kvq__role_name(enum kvq__role role)
{
    assert((size_t)role < N_ROLES);
    return role_names[role];
}

// ---- Users ----

static bool has_id(const struct kvq_config_ids *ids, const uint32_t *wanted, uint32_t n)
{
    assert(ids->n <= KVQ_MAX_NAMESPACE_IDS);
    for (uint32_t i = 0; i < ids->n; i++)
        for (uint32_t k = 0; k < n; k++)
            if (ids->id[i] == wanted[k])
                return true;
    return false;
}

enum kvq__role kvq__config_role(const struct kvq_config *config, uint32_t uid, const uint32_t *gids,
                                uint32_t n_gids)
{
    if (has_id(&config->admin_uids, &uid, 1) || has_id(&config->admin_gids, gids, n_gids))
        return KVQ__ROLE_ADMIN;
    if (has_id(&config->operate_uids, &uid, 1) || has_id(&config->operate_gids, gids, n_gids))
        return KVQ__ROLE_OPERATE;
    if (has_id(&config->read_uids, &uid, 1) || has_id(&config->read_gids, gids, n_gids))
        return KVQ__ROLE_READ;
    return KVQ__ROLE_NONE;
}

// ---- Keys ----

const struct kvq_config_key *kvq__config_key_of(const struct kvq_config *config,
                                                const uint8_t *public_key)
{
    assert(config->n_keys <= KVQ_MAX_KEYS);
    for (uint32_t i = 0; i < config->n_keys; i++)
        if (memcmp(config->keys[i].public_key, public_key, KVQ_KEY_BYTES) == 0)
            return &config->keys[i];
    return NULL;
}

const struct kvq_config_key *kvq__config_key_find(const struct kvq_config *config, const char *name)
{
    assert(config->n_keys <= KVQ_MAX_KEYS);
    for (uint32_t i = 0; i < config->n_keys; i++)
        if (strcmp(config->keys[i].name, name) == 0)
            return &config->keys[i];
    return NULL;
}

const char *kvq__config_key_key(unsigned key)
{
    return key < N_KEYS ? keys[key] : NULL;
}

void kvq__config_key_value(char *out, size_t size, const struct kvq_config_key *k, unsigned key)
{
    char hex[KVQ_KEY_HEX];
    assert(key < N_KEYS);
    kvq_key_to_hex(k->public_key, hex);
    snprintf(out, size, "%s", key == KEY_PUBLIC ? hex : kvq__role_name(k->role));
}

static struct kvq_config_key *key_section(struct kvq_config *config, const char *name, char *text)
{
    struct kvq_config_key *k = (struct kvq_config_key *)kvq__config_key_find(config, name);
    if (k)
        return k;
    if (config->n_keys == KVQ_MAX_KEYS) {
        kvq__config_refuse(text, nowhere, "more than %d keys", KVQ_MAX_KEYS);
        return NULL;
    }
    if (!kvq__config_is_namespace(name)) {
        kvq__config_refuse(text, nowhere,
                           "[key %.48s]: a name is 1 to 37 characters of UTF-8 without blanks, "
                           "slashes or a # in front",
                           name);
        return NULL;
    }
    k = &config->keys[config->n_keys++];
    *k = (struct kvq_config_key){.role = KVQ__ROLE_READ};
    snprintf(k->name, sizeof k->name, "%s", name);
    return k;
}

static int take_role(struct kvq_config_key *k, const char *value, char *text)
{
    for (unsigned role = KVQ__ROLE_READ; role < N_ROLES; role++)
        if (kvq__same_name(role_names[role], value)) {
            k->role = (uint8_t)role;
            return 0;
        }
    return kvq__config_refuse(text, nowhere, "role is \"%.64s\"; allowed is read, operate, admin",
                              value);
}

int kvq__config_key_begin(struct kvq_config *config, const char *name, char *text)
{
    return key_section(config, name, text) ? 0 : KVQ_E_INVALID;
}

int kvq__config_key_line(struct kvq_config *config, const char *section, const char *name,
                         const char *value, uint8_t *set_here, char *text)
{
    unsigned key = 0;
    while (key < N_KEYS && !kvq__same_name(keys[key], name))
        key++;
    if (key == N_KEYS)
        return kvq__config_refuse(
            text, nowhere, "%.64s is not known in [%.64s]; known are public, role", name, section);
    struct kvq_config_key *k = key_section(config, section + strlen("key "), text);
    if (!k)
        return KVQ_E_INVALID;
    if (set_here[k - config->keys] & 1u << key)
        return kvq__config_refuse(text, nowhere, "%.64s is set twice; set it once", name);
    set_here[k - config->keys] |= (uint8_t)(1u << key);
    if (key == KEY_ROLE)
        return take_role(k, value, text);
    if (kvq_key_from_hex(value, k->public_key))
        return 0;
    return kvq__config_refuse(text, nowhere,
                              "public is \"%.80s\"; it has to be the 64 hexadecimal digits that "
                              "kvqctl key show FILE prints",
                              value);
}

int kvq__config_check_keys(const struct kvq_config *config, char *text)
{
    static const uint8_t none[KVQ_KEY_BYTES];
    if (config->control_address[0] && !config->control_key_file[0])
        return kvq__config_refuse(text, "control_key_file",
                                  "is empty; control_address needs the daemon's key, since nobody "
                                  "comes from another machine without one: kvqctl key make FILE");
    for (uint32_t i = 0; i < config->n_keys; i++) {
        const struct kvq_config_key *k = &config->keys[i];
        if (memcmp(k->public_key, none, sizeof none) == 0)
            return kvq__config_refuse(text, config->file, "[key %.64s] has no public", k->name);
        const struct kvq_config_key *first = kvq__config_key_of(config, k->public_key);
        if (first != k)
            return kvq__config_refuse(text, config->file,
                                      "[key %.64s] and [key %.64s] have the same public; a key "
                                      "has one name",
                                      first->name, k->name);
    }
    return 0;
}
